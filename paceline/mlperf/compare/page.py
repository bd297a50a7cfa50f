"""Scores beside published results: text, table rows, the plot and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.units import percent
from paceline.mlperf.compare.answer import OFFICIAL, Compared, Own
from paceline.mlperf.compare.published import kind_of
from paceline.mlperf.compare.strong_scaling import ScalingStep
from paceline.mlperf.rules import NOT_A_METRIC
from paceline.report.figures import one_line, printable, written
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look

HEIGHT = 320
BESIDE_HEADS = ("system", "accelerators", "official", "minutes", "ratio", "batch", "samples")
SCALING_HEADS = ("runs", "official", "accelerators", "batch", "minutes", "efficiency",
                 "more samples", "throughput", "training steps", "evaluations and rest")  # fmt: skip


def compared_rows(found: Compared) -> list[dict[str, Any]]:
    """Each score and each published result beside it as a row; `official` tells them apart."""
    rows: list[dict[str, Any]] = []
    for one in found.own:
        head = {"benchmark": found.benchmark, "ruleset": found.ruleset,
                "num_devices": one.num_devices, "accelerator": one.accelerator}  # fmt: skip
        rows.append({**head, "system": one.name, "official": False, "score_minutes": one.score_minutes,
                     "time_ratio": None, "global_batch": one.global_batch,
                     "mean_samples_to_target": one.mean_samples_to_target, "label": one.label})  # fmt: skip
        rows += [
            {**head, "system": f"{other.submitter} {other.system}" + (" (these logs)" if other.itself else ""),
             "official": True, "score_minutes": other.score_minutes, "time_ratio": other.time_ratio,
             "global_batch": other.global_batch,
             "mean_samples_to_target": other.mean_samples_to_target, "label": other.label}
            for other in one.beside
        ]  # fmt: skip
    return rows


def compared_lines(found: Compared) -> Iterator[str]:
    """What stands below the table on a terminal."""
    for one in found.own:
        if one.model_flops_per_s_per_device is not None:
            rate = written(one.model_flops_per_s_per_device, "FLOP/s", 4)
            yield one_line(f"{one.name}: {rate} a device, {one.convention}; {NOT_A_METRIC}")
    if found.scaling:
        yield "strong scaling, against the fewest accelerators:"
        yield from (f"  {line}" for line in map(_scaling_line, found.scaling))
    for group in found.published_scaling:
        yield f"published by {group.submitter} on {group.accelerator}:"
        yield from (f"  {line}" for line in map(_scaling_line, group.steps))
    yield from (one_line(f"note: {note}") for note in found.notes)
    yield f"ratio: own minutes / published minutes. Published: {found.source}, {OFFICIAL}."
    yield f"Own scores: {found.label}."


def time_to_train(found: Compared, look: Look) -> alt.LayerChart:
    """Minutes over accelerators, both logarithmic: published results as dots, own scores marked."""
    kinds = {one.accelerator for one in found.own}
    rows = [
        {"gpus": one.gpus, "minutes": one.score_minutes, "name": f"{one.submitter} {one.system}",
         "accelerator": kind_of(one.accelerator), "alike": kind_of(one.accelerator) in kinds,
         "official": "yes"}
        for one in found.published
    ]  # fmt: skip
    own = [
        {"gpus": one.num_devices, "minutes": one.score_minutes, "name": printable(one.name),
         "accelerator": one.accelerator, "official": f"no: {one.label}"}
        for one in found.own
        if one.num_devices and one.score_minutes
    ]  # fmt: skip
    palette = look.palette
    layers = []
    if rows:
        colour = alt.condition(
            alt.datum["alike"], alt.value(palette.steady), alt.value(palette.warmup)
        )
        layers.append(
            _marks(rows, "published").mark_circle(size=60, opacity=0.75).encode(color=colour)
        )
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
        f"{found.benchmark}, {found.ruleset}, {found.division} division. Diamond: own scores, {found.label}.",
        "Dot: published by MLCommons Association (blue: the same accelerator, grey: others); not "
        "every published result is known here.",
    ]
    return finish(layers or [_marks([], "none").mark_point()], look, "Time to train", notes, HEIGHT)


def compared_html(found: Compared) -> str:
    """The page of one comparison; it opens without a network."""
    return render_page(
        "mlperf.html.j2",
        {"time-to-train": time_to_train(found, ON_PAGE)},
        name=f"{found.benchmark}, MLPerf Training {found.ruleset}",
        chip=found.label,
        setup=[f"{found.division} division", f"published results: {found.source}"],
        beside_heads=BESIDE_HEADS,
        beside_rows=[_beside_cells(row) for row in compared_rows(found)],
        scaling_heads=SCALING_HEADS,
        groups=[("These runs", [_scaling_cells(s) for s in found.scaling])] * bool(found.scaling)
        + [
            (f"Published by {printable(g.submitter)} on {printable(g.accelerator)}",
             [_scaling_cells(s) for s in g.steps])
            for g in found.published_scaling
        ],
        notes=[*map(one_line, found.notes), *_rates(found.own)],
        official=OFFICIAL,
        label=found.label,
    )  # fmt: skip


def _rates(own: Sequence[Own]) -> list[str]:
    return [
        f"{one_line(one.name)}: {written(one.model_flops_per_s_per_device, 'FLOP/s', 4)} a device; {NOT_A_METRIC}"
        for one in own
        if one.model_flops_per_s_per_device is not None
    ]


def _marks(rows: Sequence[dict[str, Any]], name: str) -> alt.Chart:
    x = alt.X("gpus:Q", title="accelerators", scale=alt.Scale(type="log", base=2, padding=14),
              axis=alt.Axis(format=",d"))  # fmt: skip
    y = alt.Y("minutes:Q", title="time to train (minutes)", scale=alt.Scale(type="log", nice=False, padding=14),
              axis=alt.Axis(tickCount=6, format=",~r"))  # fmt: skip
    tips = [alt.Tooltip("name:N"), alt.Tooltip("accelerator:N"), alt.Tooltip("gpus:Q"),
            alt.Tooltip("minutes:Q", format=".4~f"), alt.Tooltip("official:N")]  # fmt: skip
    return alt.Chart(alt.Data(values=list(rows)), name=name).encode(x=x, y=y, tooltip=tips)


def _scaling_line(one: ScalingStep) -> str:
    parts = [
        f"samples {percent(one.samples_factor, 1)}",
        f"throughput {percent(one.throughput_factor, 1)}",
    ]
    if one.training_factor is not None and one.other_factor is not None:
        parts[1] += (
            f" = training steps {percent(one.training_factor, 1)} x evaluations and rest "
            f"{percent(one.other_factor, 1)}"
        )
    batch = f", batch {one.global_batch:,}" if one.global_batch else ""
    official = "official" if one.official else "unofficial"
    return one_line(
        f"{one.num_devices:,} accelerators{batch}: {one.minutes:.4f} minutes, efficiency "
        f"{percent(one.efficiency, 1)} = {' x '.join(parts)} ({official}, {one.name})"
    )


def _scaling_cells(one: ScalingStep) -> list[str]:
    shares = (
        one.efficiency,
        one.samples_factor,
        one.throughput_factor,
        one.training_factor,
        one.other_factor,
    )
    return [one_line(one.name), "yes" if one.official else "no", f"{one.num_devices:,}",
            f"{one.global_batch:,}" if one.global_batch else "-", f"{one.minutes:.4f}",
            *("-" if share is None else percent(share, 1) for share in shares)]  # fmt: skip


def _beside_cells(row: dict[str, Any]) -> list[str]:
    count = f"{row['num_devices'] or '-'} x {printable(row['accelerator'] or '-')}"
    figures = [("score_minutes", "{:.4f}"), ("time_ratio", "{:.3f}"), ("global_batch", "{:,}"),
               ("mean_samples_to_target", "{:,.0f}")]  # fmt: skip
    cells = ["-" if row[key] is None else form.format(row[key]) for key, form in figures]
    return [one_line(row["system"]), count, "yes" if row["official"] else "no", *cells]
