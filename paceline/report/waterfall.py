"""The page of an estimate: from the peak to the estimated rate, a bar for what each cause takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from paceline.estimate.waterfall import Level
from paceline.report.figures import one_line, printable
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.units import percent, si

BAR_HEIGHT = 26
WHOLE = ("peak", "estimated", "measured")


def bars(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """A row a level: whole bars for the ends, and for causes what lies between two levels."""
    rows: list[dict[str, Any]] = []
    before = 0.0
    for level in levels:
        start = 0.0 if level.name in WHOLE else before
        rows.append({
            "name": printable(level.name), "start": start, "end": level.share,
            "told": percent(level.share, 1), "seconds": level.lost_s,
            "kind": "whole" if level.name in WHOLE else "lost" if level.share <= before else "gained",
        })  # fmt: skip
        before = level.share
    return rows


def waterfall_chart(levels: Sequence[Level], look: Look) -> alt.LayerChart:
    """Shares of the peak, one bar below the other."""
    rows, palette = bars(levels), look.palette
    base = alt.Chart(alt.Data(values=rows), name="waterfall").encode(
        y=alt.Y("name:N", sort=[row["name"] for row in rows], title=None, axis=alt.Axis(labelLimit=180)),
        tooltip=[alt.Tooltip("name:N"), alt.Tooltip("told:N", title="left of the peak"),
                 alt.Tooltip("seconds:Q", title="seconds of the step", format=".4~f")],
    )  # fmt: skip
    colour = alt.Color(
        "kind:N",
        legend=None,
        scale=alt.Scale(
            domain=["whole", "lost", "gained"],
            range=[palette.steady, palette.accent, palette.good],
        ),
    )
    x = alt.X("start:Q", title="share of the peak", axis=alt.Axis(format=".0%"))
    marks = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=colour)
    text = base.mark_text(align="left", dx=6, color=palette.ink).encode(
        x=alt.X("right:Q"), text="told:N"
    )
    text = text.transform_calculate(right="max(datum.start, datum.end)")
    notes = ["Share of the dense peak that is left after each cause and those above it."]
    height = BAR_HEIGHT * len(rows)
    return finish([marks, text], look, "From the peak to the estimate", notes, height)


def estimate_html(
    title: str,
    setup: Sequence[str],
    offers: Sequence[tuple[str, Sequence[Level]]],
    notes: Sequence[str],
) -> str:
    """The page of one estimate or of several offers, each with a chart and a table; loads nothing."""
    charts = {
        f"waterfall-{number}": waterfall_chart(levels, ON_PAGE)
        for number, (_, levels) in enumerate(offers, start=1)
    }
    heads = ("cause", "left of the peak", "FLOP/s a device", "seconds of the step")
    return render_page(
        "estimate.html.j2", charts, name=one_line(title), setup=[one_line(part) for part in setup],
        heads=heads, notes=[one_line(note) for note in notes],
        offers=[(one_line(name), [_cells(level) for level in levels]) for name, levels in offers],
    )  # fmt: skip


def _cells(level: Level) -> list[str]:
    seconds = f"{level.lost_s:.4g}" if level.lost_s else ""
    return [
        printable(level.name),
        percent(level.share, 1),
        si(level.flops_per_s, "FLOP/s"),
        seconds,
    ]
