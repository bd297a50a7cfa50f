"""Report on scores compared with published results, with a chart of time to train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.text import one_line, printable
from paceline.core.units import percent, pluralize, significant
from paceline.mlperf.compare.comparison import (
    OFFICIAL,
    ComparedScore,
    PublishedPeer,
    ScoreComparison,
)
from paceline.mlperf.compare.published_scores import accelerator_kind
from paceline.mlperf.rules import NOT_A_METRIC
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.report.figures import format_value

if TYPE_CHECKING:
    import altair as alt

    from paceline.report.theme import ChartTheme

LABELS = ("Score", "Relative to published", "Samples to target", "Strong scaling")
HEIGHT = 320
SCALING_NOTE = (
    "Efficiency = samples x throughput, each relative to the fewest accelerators. Samples: samples "
    "to the target at the base batch / at this batch. Throughput: samples/s per accelerator = "
    "training steps x evaluations and the rest of the run. Minutes are mean run times before "
    "scaling by the convergence test."
)


def _official(value: bool) -> str:
    return "yes" if value else "no"


def _percent(fraction: float) -> str:
    return percent(fraction, 1)


SCORE_COLUMNS = (
    Column("system", "system", one_line),
    Column("official", "official", _official),
    Column("num_devices", "accelerators", "{:,}".format, "right"),
    Column("accelerator", "type", one_line),
    Column("score_minutes", "minutes", "{:.4f}".format, "right"),
    Column("time_ratio", "ratio", "{:.3f}".format, "right"),
    Column("global_batch", "batch", "{:,}".format, "right"),
    Column("mean_samples_to_target", "samples", "{:,.0f}".format, "right"),
)
SCALING_COLUMNS = (
    Column("name", "runs", one_line),
    Column("official", "official", _official),
    Column("num_devices", "accelerators", "{:,}".format, "right"),
    Column("global_batch", "batch", "{:,}".format, "right"),
    Column("minutes", "minutes", "{:.4f}".format, "right"),
    Column("efficiency", "efficiency", _percent, "right"),
    Column("samples_factor", "samples", _percent, "right"),
    Column("throughput_factor", "throughput", _percent, "right"),
    Column("training_factor", "training steps", _percent, "right"),
    Column("other_factor", "evaluations and rest", _percent, "right"),
)


def scores_document(comparison: ScoreComparison) -> Document:
    """Return the document; its verdict is the label that every unofficial score must carry."""
    rows = compared_rows(comparison)
    groups = [("these runs", comparison.scaling)] if comparison.scaling else []
    groups += [
        (f"published by {group.submitter} on {group.accelerator}", group.steps)
        for group in comparison.published_scaling
    ]
    extra = [Column(name, name) for name in ("benchmark", "ruleset", "label")]
    return Document(
        kind="scores compared with published results",
        title=f"{comparison.benchmark}, MLPerf Training {comparison.ruleset}",
        verdict=Verdict(comparison.label),
        setup=(f"{comparison.division} division", f"published results: {comparison.source}"),
        answer=tuple(answers(comparison)),
        figures=_figures(comparison),
        sections=(
            Table(
                title="Published results on the same number and type of accelerators",
                name="peers",
                columns=SCORE_COLUMNS,
                rows=rows,
                note=f"Ratio: minutes of this score / published minutes. Official: {OFFICIAL}. "
                f"Not official: {comparison.label}.",
            ),
            *(
                Table(
                    title=f"Strong scaling, {title}",
                    columns=SCALING_COLUMNS,
                    rows=[step.model_dump() for step in steps],
                    note=SCALING_NOTE if steps is groups[-1][1] else "",
                )
                for title, steps in groups
            ),
        ),
        notes=(*map(one_line, comparison.notes), *_rates(comparison.scores)),
        charts=lambda look: {"time-to-train": time_to_train(comparison, look)},
        data=comparison.model_dump(mode="json"),
        csv=Table(columns=[*SCORE_COLUMNS, *extra], rows=rows),
    )


def _rates(scores: Sequence[ComparedScore]) -> Iterator[str]:
    for score in scores:
        if score.model_flops_per_s_per_device is not None:
            rate = format_value(score.model_flops_per_s_per_device, "FLOP/s", 4)
            yield one_line(f"{score.name}: {rate} per device, {score.convention}; {NOT_A_METRIC}")


def answers(comparison: ScoreComparison) -> Iterator[str]:
    """Yield one sentence per set of runs: minutes, accelerators and nearest published result."""
    for score in comparison.scores:
        if score.score_minutes is None:
            yield one_line(f"{score.name}: no score, {score.status}: {score.reason}")
            continue
        where = _hardware(score)
        peer = nearest(score)
        comparison_text = "no published result to compare with"
        if peer is not None:
            comparison_text = (
                f"{peer.time_ratio:.3f} of the {peer.score_minutes:.4f} minutes that "
                f"{peer.submitter} published ({peer.system})"
            )
        yield one_line(
            f"{score.name}: {score.score_minutes:.4f} minutes on {where}, {comparison_text}"
        )


def _hardware(score: ComparedScore) -> str:
    """Return the accelerators of a score, such as `8 x H100`."""
    if score.num_devices is None:
        return f"an unknown number of {score.accelerator or 'accelerators'}"
    return f"{score.num_devices} x {score.accelerator or 'unknown accelerator'}"


def nearest(score: ComparedScore) -> PublishedPeer | None:
    """Return the published result nearest in run time; the run's own result only if it is alone."""
    others = [peer for peer in score.peers if not peer.is_same_result] or list(score.peers)
    return min(others, key=lambda peer: abs(peer.time_ratio - 1), default=None)


