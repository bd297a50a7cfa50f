"""Colours and chart settings, defined once for the page (light and dark) and for exports.

The hues are blue, orange and grey of different lightness: they stay apart under the common colour
blindnesses and in a grey print.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
EXPORT_WIDTH = 640
TITLE_SEPARATOR = " \N{MIDDLE DOT} "
"""Between what a chart shows and whose it is, in its title."""


@dataclass(frozen=True)
class Palette:
    """The colours of one appearance."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    steady: str
    """The steps that count."""
    band: str
    warmup: str
    shade: str
    """The ground under the warm-up."""
    accent: str
    """What the reader should look at: a straggler, a limit, a failure."""
    good: str
    steady_soft: str
    """Lighter relatives, for parts of one bar."""
    good_soft: str
    warmup_soft: str


LIGHT = Palette(
    page="#f7f7f5",
    card="#ffffff",
    ink="#1d232b",
    muted="#5d6672",
    line="#e2e3e0",
    steady="#2f6ba8",
    band="#cfdfef",
    warmup="#9298a0",
    shade="#efefec",
    accent="#b8540f",
    good="#1f7a6c",
    steady_soft="#7ba3ca",
    good_soft="#a5cbc4",
    warmup_soft="#d3d5d8",
)

DARK = Palette(
    page="#14171b",
    card="#1c2026",
    ink="#e7e8e6",
    muted="#a0a8b2",
    line="#343a42",
    steady="#7db3e3",
    band="#2b4258",
    warmup="#7f8791",
    shade="#252a31",
    accent="#efa066",
    good="#63c2b0",
    steady_soft="#55809f",
    good_soft="#38655f",
    warmup_soft="#464c54",
)

PAGE = Palette(**{field.name: f"var(--{field.name})" for field in fields(Palette)})
"""Colours as CSS variables, so that one drawing follows the page's appearance."""


@dataclass(frozen=True)
class ChartTheme:
    """Where a chart is drawn: its colours and its width in pixels."""

    palette: Palette
    width: int | Literal["container"]
    background: str


ON_PAGE = ChartTheme(PAGE, "container", "transparent")
EXPORT = ChartTheme(LIGHT, EXPORT_WIDTH, LIGHT.card)


def css_variables(palette: Palette) -> str:
    """The palette as CSS custom properties."""
    return " ".join(f"--{name}: {colour};" for name, colour in asdict(palette).items())


def chart_config(theme: ChartTheme) -> dict[str, Any]:
    """Vega-Lite configuration: quiet axes, horizontal grid, legend on top."""
    colours = theme.palette
    text = {
        "labelColor": colours.muted,
        "titleColor": colours.muted,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    }
    return {
        "font": FONT,
        "background": theme.background,
        # A saved chart's reader may have a wider font than the labels were measured with.
        "padding": {"left": 4 if theme is ON_PAGE else 24, "right": 12, "top": 6, "bottom": 4},
        "view": {"stroke": None},
        "axis": {
            **text,
            "gridColor": colours.line,
            "domainColor": colours.line,
            "tickColor": colours.line,
            "titlePadding": 8,
            "labelLimit": 120,
        },
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "legend": {
            **text,
            "orient": "top",
            "title": None,
            "direction": "horizontal",
            "symbolSize": 60,
            "columnPadding": 14,
            "offset": 6,
            "symbolStrokeWidth": 0,
        },
        "text": {"color": colours.ink, "fontSize": 11},
        "title": {
            "anchor": "start",
            "color": colours.ink,
            "subtitleColor": colours.muted,
            "fontSize": 14,
            "subtitleFontSize": 11,
            "subtitlePadding": 4,
            "offset": 10,
        },
    }
