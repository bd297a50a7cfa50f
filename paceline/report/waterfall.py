"""From the peak to the estimated rate, or the measured one: a bar for what each cause takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import percent
from paceline.core.waterfall import WaterfallLevel
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

BAR_HEIGHT = 26
TOTALS = ("peak", "estimated", "measured")


def bars(levels: Sequence[WaterfallLevel]) -> list[dict[str, Any]]:
    """A row a level: whole bars for the ends, and for causes what lies between two levels."""
    rows: list[dict[str, Any]] = []
    before = 0.0
    for level in levels:
        start = 0.0 if level.name in TOTALS else before
        rows.append(
            {
                "name": printable(level.name),
                "start": start,
                "end": level.share,
                "told": percent(level.share, 1),
                "seconds": level.lost_s,
                "kind": "whole"
                if level.name in TOTALS
                else "lost"
                if level.share <= before
                else "gained",
            }
        )
        before = level.share
    return rows


def waterfall_chart(
    levels: Sequence[WaterfallLevel],
    theme: ChartTheme,
    subject: str = "",
    peak: str = "the dense peak",
    convention: str | None = None,
) -> alt.LayerChart:
    """Shares of the peak, one bar below the other; `whose` as in `finish`, `peak` in words.

    `convention` is the one by which all FLOPs are counted, where it is known.
    """
    rows, palette = bars(levels), theme.palette
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y(
            "name:N", sort=[row["name"] for row in rows], title=None, axis=alt.Axis(labelLimit=180)
        ),
        tooltip=[
            alt.Tooltip("name:N"),
            alt.Tooltip("told:N", title="left of the peak"),
            alt.Tooltip("seconds:Q", title="seconds of the step", format=".4~f"),
        ],
    )
    colour = alt.Color(
        "kind:N",
        legend=None,
        scale=alt.Scale(
            domain=["whole", "lost", "gained"],
            range=[palette.steady, palette.accent, palette.good],
        ),
    )
    x = alt.X("start:Q", title="share of the peak (%)", axis=alt.Axis(format=".0%", tickCount=5))
    marks = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=colour)
    # Of two layers with one name, Vega refuses the second.
    marks = marks.properties(name="waterfall")
    text = base.mark_text(align="left", dx=6, color=palette.ink).encode(
        x=alt.X("right:Q"), text="told:N"
    )
    text = text.transform_calculate(right="max(datum.start, datum.end)")
    measured = levels[-1].name == "measured"
    by = f", FLOPs by {convention}" if convention else ""
    notes = [f"Share of {peak} that is left after each cause and those above it{by}."]
    if any(row["kind"] == "gained" for row in rows if row["name"] == "GEMMs and attention"):
        notes.append("Products and attention gain what is counted and not computed.")
    if any(level.name == "unexplained" for level in levels):
        notes.append(
            "“Not explained” is what the measured step takes more, or less, than the estimated one."
        )
    title = "From the peak to the measured step" if measured else "From the peak to the estimate"
    return finish_chart([marks, text], theme, title, notes, BAR_HEIGHT * len(rows), subject)


def run_waterfall(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """The run's way from the peak to its measured step; None where it was not estimated."""
    if not report.waterfall:
        return None
    name, convention = report.result.recipe, report.facts.flops_convention
    return waterfall_chart(report.waterfall, theme, name, convention=convention)
