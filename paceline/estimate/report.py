"""Report of an estimate: step time, throughput, cost, memory and the MFU waterfall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.layout import layout_label
from paceline.core.result import WaterfallLevel
from paceline.core.text import one_line
from paceline.core.units import (
    compact,
    count,
    day_count,
    days,
    gib,
    percent,
    pluralize,
    si,
    step_seconds,
)
from paceline.core.value import Value
from paceline.estimate.calibrate.lookup import is_cpu
from paceline.estimate.costs import CheckpointPlan
from paceline.estimate.fit.origin import ANY
from paceline.estimate.measured_step import measured_sentence
from paceline.estimate.memory.device_memory import verdict
from paceline.estimate.memory_trace import MemoryTrace
from paceline.estimate.scenarios import Elasticity, Ratio, ScenarioComparison
from paceline.estimate.single_estimate import Estimate
from paceline.report.document import (
    UNKNOWN,
    Column,
    Document,
    Figure,
    Notes,
    Row,
    Section,
    Table,
    Tone,
    Verdict,
    unknown_figure,
)

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

TONES: dict[str, Tone] = {"fits": "good", "borderline": "plain", "out of memory": "alert"}
UNKNOWN_LENGTH_REASON = "the recipe has no number of tokens; set --tokens"
TRAINS_TO_TARGET_REASON = "the recipe trains to a quality target; set --mlperf ROUND or --tokens"
ELASTICITY_COLUMNS = (
    Column("figure", "property"),
    Column("value", "value", justify="right"),
    Column("elasticity", "elasticity", "{:.3f}".format, "right"),
    Column("interval", "80% interval", justify="right"),
    Column("doubled", "step time if doubled", justify="right"),
)
LEVEL_COLUMNS = (
    Column("name", "cause"),
    Column("points", "change", lambda points: f"{100 * points:+.1f} points", "right"),
    Column("share", "left of the peak", lambda share: percent(share, 1), "right"),
    Column("rate", "FLOP/s per device", lambda rate: si(rate, "FLOP/s"), "right"),
    Column("seconds", "seconds per step", step_seconds, "right"),
)


@dataclass(frozen=True)
class EstimateOutput:
    """Estimates of one or more scenarios, and optional results for each of them."""

    estimates: Sequence[Estimate]
    comparisons: Sequence[ScenarioComparison] = ()
    memory_traces: Sequence[MemoryTrace] = ()
    elasticities: Sequence[Sequence[Elasticity]] = ()
    advice: Sequence[str] = ()
    """Sentences on layouts, devices or tokens that answer the request."""
    alternative: Estimate | None = None
    """The nearest training that fits, if the requested one does not."""
    times: Sequence[tuple[str, Value]] = ()
    """Time to train of a benchmark, as a sentence and as a value."""


def estimate_document(output: EstimateOutput) -> Document:
    """Return the report of one estimate, or of scenarios compared with the first."""
    first, names = output.estimates[0], scenario_names(output.estimates)
    fits = None if first.p_oom is None else verdict(first.p_oom)
    return Document(
        kind="estimate and measured step" if first.measured else "estimate",
        title=f"{first.recipe} on {place(first)}",
        verdict=Verdict(fit_label(first), TONES.get(fits or "", "plain")),
        setup=setup(first),
        answer=_answer(output),
        figures=(
            _memory_figure(first),
            _throughput_figure(first),
            _step_figure(first),
            _mfu_figure(first),
            _training_figure(first, has_time_to_train=bool(output.times)),
            *_cost_figure(first),
        ),
        sections=tuple(_sections(output, names)),
        notes=_notes(output.estimates),
        charts=lambda theme: _charts(output.estimates, names, theme),
        data=_documents(output),
        csv=_csv(output),
    )


def scenario_names(estimates: Sequence[Estimate]) -> list[str]:
    """Return recipe, devices and layout of each estimate, with what differs if they are equal."""
    names = _distinct(
        [f"{each.recipe} on {place(each)}, {each.layout}" for each in estimates], estimates
    )
    counts = Counter(names)
    return [
        one_line(f"{name}, scenario {number}" if counts[name] > 1 else name)
        for number, name in enumerate(names, start=1)
    ]


def scenario_labels(estimates: Sequence[Estimate]) -> list[str]:
    """Return the devices of each estimate, with what differs if they are equal."""
    return _distinct([place(each) for each in estimates], estimates)


def _distinct(names: Sequence[str], estimates: Sequence[Estimate]) -> list[str]:
    """Return the names; equal ones are extended by the settings that differ."""
    return [
        ", ".join(
            [
                name,
                *_differing(each, [e for n, e in zip(names, estimates, strict=True) if n == name]),
            ]
        )
        for name, each in zip(names, estimates, strict=True)
    ]


def _differing(estimate: Estimate, others: Sequence[Estimate]) -> Iterator[str]:
    """Yield the settings of an estimate in which it differs from one of the others."""
    for setting, values in zip(setup(estimate), zip(*map(setup, others), strict=True), strict=True):
        if len(set(values)) > 1:
            yield setting


def place(estimate: Estimate) -> str:
    """Return the number and name of the devices: `1,024 x H100-SXM`."""
    return f"{estimate.devices:,} x {estimate.device}"


def setup(estimate: Estimate) -> tuple[str, ...]:
    """Return dtype, layout, sequence length, batch size and software."""
    has_name = estimate.software not in (ANY, estimate.implementation)
    software = (
        f"{estimate.software} ({estimate.implementation})" if has_name else estimate.implementation
    )
    thing = "sample" if estimate.headline == "samples_per_s" else "sequence"
    return (
        estimate.dtype,
        layout_label(estimate.layout, estimate.micro_batch, estimate.recompute),
        f"seq {estimate.seq_len:,}",
        f"global batch {pluralize(estimate.global_batch, thing)}",
        f"software {software}",
    )


FIT_WORDS = {"fits": "fits", "borderline": "may not fit", "out of memory": "does not fit"}


def fit_label(estimate: Estimate) -> str:
    """Return whether the run fits, with the memory that it needs and the device's."""
    if estimate.p_oom is None:
        return "memory fit unknown"
    odds = f", P(out of memory) {percent(estimate.p_oom, 0)}"
    words = FIT_WORDS[verdict(estimate.p_oom)]
    return f"{words}: {_memory_of_limit(estimate)} per GPU{'' if words == 'fits' else odds}"


