"""`paceline estimate`: how fast a recipe would train on devices that nobody has here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import model_options as model
from paceline.cli.options import Json
from paceline.cli.output import Column, TableForm, TableFormat, emit_table

if TYPE_CHECKING:
    from paceline.estimating import Estimate, Question
    from paceline.tracing import Tracing

MONEY, FAILING = "Cost", "Failures"


def estimate(
    recipe: model.Recipe,
    device: model.DeviceName,
    gpus: model.Gpus,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES", help="Layout instead of the recipe's: tp=4,pp=4,zero_stage=1."
        ),
    ] = None,
    variant: model.Variant = None,
    overrides: model.Overrides = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OFFER",
            help="Another offer beside it: device=B200,gpus=32,price=4. What is left out is as in "
            "the first. Repeatable.",
        ),
    ] = None,
    per_node: model.PerNode = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    stack: model.StackName = "fused",
    compiled: Annotated[bool, typer.Option("--compiled", help="With torch.compile.")] = False,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens of the whole training, e.g. 15e12.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Of a device hour.", rich_help_panel=MONEY)
    ] = None,
    spot_price: Annotated[
        float | None,
        typer.Option(min=0, help="Of an interruptible device hour.", rich_help_panel=MONEY),
    ] = None,
    pue: Annotated[
        float,
        typer.Option(min=1, help="The site's energy over its machines'.", rich_help_panel=MONEY),
    ] = 1.0,
    carbon: Annotated[
        float | None,
        typer.Option(min=0, metavar="G_PER_KWH", help="Of the electricity.", rich_help_panel=MONEY),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            min=1, metavar="HOURS", help="Between failures of one device.", rich_help_panel=FAILING
        ),
    ] = None,
    restart: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="After a failure.", rich_help_panel=FAILING),
    ] = 600.0,
    checkpoint: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="A checkpoint keeps waiting.", rich_help_panel=FAILING
        ),
    ] = 30.0,
    evidence: model.EvidenceFile = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page with the way from the peak to the estimate."
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also follow a step of the native trainer on tensors without memory, for the memory of "
            "its ranks; takes a minute.",
        ),
    ] = False,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Estimate step time, throughput, days, money and energy of a recipe, with an 80 % interval.

    Examples:

      paceline estimate llama31-70b --device H100 --gpus 1024

      paceline estimate llama31-70b --device H100 --gpus 1024 --layout tp=8,pp=4,vp=5 --price 2.5

      paceline estimate llama31-8b --device H100 --gpus 64 --compare device=B200,gpus=32 --html offers.html

    The time is the sum of what a step does: products, attention, memory traffic, exchanges, bubble,
    optimizer, host, jitter (docs/estimate.md). Nothing runs.
    """
    from dataclasses import replace
    from math import isfinite

    from paceline.core.offers import Failures, Prices
    from paceline.errors import UserError
    from paceline.estimating import estimate as estimated
    from paceline.estimating import ratio

    axes = [f"layout.{axis.strip()}" for axis in (layout or "").split(",") if axis.strip()]
    for name, value in (("--tokens", tokens), ("--price", price), ("--spot-price", spot_price),
                        ("--pue", pue), ("--carbon", carbon), ("--mtbf", mtbf),
                        ("--restart", restart), ("--checkpoint", checkpoint)):  # fmt: skip
        if value is not None and not isfinite(value):
            raise typer.BadParameter("must be a finite number", param_hint=name)
    if any("=" not in axis for axis in axes):
        raise UserError(f"--layout {layout}", "is not AXIS=N,...", allowed="tp=4,pp=4,zero_stage=1")
    failures = (
        None
        if mtbf is None
        else Failures(device_mtbf_h=mtbf, restart_s=restart, checkpoint_s=checkpoint)
    )
    prices = Prices(per_device_hour=price, spot_per_device_hour=spot_price, pue=pue,
                    carbon_g_per_kwh=carbon)  # fmt: skip
    asked = model.question(
        recipe, device, gpus, stack, variant=variant, overrides=(*axes, *(overrides or ())),
        per_node=per_node, intra=intra, inter=inter,
    )  # fmt: skip
    question = replace(asked, compiled=compiled, tokens=tokens, prices=prices, failures=failures)
    questions = [question, *(_offer(question, text) for text in compare or ())]
    rests_on = [model.evidence_of(evidence, one) for one in questions]
    found = [estimated(*one) for one in zip(questions, rests_on, strict=True)]
    ratios = [
        ratio(question, other, rests_on[0], own)
        for other, own in zip(questions[1:], rests_on[1:], strict=True)
    ]
    tracings = [_traced(one) for one in questions] if trace else []
    form = TableFormat.json if as_json else form
    _emit(found, ratios, tracings, form)
    if html:
        _write_page(found, html)


