"""The comparison with published results as table rows, lines, a chart and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.text import one_line, printable
from paceline.core.units import counted, percent, significant
from paceline.mlperf.compare.comparison import (
    OFFICIAL,
    ComparedScore,
    PublishedPeer,
    ScalingStep,
    ScoreComparison,
)
from paceline.mlperf.compare.published_scores import accelerator_kind
from paceline.mlperf.rules import NOT_A_METRIC
from paceline.report.figures import written
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import WHOLE_LABELS, finish
from paceline.report.theme import ON_PAGE, Look

LABELS = ("Score", "Against published", "Samples to target", "Strong scaling")


def compared_head(comparison: ScoreComparison) -> PageHead:
    """Head of the page: the label that no own score may be without, the answer, four figures."""
    return PageHead(
        eyebrow="scores beside published results",
        name=f"{comparison.benchmark}, MLPerf Training {comparison.ruleset}",
        chip=comparison.label,
        tone="plain",
        setup=(f"{comparison.division} division", f"published results: {comparison.source}"),
        sentences=tuple(answers(comparison)),
        cards=compared_cards(comparison),
    )


def answers(comparison: ScoreComparison) -> Iterator[str]:
    """Of each set of runs in one sentence: minutes, on what, and the nearest published result."""
    for score in comparison.own:
        if score.score_minutes is None:
            yield one_line(f"{score.name}: no score, {score.status}: {score.reason}")
            continue
        where = f"{score.num_devices or 'not known how many'} x {score.accelerator or 'not known'}"
        peer = nearest(score)
        beside = "no published result beside it"
        if peer is not None:
            beside = (
                f"{peer.time_ratio:.3f} of the {peer.score_minutes:.4f} minutes that "
                f"{peer.submitter} published ({peer.system})"
            )
        yield one_line(f"{score.name}: {score.score_minutes:.4f} minutes on {where}, {beside}")


def nearest(score: ComparedScore) -> PublishedPeer | None:
    """The published result that is nearest in time, itself only where there is no other."""
    others = [peer for peer in score.beside if not peer.itself] or list(score.beside)
    return min(others, key=lambda peer: abs(peer.time_ratio - 1), default=None)


def compared_cards(comparison: ScoreComparison) -> tuple[Card, ...]:
    """Minutes, ratio to what was published, samples to the target, and strong scaling."""
    if not comparison.own:
        return tuple(unknown_card(label, "there are no runs") for label in LABELS)
    first, *others = comparison.own
    return (
        _score_card(first, others),
        _peer_card(first),
        _samples_card(first),
        _scaling_card(comparison),
    )


def _score_card(first: ComparedScore, others: list[ComparedScore]) -> Card:
    on = f"{first.num_devices or 'not known how many'} x {first.accelerator or 'not known'}"
    more = [
        f"{each.score_minutes:.4f} minutes on {each.num_devices or 'not known how many'}"
        for each in others
        if each.score_minutes is not None
    ]
    lines = [on, first.name, *more]
    if first.score_minutes is None:
        return unknown_card(LABELS[0], f"{first.status}: {first.reason}", lines)
    return card(LABELS[0], f"{first.score_minutes:.4f} minutes", "", lines)


def _peer_card(first: ComparedScore) -> Card:
    peer = nearest(first)
    if peer is None:
        why = "no published result on as many accelerators of the kind is known here"
        return unknown_card(LABELS[1], why)
    return card(
        LABELS[1],
        f"{peer.time_ratio:.3f}",
        f"of {peer.score_minutes:.4f} minutes, below 1 is faster",
        [f"{peer.submitter} {peer.system}", f"nearest of {len(first.beside)} beside it"],
    )


def _samples_card(first: ComparedScore) -> Card:
    rate, flops = first.samples_per_s, first.model_flops_per_s_per_device
    lines = [
        f"global batch {first.global_batch:,}" if first.global_batch else None,
        f"{significant(rate, 5)} samples/s with evaluations" if rate else None,
        f"{written(flops, 'FLOP/s', 4)} a device, {NOT_A_METRIC}" if flops else None,
    ]
    if first.mean_samples_to_target is None:
        return unknown_card(LABELS[2], "no run converged", lines)
    return card(LABELS[2], f"{first.mean_samples_to_target:,.0f} samples", "", ["mean", *lines])


def _scaling_card(comparison: ScoreComparison) -> Card:
    if not comparison.scaling:
        why = "takes two sets of runs on different numbers of accelerators"
        return unknown_card(LABELS[3], why)
    last = comparison.scaling[-1]
    fewest = comparison.scaling[0].num_devices
    return card(
        LABELS[3],
        percent(last.efficiency, 1),
        f"on {last.num_devices:,} against {counted(fewest, 'accelerator')}",
        [
            f"{percent(last.samples_factor, 1)} by samples",
            f"{percent(last.throughput_factor, 1)} by throughput",
        ],
    )


HEIGHT = 320
UNSCALED = "minutes are mean run times, before the convergence test scales them"
"""Of what the efficiency of strong scaling is of; the table above it has scores."""

BESIDE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "system": lambda row: one_line(row["system"]),
    "accelerators": lambda row: (
        f"{row['num_devices'] or '-'} x {printable(row['accelerator'] or '-')}"
    ),
    "official": lambda row: "yes" if row["official"] else "no",
    "minutes": lambda row: _figure(row["score_minutes"], "{:.4f}"),
    "ratio": lambda row: _figure(row["time_ratio"], "{:.3f}"),
    "batch": lambda row: _figure(row["global_batch"], "{:,}"),
    "samples": lambda row: _figure(row["mean_samples_to_target"], "{:,.0f}"),
}
"""Of the page's table of scores: head -> cell of a row of `compared_rows`."""