def _memory_of_limit(estimate: Estimate) -> str:
    """Return the memory in use and the device's: `46.7 of 79.6 GiB`."""
    used, limit = estimate.memory_bytes.device_used, estimate.memory_limit_bytes
    return gib(used) if limit is None else f"{gib(used).removesuffix(' GiB')} of {gib(limit)}"


def speed_unit(estimate: Estimate) -> str:
    """Return the unit of the recipe's throughput metric."""
    return "samples/s" if estimate.headline == "samples_per_s" else "tokens/s"


def rates(estimate: Estimate) -> tuple[str, str]:
    """Return tokens and samples per second, the recipe's throughput metric first."""
    samples = f"{compact(estimate.samples_per_s)} samples/s"
    both = f"{estimate.tokens_per_s:,.0f} tokens/s", samples
    return both if estimate.headline == "tokens_per_s" else (both[1], both[0])


def comparison_sentence(first: Estimate, second: Estimate, ratios: ScenarioComparison) -> str:
    """Return the ratios with their intervals, and the ratio of the batches if they differ."""
    base, other = scenario_labels([first, second])
    batch = f" with {ratios.batch:.3g} times the batch" if ratios.batch != 1 else ""
    cost = f", cost x{_ratio(ratios.cost)}" if ratios.cost else ""
    return (
        f"{other} compared with {base}: "
        f"{speed_unit(first)} x{_ratio(ratios.tokens_per_s)}, "
        f"step time x{_ratio(ratios.step_time)}{batch}{cost} (80% intervals)."
    )


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _answer(output: EstimateOutput) -> tuple[str, ...]:
    first, *others = output.estimates
    return (
        *output.advice,
        *((measured_sentence(first),) if first.measured else ()),
        *(
            comparison_sentence(first, other, comparison)
            for other, comparison in zip(others, output.comparisons, strict=True)
        ),
        *(sentence for sentence, _ in output.times),
    )