def _traced(question: Question) -> Tracing:
    """The memory of one offer, followed; says so, because it takes a while."""
    from paceline.tracing import trace

    typer.echo(f"following a step on {question.devices} x {question.device}", err=True)
    return trace(question)


def _write_page(found: list[Estimate], path: Path) -> None:
    """The page of one estimate or several offers; raises SystemFaultError where it cannot be written."""
    from paceline.errors import SystemFaultError
    from paceline.report.waterfall import estimate_html
    from paceline.rundir import write_text

    setup = list(dict.fromkeys(f"{one.devices} x {one.device} · {one.dtype}" for one in found))
    offers = [(f"{one.devices} x {one.device}, {one.layout}", one.waterfall) for one in found]
    notes = [line.strip() for one in found for line in _text(one).splitlines()]
    try:
        write_text(path, estimate_html(found[0].recipe, setup, offers, notes))
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    typer.echo(f"page: {path}", err=True)


def _offer(first: Question, text: str) -> Question:
    """The question with an offer's changes; raises UserError for what is no offer."""
    from dataclasses import replace
    from math import isfinite

    from paceline.errors import UserError

    kinds = {
        "device": str,
        "gpus": int,
        "price": float,
        "per_node": int,
        "intra": str,
        "inter": str,
    }
    names = {
        "gpus": "devices",
        "per_node": "devices_per_node",
        "intra": "intra_link",
        "inter": "inter_link",
    }
    changes: dict[str, Any] = {}
    least = {"gpus": 1, "per_node": 1, "price": 0}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        try:
            changes[key] = kinds[key](value)
            if key in least and not (isfinite(changes[key]) and changes[key] >= least[key]):
                raise ValueError
        except (KeyError, ValueError) as error:
            raise UserError(f"--compare {text}", f"{part!r} cannot be read",
                            allowed=", ".join(kinds)) from error  # fmt: skip
    price = changes.pop("price", None)
    if price is not None:
        changes["prices"] = first.prices.model_copy(update={"per_device_hour": price})
    return replace(first, **{names.get(key, key): value for key, value in changes.items()})


def _emit(
    found: list[Estimate],
    ratios: list[tuple[float, float, float]],
    tracings: list[Tracing],
    form: TableFormat,
) -> None:
    rows = [_flat(one) for one in found]
    if form is TableFormat.json:
        documents = [one.model_dump(mode="json") for one in found]
        for document, (value, low, high) in zip(documents[1:], ratios, strict=True):
            document["step_time_ratio"] = {"value": value, "low": low, "high": high}
        for document, tracing in zip(documents, tracings, strict=False):
            document["trace"] = tracing.model_dump(mode="json")
        emit_table(rows, [], form, document={"offers": documents} if ratios else documents[0])
        return
    if form is not TableFormat.text:
        emit_table(rows, [Column(key, key) for key in rows[0]], form)
        return
    for at, one in enumerate(found):
        typer.echo(_text(one))
        typer.echo(
            "\n".join(
                f"  {line}" for tracing in tracings[at : at + 1] for line in _trace_lines(tracing)
            )
        )
    for one, (value, low, high) in zip(found[1:], ratios, strict=True):
        typer.echo(
            f"{one.devices} x {one.device}: step time {value:.2f} ({low:.2f}-{high:.2f}) of "
            f"{found[0].devices} x {found[0].device}'s"
        )