SCALING_COLUMNS: dict[str, Callable[[ScalingStep], str]] = {
    "runs": lambda step: one_line(step.name),
    "official": lambda step: "yes" if step.official else "no",
    "accelerators": lambda step: f"{step.num_devices:,}",
    "batch": lambda step: f"{step.global_batch:,}" if step.global_batch else "-",
    "minutes": lambda step: f"{step.minutes:.4f}",
    "efficiency": lambda step: _share(step.efficiency),
    "more samples": lambda step: _share(step.samples_factor),
    "throughput": lambda step: _share(step.throughput_factor),
    "training steps": lambda step: _share(step.training_factor),
    "evaluations and rest": lambda step: _share(step.other_factor),
}
"""Of the page's tables of strong scaling: head -> cell."""


def compared_rows(comparison: ScoreComparison) -> list[dict[str, Any]]:
    """Each score and each published result beside it as a row; `official` tells them apart."""
    rows: list[dict[str, Any]] = []
    for score in comparison.own:
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
                + (" (these logs)" if peer.itself else ""),
                "time_ratio": peer.time_ratio,
                **{name: getattr(peer, name) for name in figures},
            }
            for peer in score.beside
        ]
    return rows


def compared_lines(comparison: ScoreComparison) -> Iterator[str]:
    """What stands below the table on a terminal."""
    for score in comparison.own:
        if score.model_flops_per_s_per_device is not None:
            rate = written(score.model_flops_per_s_per_device, "FLOP/s", 4)
            yield one_line(f"{score.name}: {rate} a device, {score.convention}; {NOT_A_METRIC}")
    if comparison.scaling:
        yield f"strong scaling, against the fewest accelerators; {UNSCALED}:"
        yield from (f"  {line}" for line in map(_scaling_line, comparison.scaling))
    for group in comparison.published_scaling:
        yield f"published by {group.submitter} on {group.accelerator}; {UNSCALED}:"
        yield from (f"  {line}" for line in map(_scaling_line, group.steps))
    yield from (one_line(f"note: {note}") for note in comparison.notes)
    yield f"ratio: own minutes / published minutes. Published: {comparison.source}, {OFFICIAL}."
    yield f"Own scores: {comparison.label}."


