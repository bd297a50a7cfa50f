"""An estimate in words, as one line of a table, and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cli.output import OutputColumn, TableFormat, emit_table, write_page
from paceline.cli.terminal import echo
from paceline.core.units import count, counted, days, gib, percent, si, step_seconds
from paceline.estimate.answer import Estimate, MeasuredStep
from paceline.estimate.costs import Bill, Saving
from paceline.estimate.elasticity import Elasticity
from paceline.estimate.headline import (
    NO_LENGTH,
    TO_TARGET,
    beside_line,
    energy,
    headline,
    money,
    offer_heads,
    offer_table,
    rates,
    setup,
    speed_unit,
)
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.offers import Against
from paceline.estimate.trace import Tracing
from paceline.mlperf.time_to_train import TimeToTrain

LEAST_ELASTICITY = 0.005


class Answer(NamedTuple):
    """Estimates, all but the first held against it, and what was asked for besides, one of each."""

    found: list[Estimate]
    beside: list[Against] = []
    tracings: list[Tracing] = []
    elasticities: list[tuple[Elasticity, ...]] = []
    times: list[TimeToTrain] = []


def _offer_columns(first: Estimate) -> list[OutputColumn]:
    return [
        OutputColumn(head, head, justify="left" if head == "offer" else "right")
        for head in offer_heads(first)
    ]


def flat(estimate: Estimate) -> dict[str, Any]:
    """The estimate's figures side by side, for csv and md."""
    content = estimate.model_dump(mode="json")
    parts, costs = content.pop("parts"), content.pop("bill") or {}
    memory = content.pop("memory_bytes")
    content |= {
        f"memory_{name}_bytes": memory[name] for name in ("allocated", "reserved", "device_used")
    }
    content["notes"] = "; ".join(content["notes"])
    del content["waterfall"]
    measured = content.pop("measured") or {}
    content |= {
        f"measured_{name}": measured.get(name) for name in ("step_time_s", "ratio", "in_interval")
    }
    content |= {f"{name}_rests_on": kind for name, kind in content.pop("evidence").items()}
    saving = costs.pop("checkpoints", None) or {}
    saving = {f"checkpoint_{name}": value for name, value in saving.items() if name != "goodput"}
    return {**content, **{f"{name}_s": value for name, value in parts.items()}, **costs, **saving}


def text(estimate: Estimate, timed: bool = False) -> str:
    """All that is known of one offer, a line a subject; `timed` where its time to train follows."""
    shown = sorted(estimate.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{name} {percent(value / estimate.step_time_s, 1)}"
        for name, value in shown
        if value >= 0.005 * estimate.step_time_s
    )
    last = estimate.waterfall[-1].name
    share = "MFU unknown" if estimate.mfu is None else f"MFU {percent(estimate.mfu, 1)}"
    lines = [
        setup(estimate),
        f"  {headline(estimate)}",
        *([f"  {_measured_line(estimate.measured)}"] if estimate.measured else []),
        f"  {' · '.join(rates(estimate))} · "
        f"{si(estimate.flops_per_s_per_device, 'FLOP/s')} a device · {share} "
        f"({estimate.convention})",
        f"  of the step: {shares}",
        f"  peak to {last.replace('estimated', 'estimate')} ({estimate.convention}): "
        f"{_levels(estimate)}",
        f"  {_memory_line(estimate)}",
    ]
    lines += [f"  {line}" for line in _whole_lines(estimate, timed)]
    lines += [f"  note: {note}" for note in estimate.notes]
    basis = estimate.evidence.model_dump()
    lines.append(f"  rests on: {basis.pop('title')}")
    kinds = [f"{name.replace('_', ' ')}: {kind}" for name, kind in basis.items()]
    return "\n".join([*lines, f"  {', '.join(kinds)}"])


def _measured_line(measured: MeasuredStep) -> str:
    """What was measured, of what, and how far the estimate is off."""
    of = "" if measured.n is None else f", median of {counted(measured.n, 'step')}"
    spread = "" if measured.spread is None else f", spread {percent(measured.spread, 1)}"
    where = "in" if measured.in_interval else "outside"
    return (
        f"measured {step_seconds(measured.step_time_s)} s ({measured.source}{of}{spread}): "
        f"{measured.ratio:.3f} of the estimate, {where} the 80 % interval"
    )


def _levels(estimate: Estimate) -> str:
    """What is left of the peak after each cause, in turn."""
    return ", ".join(f"{level.name} {percent(level.share, 1)}" for level in estimate.waterfall)


def _memory_line(estimate: Estimate) -> str:
    used, chance = estimate.memory_bytes, "unknown size"
    if estimate.p_oom is not None:
        chance = f"P(out of memory) {percent(estimate.p_oom, 0)}: {verdict(estimate.p_oom)}"
    return (
        f"memory of the fullest device {gib(used.device_used)} (allocated {gib(used.allocated)}, "
        f"reserved {gib(used.reserved)}) · {chance}"
    )