def _flat(one: Estimate) -> dict[str, Any]:
    content = one.model_dump(mode="json")
    parts, costs = content.pop("parts"), content.pop("bill") or {}
    memory = content.pop("memory_bytes")
    content |= {
        f"memory_{name}_bytes": memory[name] for name in ("allocated", "reserved", "device_used")
    }
    content["notes"] = "; ".join(content["notes"])
    del content["waterfall"]
    content |= {f"{name}_rests_on": kind for name, kind in content.pop("evidence").items()}
    return {**content, **{f"{name}_s": value for name, value in parts.items()}, **costs}


def _text(one: Estimate) -> str:
    from paceline.units import percent, si

    shown = sorted(one.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{name} {percent(value / one.step_time_s, 1)}"
        for name, value in shown
        if value >= 0.005 * one.step_time_s
    )
    share = "MFU unknown" if one.mfu is None else f"MFU {percent(one.mfu, 1)}"
    lines = [
        f"{one.recipe} · {one.devices} x {one.device} · {one.dtype} · {one.layout} · {one.stack}",
        f"  step {one.step_time_s:.4g} s   80 % interval {one.low_s:.4g}-{one.high_s:.4g} s",
        f"  {one.tokens_per_s:,.0f} tokens/s · {one.samples_per_s:.4g} samples/s · "
        f"{si(one.flops_per_s_per_device, 'FLOP/s')} a device · {share} ({one.convention})",
        f"  of the step: {shares}",
        f"  peak to estimate: {_waterfall_line(one)}",
        f"  {_memory_line(one)}",
    ]
    lines += [f"  {line}" for line in _bill_lines(one)]
    lines += [f"  note: {note}" for note in one.notes]
    basis = one.evidence.model_dump()
    lines.append(f"  rests on: {basis.pop('title')}")
    kinds = [f"{name.replace('_', ' ')}: {kind}" for name, kind in basis.items()]
    return "\n".join([*lines, f"  {', '.join(kinds)}"])


def _waterfall_line(one: Estimate) -> str:
    """What is left of the peak after each cause, in turn."""
    from paceline.units import percent

    return ", ".join(f"{level.name} {percent(level.share, 1)}" for level in one.waterfall)


def _memory_line(one: Estimate) -> str:
    from paceline.estimate.memory import verdict
    from paceline.units import gib, percent

    used, chance = one.memory_bytes, "unknown size"
    if one.p_oom is not None:
        chance = f"P(out of memory) {percent(one.p_oom, 0)}: {verdict(one.p_oom)}"
    return (
        f"memory of the fullest device {gib(used.device_used)} (allocated {gib(used.allocated)}, "
        f"reserved {gib(used.reserved)}) · {chance}"
    )


def _trace_lines(tracing: Tracing) -> list[str]:
    """The followed ranks, most needy first."""
    from paceline.units import gib, percent

    told: list[str] = []
    for one in sorted(tracing.stages, key=lambda stage: -stage.trace.peak_bytes):
        parts = sorted(one.trace.at_peak_bytes.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {gib(value)}" for name, value in parts if value)
        told.append(
            f"followed rank {one.trace.rank} of {tracing.devices} (native trainer, {one.trace.kernels} "
            f"kernels, live tensors): {gib(one.trace.peak_bytes)} = {shown}; the formulas say "
            f"{gib(one.estimated_bytes)}, {percent(abs(one.ratio - 1), 1)} {'more' if one.ratio > 1 else 'less'}"
        )
    return told


def _bill_lines(one: Estimate) -> list[str]:
    from paceline.units import count, percent

    costs = one.bill
    if costs is None:
        return []
    told = [f"{costs.days:,.1f} days", f"{costs.device_hours:,.0f} device hours"]
    if costs.goodput is not None:
        told.append(f"goodput {percent(costs.goodput, 1)}")
    if costs.cost is not None:
        told.append(f"cost {costs.cost:,.0f}")
    if costs.spot_cost is not None:
        told.append(f"spot {costs.spot_cost:,.0f}")
    if costs.energy_kwh is not None:
        told.append(f"at most {costs.energy_kwh:,.0f} kWh")
    if costs.carbon_kg is not None:
        told.append(f"{costs.carbon_kg:,.0f} kg CO2")
    return [f"{count(costs.total_tokens)} tokens: {', '.join(told)}"]
