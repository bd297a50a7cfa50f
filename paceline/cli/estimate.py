"""`paceline estimate`: how fast a recipe would train on devices that nobody has here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import Column, TableForm, TableFormat, emit_table

if TYPE_CHECKING:
    from paceline.estimating import Estimate, Question

MONEY, FAILING = "Cost", "Failures"


def estimate(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe, or a YAML file.", metavar="RECIPE")
    ],
    device: Annotated[str, typer.Option(help="A device of `paceline devices`, e.g. H100.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES", help="Layout instead of the recipe's: tp=4,pp=4,zero_stage=1."
        ),
    ] = None,
    variant: Annotated[str | None, typer.Option(help="A variant that the recipe defines.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OFFER",
            help="Another offer beside it: device=B200,gpus=32,price=4. What is left out is as in "
            "the first. Repeatable.",
        ),
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    intra: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link inside a node, e.g. NVLink4.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar="LINK", help="Network, e.g. InfiniBand-NDR.")
    ] = None,
    stack: Annotated[
        str,
        typer.Option(
            help="fused (Transformer Engine, Megatron core), torch (PyTorch's modules, FSDP) or "
            "softmax (Megatron of 2020-22)."
        ),
    ] = "fused",
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
    evidence: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Coefficients of a calibrated machine, not the shipped ones."
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Estimate step time, throughput, days, money and energy of a recipe, with an 80 % interval.

    Examples:

      paceline estimate llama31-70b --device H100 --gpus 1024

      paceline estimate llama31-70b --device H100 --gpus 1024 --layout tp=8,pp=4,vp=5 --price 2.5

      paceline estimate llama31-8b --device H100 --gpus 64 --compare device=B200,gpus=32

    The time is the sum of what a step does: products, attention, memory traffic, exchanges, bubble,
    optimizer, host, jitter (docs/estimate.md). Nothing runs.
    """
    from math import isfinite

    from paceline.core.offers import Failures, Prices
    from paceline.errors import UserError
    from paceline.estimate.evidence import read_evidence, shipped
    from paceline.estimating import Question, ratio
    from paceline.estimating import estimate as estimated

    if stack not in ("fused", "torch", "softmax"):
        raise typer.BadParameter("must be fused, torch or softmax", param_hint="--stack")
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
    question = Question(
        recipe, device, gpus, variant, (*axes, *(overrides or ())), per_node, intra, inter,
        stack, compiled, tokens, prices, failures,  # type: ignore[arg-type]
    )  # fmt: skip
    rests_on = read_evidence(evidence) if evidence else shipped()
    questions = [question, *(_offer(question, text) for text in compare or ())]
    found = [estimated(one, rests_on) for one in questions]
    ratios = [ratio(question, other, rests_on) for other in questions[1:]]
    form = TableFormat.json if as_json else form
    _emit(found, ratios, form)


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
    found: list[Estimate], ratios: list[tuple[float, float, float]], form: TableFormat
) -> None:
    rows = [_flat(one) for one in found]
    if form is TableFormat.json:
        documents = [one.model_dump(mode="json") for one in found]
        for document, (value, low, high) in zip(documents[1:], ratios, strict=True):
            document["step_time_ratio"] = {"value": value, "low": low, "high": high}
        emit_table(rows, [], form, document=documents if ratios else documents[0])
        return
    if form is not TableFormat.text:
        emit_table(rows, [Column(key, key) for key in rows[0]], form)
        return
    for one in found:
        typer.echo(_text(one))
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
        f"  {_memory_line(one)}",
    ]
    lines += [f"  {line}" for line in _bill_lines(one)]
    lines += [f"  note: {note}" for note in one.notes]
    return "\n".join([*lines, f"  rests on: {one.evidence}"])


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