def _step_figure(estimate: Estimate) -> Figure:
    slowest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:3]
    shares = ", ".join(
        f"{name} {percent(seconds / estimate.step_time_s)}" for name, seconds in slowest
    )
    return Figure(
        "Step time",
        f"{step_seconds(estimate.step_time_s)} s",
        f"{step_seconds(estimate.low_s)} to {step_seconds(estimate.high_s)} s (80%)",
        (f"largest parts: {shares}",),
    )


def _throughput_figure(estimate: Estimate) -> Figure:
    each, unit = estimate.devices, f"{speed_unit(estimate)}/GPU"
    # The slowest step gives the lowest rate.
    low, value, high = (
        _speed(estimate, seconds * each)
        for seconds in (estimate.high_s, estimate.step_time_s, estimate.low_s)
    )
    return Figure("Throughput", f"{value} {unit}", f"{low} to {high} (80%)", rates(estimate))


def _mfu_figure(estimate: Estimate) -> Figure:
    rate = f"{si(estimate.flops_per_s_per_device, 'FLOP/s')} per GPU"
    if estimate.mfu is None:
        return Figure("MFU", UNKNOWN, "", ("no data-sheet peak", f"{rate} ({estimate.convention})"))
    by_convention = {"causal": estimate.mfu_causal, "full-attention": estimate.mfu_full_attention}
    others = [
        f"{percent(share, 1)} ({name})"
        for name, share in by_convention.items()
        if share is not None and name != estimate.convention
    ]
    return Figure("MFU", percent(estimate.mfu, 1), f"({estimate.convention})", (*others, rate))


def _speed(estimate: Estimate, step_time_s: float) -> str:
    """Return the recipe's throughput metric at another step time, without its unit."""
    rate: float = getattr(estimate, estimate.headline) * estimate.step_time_s / step_time_s
    return f"{rate:,.0f}" if estimate.headline == "tokens_per_s" else compact(rate)


def _training_figure(estimate: Estimate, has_time_to_train: bool) -> Figure:
    """Return days, cost and energy of the whole run, or why they are unknown.

    Set `has_time_to_train` if the report also has the time to a benchmark's target.
    """
    cost, label = estimate.training_cost, "Whole training"
    if cost is None:
        to_target = (
            "it trains to a quality target" if has_time_to_train else TRAINS_TO_TARGET_REASON
        )
        return unknown_figure(label, to_target if estimate.to_target else UNKNOWN_LENGTH_REASON)
    low, high = (cost.days * s / estimate.step_time_s for s in (estimate.low_s, estimate.high_s))
    details = [f"{count(cost.total_tokens)} tokens, {cost.device_hours:,.0f} GPU-hours"]
    details.append(_energy(estimate))
    if cost.carbon_kg is not None:
        details.append(f"{cost.carbon_kg:,.0f} kg CO2")
    if cost.checkpoints is not None:
        details.append(_checkpoint_words(cost.checkpoints))
    ends = f"{day_count(low)} to {day_count(high)} days (80%)"
    return Figure(label, days(cost.days), ends, tuple(details))


def _cost_figure(estimate: Estimate) -> Iterator[Figure]:
    """Yield the money for the whole run and for a million tokens; nothing without a length."""
    training = estimate.training_cost
    if training is None:
        return
    if training.cost is None or training.cost_per_million_tokens is None:
        yield unknown_figure("Cost", "set --price, per GPU-hour")
        return
    sign = estimate.currency
    low, high = (
        training.cost * s / estimate.step_time_s for s in (estimate.low_s, estimate.high_s)
    )
    details = [f"{sign}{compact(training.cost_per_million_tokens)} per million tokens"]
    if training.spot_cost is not None:
        details.append(f"spot {sign}{training.spot_cost:,.0f}")
    interval = f"{sign}{low:,.0f} to {sign}{high:,.0f} (80%)"
    yield Figure("Cost", f"{sign}{training.cost:,.0f}", interval, tuple(details))


def _energy(estimate: Estimate) -> str:
    """Return the upper bound of the run's energy, or why it is unknown."""
    if estimate.training_cost and estimate.training_cost.energy_kwh is not None:
        return f"up to {estimate.training_cost.energy_kwh:,.0f} kWh"
    device = "this CPU" if is_cpu(estimate.device) else estimate.device
    return f"energy unknown: no data sheet states the power of {device}"


