"""The page of an estimate or of several offers: charts from the peak down, tables, sources."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.text import one_line, printable
from paceline.core.units import percent, si
from paceline.core.waterfall import WaterfallLevel
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE
from paceline.report.waterfall import waterfall_chart


def estimate_html(
    title: str,
    setup: Sequence[str],
    offers: Sequence[tuple[str, Sequence[WaterfallLevel]]],
    notes: Sequence[str],
) -> str:
    """The page of one estimate or of several offers, each with chart and table; loads nothing."""
    charts = {
        f"waterfall-{number}": waterfall_chart(levels, ON_PAGE)
        for number, (_, levels) in enumerate(offers, start=1)
    }
    measured = any(levels[-1].name == "measured" for _, levels in offers)
    eyebrow = "an estimate beside a measured step" if measured else "an estimate: nothing ran"
    heads = ("cause", "left of the peak", "FLOP/s a device", "seconds of the step")
    return render_page(
        "estimate.html.j2",
        charts,
        eyebrow=eyebrow,
        name=one_line(title),
        setup=[one_line(part) for part in setup],
        heads=heads,
        notes=[one_line(note) for note in notes],
        offers=[(one_line(name), [_cells(level) for level in levels]) for name, levels in offers],
    )


def _cells(level: WaterfallLevel) -> list[str]:
    seconds = f"{level.lost_s:.4g}" if level.lost_s else ""
    return [
        printable(level.name),
        percent(level.share, 1),
        si(level.flops_per_s, "FLOP/s"),
        seconds,
    ]