def time_to_train(comparison: ScoreComparison, look: Look) -> alt.LayerChart:
    """Minutes over accelerators, both logarithmic: published as dots, own scores marked."""
    kinds = {score.accelerator for score in comparison.own}
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
    own = [
        {
            "gpus": score.num_devices,
            "minutes": score.score_minutes,
            "name": printable(score.name),
            "accelerator": score.accelerator,
            "official": f"no: {score.label}",
        }
        for score in comparison.own
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
    if own:
        layers.append(
            _marks(own, "own").mark_point(
                shape="diamond", size=130, filled=True, color=palette.accent
            )
        )
        layers.append(
            _marks(own, "labels")
            .mark_text(align="left", dx=11, color=palette.accent, fontWeight="bold")
            .encode(text=alt.Text("minutes:Q", format=".3~f"))
        )
    notes = [
        f"{comparison.benchmark}, {comparison.ruleset}, {comparison.division} division. Diamond: "
        f"own scores, {comparison.label}.",
        "Dot: published by MLCommons Association (blue: the same accelerator, grey: others); not "
        "every published result is known here.",
    ]
    layers = layers or [_marks([], "none").mark_point()]
    whose = f"{comparison.benchmark}, MLPerf Training {comparison.ruleset}"
    return finish(layers, look, "Time to train", notes, HEIGHT, whose)


def compared_html(comparison: ScoreComparison) -> str:
    """The page of one comparison; it opens without a network."""
    groups = [("these runs", comparison.scaling)] if comparison.scaling else []
    groups += [
        (f"published by {printable(g.submitter)} on {printable(g.accelerator)}", g.steps)
        for g in comparison.published_scaling
    ]
    return render_page(
        "mlperf.html.j2",
        compared_head(comparison),
        {"time-to-train": time_to_train(comparison, ON_PAGE)},
        beside_heads=tuple(BESIDE_COLUMNS),
        beside_rows=[
            [cell(row) for cell in BESIDE_COLUMNS.values()] for row in compared_rows(comparison)
        ],
        scaling_heads=tuple(SCALING_COLUMNS),
        groups=[
            (title, [[cell(step) for cell in SCALING_COLUMNS.values()] for step in steps])
            for title, steps in groups
        ],
        notes=[*map(one_line, comparison.notes), *_rates(comparison.own)],
        official=OFFICIAL,
        label=comparison.label,
        unscaled=UNSCALED,
    )


def _rates(scores: Sequence[ComparedScore]) -> list[str]:
    return [
        f"{one_line(score.name)}: {written(score.model_flops_per_s_per_device, 'FLOP/s', 4)} "
        f"a device; {NOT_A_METRIC}"
        for score in scores
        if score.model_flops_per_s_per_device is not None
    ]


def _marks(rows: Sequence[dict[str, Any]], name: str) -> alt.Chart:
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


def _scaling_line(step: ScalingStep) -> str:
    samples = f"samples {percent(step.samples_factor, 1)}"
    throughput = f"throughput {percent(step.throughput_factor, 1)}"
    if step.training_factor is not None and step.other_factor is not None:
        throughput += (
            f" = training steps {percent(step.training_factor, 1)} x evaluations and rest "
            f"{percent(step.other_factor, 1)}"
        )
    batch = f", batch {step.global_batch:,}" if step.global_batch else ""
    official = "official" if step.official else "unofficial"
    return one_line(
        f"{counted(step.num_devices, 'accelerator')}{batch}: {step.minutes:.4f} minutes, "
        "efficiency "
        f"{percent(step.efficiency, 1)} = {samples} x {throughput} ({official}, {step.name})"
    )


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else percent(fraction, 1)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