def trace_lines(tracing: Tracing) -> list[str]:
    """The followed ranks, most needy first."""
    lines: list[str] = []
    for stage in sorted(tracing.stages, key=lambda stage: -stage.trace.peak_bytes):
        parts = sorted(stage.trace.at_peak_bytes.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {gib(value)}" for name, value in parts if value)
        lines.append(
            f"followed rank {stage.trace.rank} of {tracing.devices} (native trainer, "
            f"{stage.trace.kernels} kernels, live tensors): {gib(stage.trace.peak_bytes)} = "
            f"{shown}; the formulas say {gib(stage.estimated_bytes)}, "
            f"{percent(abs(stage.ratio - 1), 1)} {'more' if stage.ratio > 1 else 'less'}"
        )
    return lines


def time_line(time: TimeToTrain) -> str:
    """A benchmark's time to train, and what it is made of."""
    return (
        f"{time.benchmark} of round {time.ruleset} to its target: {time.minutes:.3g} minutes "
        f"({time.low_minutes:.3g} to {time.high_minutes:.3g}, 80 % of single runs), "
        f"{time.samples:,.0f} samples (reference runs scatter by {time.samples_stdev:,.0f}), "
        f"{counted(time.num_evaluations, 'evaluation')} of {time.evaluation_s:.3g} s; {time.label}"
    )


def elasticity_line(elasticities: Sequence[Elasticity], unit: str) -> str:
    """What would help most, without what hardly does."""
    shown = [
        f"{each.figure} {each.elasticity:.2f} ({each.low:.2f} to {each.high:.2f})"
        for each in elasticities
        if each.elasticity >= LEAST_ELASTICITY
    ]
    return f"1 % faster brings so many % more {unit} (80 %): {', '.join(shown)}"


def _whole_lines(estimate: Estimate, timed: bool) -> Iterable[str]:
    """What the whole training takes, and how to say its length where nobody does."""
    without = () if timed else (TO_TARGET if estimate.to_target else NO_LENGTH,)
    return without if estimate.bill is None else _bill_lines(estimate, estimate.bill)


def _bill_lines(estimate: Estimate, costs: Bill) -> list[str]:
    parts = [days(costs.days), f"{costs.device_hours:,.0f} device hours"]
    if costs.goodput is not None:
        parts.append(f"goodput {percent(costs.goodput, 1)}")
    if costs.cost is not None:
        parts.append(f"cost {money(estimate)}")
    if costs.spot_cost is not None:
        parts.append(f"spot {costs.spot_cost:,.0f}")
    parts.append(energy(estimate))
    if costs.carbon_kg is not None:
        parts.append(f"{costs.carbon_kg:,.0f} kg CO2")
    lines = [f"{count(costs.total_tokens)} tokens: {', '.join(parts)}"]
    return lines + ([_saving_line(costs.checkpoints)] if costs.checkpoints else [])


def _saving_line(saving: Saving) -> str:
    """How often the state is saved, and what Young's interval would leave."""
    interval, young = (_seconds(s) for s in (saving.interval_s, saving.young_interval_s))
    if saving.interval_s == saving.young_interval_s:
        return f"a checkpoint every {interval} of training (Young's interval, which loses least)"
    return (
        f"a checkpoint every {interval} of training; every {young} (Young's interval) "
        f"the goodput would be {percent(saving.young_goodput, 1)}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def emit(answer: Answer, form: TableFormat) -> None:
    """Print the estimates, and beside them what was compared, followed and varied."""
    estimates, beside = answer.found, answer.beside
    rows = [flat(estimate) for estimate in estimates]
    for row, by_figure in zip(rows, answer.elasticities, strict=False):
        named = {each.figure.replace(" ", "_"): each.elasticity for each in by_figure}
        row |= {f"elasticity_{name}": named[name] for name in sorted(named)}
    if form is TableFormat.json:
        documents = _documents(answer)
        emit_table(rows, [], form, document={"offers": documents} if beside else documents[0])
        return
    if form is not TableFormat.text:
        emit_table(rows, [OutputColumn(key, key) for key in rows[0]], form)
        return
    if beside:
        for estimate, offer in zip(estimates[1:], beside, strict=True):
            echo(beside_line(estimates[0], estimate, offer))
        emit_table(offer_table(estimates, beside), _offer_columns(estimates[0]), form)
        echo("")
    for at, estimate in enumerate(estimates):
        echo(text(estimate, timed=bool(answer.times)))
        lines = [*map(time_line, answer.times[at : at + 1])]
        unit = speed_unit(estimate)
        lines += [elasticity_line(each, unit) for each in answer.elasticities[at : at + 1]]
        lines += [line for tracing in answer.tracings[at : at + 1] for line in trace_lines(tracing)]
        echo("\n".join(f"  {line}" for line in lines))


def _documents(answer: Answer) -> list[dict[str, Any]]:
    documents = [estimate.model_dump(mode="json") for estimate in answer.found]
    for document, offer in zip(documents[1:], answer.beside, strict=True):
        document |= {
            f"{name}_ratio": getattr(offer, name)._asdict()
            for name in ("step_time", "tokens_per_s", "cost")
            if getattr(offer, name) is not None
        }
    for document, tracing in zip(documents, answer.tracings, strict=False):
        document["trace"] = tracing.model_dump(mode="json")
    for document, time in zip(documents, answer.times, strict=False):
        document["time_to_train"] = time.model_dump(mode="json")
    for document, by_figure in zip(documents, answer.elasticities, strict=False):
        document["elasticities"] = [each.model_dump(mode="json") for each in by_figure]
    return documents


def write_estimate_page(answer: Answer, path: Path) -> None:
    """The page of an estimate or of offers; raises SystemFaultError if it cannot be written."""
    # Altair below it takes as long to import as the rest of the verb.
    from paceline.estimate.page import estimate_html

    texts = [text(each, timed=bool(answer.times)) for each in answer.found]
    for at, time in enumerate(answer.times):
        texts[at] += f"\n{time_line(time)}"
    write_page(path, estimate_html(answer.found, answer.beside, texts, answer.elasticities))