def _checkpoint_words(plan: CheckpointPlan) -> str:
    """Return goodput and checkpoint interval, and the goodput of Young's interval."""
    interval, young_interval = (
        f"{s:,.0f} s" if s >= 100 else f"{s:.3g} s"
        for s in (plan.interval_s, plan.young_interval_s)
    )
    words = f"goodput {percent(plan.goodput, 1)} with a checkpoint every {interval} of training"
    if plan.interval_s == plan.young_interval_s:
        return f"{words} (Young's interval, the optimum)"
    return f"{words}; {percent(plan.young_goodput, 1)} with Young's interval of {young_interval}"


def _memory_figure(estimate: Estimate) -> Figure:
    memory = estimate.memory_bytes
    odds = "memory size of the device unknown"
    if estimate.p_oom is not None:
        odds = f"P(out of memory) {percent(estimate.p_oom, 0)}"
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:2]
    return Figure(
        "Memory",
        _memory_of_limit(estimate),
        odds,
        (
            "most loaded GPU",
            f"allocated {gib(memory.allocated)}, reserved {gib(memory.reserved)}",
            *(f"{name.replace('_', ' ')} {gib(value)}" for name, value in largest),
        ),
    )


def _sections(output: EstimateOutput, names: Sequence[str]) -> list[Section]:
    first = output.estimates[0]
    sections: list[Section] = []
    if output.comparisons:
        sections.append(
            Table(
                title="Scenarios",
                name="scenarios",
                columns=_scenario_columns(first),
                rows=list(_scenario_rows(output)),
                note=f"Relative to first: {speed_unit(first)} divided by the first scenario's, "
                "with the 80% interval; errors that both share cancel. Training and cost cover "
                "all tokens.",
            )
        )
    suffixes = [f", {name}" for name in names] if len(names) > 1 else [""]
    for name, estimate in zip(suffixes, output.estimates, strict=True):
        sections.append(
            Table(
                title=f"MFU waterfall{name}",
                columns=LEVEL_COLUMNS,
                rows=list(_level_rows(estimate.waterfall)),
            )
        )
    for name, estimate, elasticities in zip(
        suffixes, output.estimates, output.elasticities, strict=False
    ):
        sections.append(
            Table(
                title=f"Sensitivity to hardware{name}",
                columns=ELASTICITY_COLUMNS,
                rows=[_elasticity_row(each, estimate) for each in elasticities],
                note=f"An elasticity of 0.3 means that 1% faster hardware gives 0.3% more "
                f"{speed_unit(estimate)}. Elasticities sum to 1. The intervals cover the "
                "uncertainty of the coefficients.",
            )
        )
    for name, trace in zip(suffixes, output.memory_traces, strict=False):
        sections.append(Notes(title=f"Memory trace{name}", lines=_trace_lines(trace)))
    return sections


def _scenario_columns(first: Estimate) -> tuple[Column, ...]:
    return (
        Column("scenario", "scenario"),
        Column("step", "step", justify="right"),
        Column("interval", "80% interval", justify="right"),
        Column("speed", speed_unit(first), justify="right"),
        Column("ratio", "relative to first", justify="right"),
        Column("training", "training", justify="right"),
        Column("cost", "cost", justify="right"),
        Column("memory", "memory", gib, "right"),
        Column("p_oom", "P(out of memory)", lambda odds: percent(odds, 0), "right"),
    )


def _scenario_rows(output: EstimateOutput) -> list[Row]:
    ratios = ["1", *(_ratio(each.tokens_per_s) for each in output.comparisons)]
    return [
        {
            "scenario": label,
            "step": f"{step_seconds(each.step_time_s)} s",
            "interval": f"{step_seconds(each.low_s)} to {step_seconds(each.high_s)} s",
            "speed": _speed(each, each.step_time_s),
            "ratio": ratio,
            "training": days(each.training_cost.days) if each.training_cost else None,
            "cost": None
            if each.training_cost is None or each.training_cost.cost is None
            else f"{each.training_cost.cost:,.0f}",
            "memory": each.memory_bytes.device_used,
            "p_oom": each.p_oom,
        }
        for label, each, ratio in zip(
            scenario_labels(output.estimates), output.estimates, ratios, strict=True
        )
    ]