def _figures(comparison: ScoreComparison) -> tuple[Figure, ...]:
    """Return minutes, ratio to the published result, samples to the target and strong scaling."""
    if not comparison.scores:
        return tuple(unknown_figure(label, "there are no runs") for label in LABELS)
    first, *others = comparison.scores
    return (
        _score_figure(first, others),
        _peer_figure(first),
        _samples_figure(first),
        _scaling_figure(comparison),
    )


def _score_figure(first: ComparedScore, others: list[ComparedScore]) -> Figure:
    more = [
        f"{each.score_minutes:.4f} minutes on {_hardware(each)}"
        for each in others
        if each.score_minutes is not None
    ]
    lines = [_hardware(first), first.name, *more]
    if first.score_minutes is None:
        return unknown_figure(LABELS[0], f"{first.status}: {first.reason}", lines)
    return Figure(LABELS[0], f"{first.score_minutes:.4f} minutes", "", tuple(lines))


def _peer_figure(first: ComparedScore) -> Figure:
    peer = nearest(first)
    if peer is None:
        why = "no published result on the same number and type of accelerators"
        return unknown_figure(LABELS[1], why)
    return Figure(
        LABELS[1],
        f"{peer.time_ratio:.3f}",
        f"of {peer.score_minutes:.4f} minutes; below 1 is faster",
        (
            f"{peer.submitter} {peer.system}",
            f"nearest of {pluralize(len(first.peers), 'published result')}",
        ),
    )


def _samples_figure(first: ComparedScore) -> Figure:
    rate, flops = first.samples_per_s, first.model_flops_per_s_per_device
    lines = [f"global batch {first.global_batch:,}"] if first.global_batch else []
    lines += [f"{significant(rate, 5)} samples/s including evaluations"] if rate else []
    lines += [f"{format_value(flops, 'FLOP/s', 4)} per device, {NOT_A_METRIC}"] if flops else []
    if first.mean_samples_to_target is None:
        return unknown_figure(LABELS[2], "no run converged", lines)
    return Figure(LABELS[2], f"{first.mean_samples_to_target:,.0f} samples", "", ("mean", *lines))


def _scaling_figure(comparison: ScoreComparison) -> Figure:
    if not comparison.scaling:
        why = "needs two sets of runs on different numbers of accelerators"
        return unknown_figure(LABELS[3], why)
    last = comparison.scaling[-1]
    fewest = comparison.scaling[0].num_devices
    return Figure(
        LABELS[3],
        percent(last.efficiency, 1),
        f"from {fewest:,} to {pluralize(last.num_devices, 'accelerator')}",
        (
            f"samples: {percent(last.samples_factor, 1)}",
            f"throughput: {percent(last.throughput_factor, 1)}",
        ),
    )


