"""MFU waterfall: one bar per cause, from the device's peak to the estimated or measured rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from paceline.core.result import WaterfallLevel
from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import percent
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

BAR_HEIGHT = 26
TOTALS = ("peak", "estimated", "measured")
UNEXPLAINED = "unexplained"
LABEL_ROOM = 1.5
"""Right end of the axis as a share of the peak, which leaves room for the labels of long bars."""


def waterfall_rows(levels: Sequence[WaterfallLevel]) -> list[dict[str, Any]]:
    """Return one row per level: a full bar for a total, and what a cause takes between two levels.

    `change` is what the cause takes in percentage points of the peak, `remaining` what is left.
    """
    rows: list[dict[str, Any]] = []
    before = 0.0
    for level in levels:
        total = level.name in TOTALS
        remaining = percent(level.share, 1)
        rows.append(
            {
                "name": printable(level.name),
                "start": 0.0 if total else before,
                "end": level.share,
                "change": remaining if total else _points(level.share - before),
                "remaining": "" if total else remaining,
                "seconds": level.lost_s,
                "kind": "total" if total else "loss" if level.share <= before else "gain",
            }
        )
        before = level.share
    return rows


def _points(difference: float) -> str:
    """Return a difference of two shares in percentage points with a proper minus sign: `−27.4`."""
    return f"{100 * difference + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def waterfall_chart(
    levels: Sequence[WaterfallLevel],
    theme: ChartTheme,
    subject: str = "",
    peak: str = "the dense peak",
    convention: str | None = None,
) -> alt.LayerChart:
    """Return the waterfall chart, the first level on top.

    `subject` is as in `finish_chart`, `peak` describes 100%, and `convention` is the FLOPs
    convention of all rates if it is known.
    """
    rows, palette = waterfall_rows(levels), theme.palette
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y(
            "name:N", sort=[row["name"] for row in rows], title=None, axis=alt.Axis(labelLimit=180)
        ),
        tooltip=[
            alt.Tooltip("name:N"),
            alt.Tooltip("change:N", title="points of the peak"),
            alt.Tooltip("remaining:N", title="left"),
            alt.Tooltip("seconds:Q", title="seconds of the step", format=".4~f"),
        ],
    )
    colour = alt.Color(
        "kind:N",
        legend=None,
        scale=alt.Scale(
            domain=["total", "loss", "gain"],
            range=[palette.steady, palette.accent, palette.good],
        ),
    )
    x = alt.X(
        "start:Q",
        title="share of the peak (%)",
        axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
        scale=alt.Scale(domain=[0, max(LABEL_ROOM, *(level.share for level in levels))]),
    )
    # Vega refuses two layers with the same name, so only the bars have one.
    bars = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=colour)
    bars = bars.properties(name="waterfall")
    labels = base.transform_calculate(right="max(datum.start, datum.end)").encode(x="right:Q")
    changes = labels.mark_text(align="left", dx=6, color=palette.ink).encode(text="change:N")
    remains = base.mark_text(align="right", color=palette.muted)
    remains = remains.encode(x=alt.value("width"), text="remaining:N")
    by = f", FLOPs by {convention}" if convention else ""
    notes = [
        f"Percentage points of {peak} that each cause takes; in grey: what is left after it{by}."
    ]
    if any(row["kind"] == "gain" and row["name"] != UNEXPLAINED for row in rows):
        notes.append("A gain: the FLOPs convention counts operations that are not computed.")
    if any(level.name == UNEXPLAINED for level in levels):
        notes.append(f"{UNEXPLAINED.capitalize()}: difference of the measured and estimated step.")
    title = f"MFU waterfall to the {levels[-1].name} step"
    height = BAR_HEIGHT * len(rows)
    return finish_chart([bars, changes, remains], theme, title, notes, height, subject)


def run_waterfall_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return the waterfall chart of a run, or None if the run was not estimated."""
    if not report.waterfall:
        return None
    name, convention = report.result.recipe, report.facts.flops_convention
    return waterfall_chart(report.waterfall, theme, name, convention=convention)