def _level_rows(levels: Sequence[WaterfallLevel]) -> Iterator[Row]:
    """Yield a row per level with its change of the share compared with the level above."""
    above = None
    for level in levels:
        is_cause = level.lost_s and above is not None
        yield {
            "name": level.name,
            "points": level.share - above if is_cause and above is not None else None,
            "share": level.share,
            "rate": level.flops_per_s,
            "seconds": level.lost_s or None,
        }
        above = level.share


def _elasticity_row(each: Elasticity, estimate: Estimate) -> Row:
    reduction = 1 - each.step_time_if_doubled_s / estimate.step_time_s
    return {
        "figure": each.figure,
        "value": si(each.value, each.unit) if each.value and each.unit else "not stated",
        "elasticity": each.elasticity,
        "interval": f"{each.low:.3f} to {each.high:.3f}",
        "doubled": f"{step_seconds(each.step_time_if_doubled_s)} s ({percent(reduction, 1)} less)",
    }


def _trace_lines(trace: MemoryTrace) -> list[str]:
    """Return a line per traced rank, sorted by memory."""
    lines: list[str] = []
    for stage in sorted(trace.stages, key=lambda stage: -stage.trace.peak_bytes):
        parts = sorted(stage.trace.at_peak_bytes.items(), key=lambda item: -item[1])
        largest_parts = ", ".join(f"{name} {gib(value)}" for name, value in parts if value)
        lines.append(
            f"traced rank {stage.trace.rank} of {trace.devices} (native trainer, "
            f"{stage.trace.kernels} kernels, live tensors): {gib(stage.trace.peak_bytes)} = "
            f"{largest_parts}; the memory model estimates {gib(stage.estimated_bytes)}, "
            f"{percent(abs(stage.ratio - 1), 1)} {'more' if stage.ratio > 1 else 'less'}"
        )
    return lines


def _notes(estimates: Sequence[Estimate]) -> tuple[str, ...]:
    """Return the assumptions and the sources of the inputs, each once."""
    several = len(estimates) > 1
    notes = [
        f"{place(each)}: {note}" if several else note for each in estimates for note in each.notes
    ]
    for each in estimates:
        kinds = each.provenance.model_dump(exclude={"title"})
        words = ", ".join(f"{name.replace('_', ' ')}: {kind}" for name, kind in kinds.items())
        notes += [f"Based on {each.provenance.title}.{_unseen(each)}", f"Sources: {words}."]
    return tuple(dict.fromkeys(notes))


def _unseen(estimate: Estimate) -> str:
    """Return for how many sources the interval was right; empty if that was not tested."""
    if estimate.unseen_sources is None:
        return ""
    return (
        f" The 80% interval contains most steps of {estimate.unseen_sources_in_interval} of "
        f"{estimate.unseen_sources} sources if the fit excludes them."
    )


def _charts(
    estimates: Sequence[Estimate], names: Sequence[str], theme: ChartTheme
) -> Mapping[str, LayerChart]:
    from paceline.report.waterfall import waterfall_chart  # Altair takes long to import.

    return {
        f"waterfall-{number}": waterfall_chart(
            estimate.waterfall, theme, name, convention=estimate.convention
        )
        for number, (estimate, name) in enumerate(zip(estimates, names, strict=True), start=1)
    }


def _documents(output: EstimateOutput) -> Any:
    """Return the JSON content: one estimate, or `scenarios` with their ratios to the first."""
    documents = [estimate.model_dump(mode="json") for estimate in output.estimates]
    for document, comparison in zip(documents[1:], output.comparisons, strict=True):
        document |= {
            f"{name}_ratio": getattr(comparison, name)._asdict()
            for name in ("step_time", "tokens_per_s", "cost")
            if getattr(comparison, name) is not None
        }
    for document, trace in zip(documents, output.memory_traces, strict=False):
        document["trace"] = trace.model_dump(mode="json")
    for document, (_, time) in zip(documents, output.times, strict=False):
        document["time_to_train"] = time.model_dump(mode="json")
    for document, elasticities in zip(documents, output.elasticities, strict=False):
        document["elasticities"] = [each.model_dump(mode="json") for each in elasticities]
    if output.alternative is not None:
        documents[0]["alternative"] = output.alternative.model_dump(mode="json")
    return {"scenarios": documents} if output.comparisons else documents[0]