def compared_rows(comparison: ScoreComparison) -> list[dict[str, Any]]:
    """Return one row per score and compared published result; `official` distinguishes them."""
    rows: list[dict[str, Any]] = []
    for score in comparison.scores:
        head = {
            "benchmark": comparison.benchmark,
            "ruleset": comparison.ruleset,
            "num_devices": score.num_devices,
            "accelerator": score.accelerator,
        }
        figures = ("official", "score_minutes", "global_batch", "mean_samples_to_target", "label")
        rows.append(
            {
                **head,
                "system": score.name,
                "time_ratio": None,
                **{name: getattr(score, name) for name in figures},
            }
        )
        rows += [
            {
                **head,
                "system": f"{peer.submitter} {peer.system}"
                + (" (these logs)" if peer.is_same_result else ""),
                "time_ratio": peer.time_ratio,
                **{name: getattr(peer, name) for name in figures},
            }
            for peer in score.peers
        ]
    return rows


def time_to_train(comparison: ScoreComparison, look: ChartTheme) -> alt.LayerChart:
    """Chart minutes over accelerators, on logarithmic axes, with the user's scores marked."""
    import altair as alt  # It takes long to import.

    from paceline.report.step_charts import finish_chart

    kinds = {score.accelerator for score in comparison.scores}
    published = [
        {
            "gpus": result.gpus,
            "minutes": result.score_minutes,
            "name": f"{result.submitter} {result.system}",
            "accelerator": (kind := accelerator_kind(result.accelerator)),
            "alike": kind in kinds,
            "official": "yes",
        }
        for result in comparison.published
    ]
    scores = [
        {
            "gpus": score.num_devices,
            "minutes": score.score_minutes,
            "name": printable(score.name),
            "accelerator": score.accelerator,
            "official": f"no: {score.label}",
        }
        for score in comparison.scores
        if score.num_devices and score.score_minutes
    ]
    palette = look.palette
    layers = []
    if published:
        colour = alt.condition(
            alt.datum["alike"], alt.value(palette.steady), alt.value(palette.warmup)
        )
        dots = _marks(published, "published").mark_circle(size=60, opacity=0.75)
        layers.append(dots.encode(color=colour))
    if scores:
        layers.append(
            _marks(scores, "scores").mark_point(
                shape="diamond", size=130, filled=True, color=palette.accent
            )
        )
        layers.append(
            _marks(scores, "labels")
            .mark_text(align="left", dx=11, color=palette.accent, fontWeight="bold")
            .encode(text=alt.Text("minutes:Q", format=".3~f"))
        )
    notes = [
        f"{comparison.benchmark}, {comparison.ruleset}, {comparison.division} division. Diamond: "
        f"these runs, {comparison.label}.",
        "Dot: published by MLCommons Association (blue: the same accelerator, gray: others). The "
        "list of published results is not complete.",
    ]
    layers = layers or [_marks([], "none").mark_point()]
    whose = f"{comparison.benchmark}, MLPerf Training {comparison.ruleset}"
    return finish_chart(layers, look, "Time to train", notes, HEIGHT, whose)


def _marks(rows: Sequence[dict[str, Any]], name: str) -> alt.Chart:
    import altair as alt

    from paceline.report.step_charts import WHOLE_LABELS

    x = alt.X(
        "gpus:Q",
        title="accelerators",
        scale=alt.Scale(type="log", base=2, padding=14),
        axis=alt.Axis(labelExpr=WHOLE_LABELS),
    )
    y = alt.Y(
        "minutes:Q",
        title="time to train (minutes)",
        scale=alt.Scale(type="log", nice=False, padding=14),
        axis=alt.Axis(tickCount=6, format=",~r"),
    )
    tips = [
        alt.Tooltip("name:N", title="system"),
        alt.Tooltip("accelerator:N"),
        alt.Tooltip("gpus:Q", title="accelerators"),
        alt.Tooltip("minutes:Q", format=".4~f"),
        alt.Tooltip("official:N"),
    ]
    return alt.Chart(alt.Data(values=list(rows)), name=name).encode(x=x, y=y, tooltip=tips)