def _csv(output: EstimateOutput) -> Table:
    """Return a table with one row per estimate."""
    rows = [_flat(estimate) for estimate in output.estimates]
    for row, elasticities in zip(rows, output.elasticities, strict=False):
        by_figure = {
            each.figure.lower().replace(" ", "_"): each.elasticity for each in elasticities
        }
        row |= {f"elasticity_{name}": by_figure[name] for name in sorted(by_figure)}
    return Table(columns=[Column(key, key) for key in rows[0]], rows=rows)


_NESTED = {"parts", "training_cost", "memory_bytes", "measured", "measured_network", "provenance"}
"""Nested fields of an estimate that CSV columns replace; the notes describe a measured network."""


def _flat(estimate: Estimate) -> dict[str, Any]:
    content = estimate.model_dump(mode="json", exclude={"waterfall", *_NESTED})
    memory, measured = estimate.memory_bytes, estimate.measured
    costs, plan = dict[str, Any](), dict[str, Any]()
    if estimate.training_cost is not None:
        costs = estimate.training_cost.model_dump(mode="json", exclude={"checkpoints"})
        if estimate.training_cost.checkpoints is not None:
            plan = estimate.training_cost.checkpoints.model_dump(exclude={"goodput"})
    content["notes"] = "; ".join(estimate.notes)
    content |= {
        f"memory_{name}_bytes": getattr(memory, name)
        for name in ("allocated", "reserved", "device_used")
    }
    content |= {
        f"measured_{name}": getattr(measured, name, None)
        for name in ("step_time_s", "ratio", "in_interval")
    }
    content |= {f"{name}_source": kind for name, kind in estimate.provenance.model_dump().items()}
    content |= {f"{name}_s": value for name, value in estimate.parts.items()}
    return {**content, **costs, **{f"checkpoint_{name}": value for name, value in plan.items()}}


SIZE_COLUMNS = (
    Column("devices", "GPUs", "{:,}".format, "right"),
    Column("layout", "layout"),
    Column("memory", "memory", gib, "right"),
    Column("fit", "fit"),
    Column("rate", "tokens/s/GPU", "{:,.0f}".format, "right"),
    Column("total", "tokens/s", "{:,.0f}".format, "right"),
    Column("step", "step", lambda value: f"{step_seconds(value)} s", "right"),
    Column("mfu", "MFU", lambda share: percent(share, 1), "right"),
    Column("days", "days", day_count, "right"),
    Column("hours", "GPU-hours", "{:,.0f}".format, "right"),
    Column("cost", "cost", "{:,.0f}".format, "right"),
)


def sizes_document(estimates: Sequence[Estimate]) -> Document:
    """Return a table of the same training on several numbers of devices."""
    first = estimates[0]
    rows = [_size_row(each) for each in estimates]
    table = Table(columns=SIZE_COLUMNS, rows=rows)
    data = [each.model_dump(mode="json") for each in estimates]
    return Document(
        kind="estimate",
        title=f"{first.recipe} on {first.device}",
        setup=(first.dtype, f"seq {first.seq_len:,}", f"MFU ({first.convention})"),
        sections=(table,),
        notes=_notes(estimates[:1]),
        data={"sizes": data},
        csv=Table(columns=SIZE_COLUMNS, rows=rows),
    )


def _size_row(each: Estimate) -> Row:
    cost = each.training_cost
    return {
        "devices": each.devices,
        "layout": layout_label(each.layout, each.micro_batch, each.recompute),
        "memory": each.memory_bytes.device_used,
        "fit": None if each.p_oom is None else FIT_WORDS[verdict(each.p_oom)],
        "rate": each.tokens_per_s / each.devices,
        "total": each.tokens_per_s,
        "step": each.step_time_s,
        "mfu": each.mfu,
        "days": cost.days if cost else None,
        "hours": cost.device_hours if cost else None,
        "cost": cost.cost if cost else None,
    }
