"""Colours and chart settings, defined once for the page (light and dark) and for exports.

The hues are blue, orange and grey of different lightness, so that they are distinguishable with
common forms of colour blindness and in greyscale print.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

FONT = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
EXPORT_WIDTH = 640
TITLE_SEPARATOR = " \N{MIDDLE DOT} "
"""Separator in a chart's title between what it shows and its subject."""


@dataclass(frozen=True)
class Palette:
    """Colours of one colour scheme."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    steady: str
    """Steps in the window."""
    band: str
    warmup: str
    shade: str
    """Background of the warm-up."""
    accent: str
    """Emphasis: a straggler, a limit, a failure."""
    danger: str
    """Impossible values."""
    good: str
    steady_soft: str
    """Lighter variants, for parts of one bar."""
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
    danger="#b3261e",
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
    danger="#ff8a80",
    good="#63c2b0",
    steady_soft="#55809f",
    good_soft="#38655f",
    warmup_soft="#464c54",
)

PAGE = Palette(**{field.name: f"var(--{field.name})" for field in fields(Palette)})
"""Colours as CSS variables, so that one chart follows the page's colour scheme."""


@dataclass(frozen=True)
class ChartTheme:
    """Colours and width in pixels of a chart."""

    palette: Palette
    width: int | Literal["container"]
    background: str


ON_PAGE = ChartTheme(PAGE, "container", "transparent")
EXPORT = ChartTheme(LIGHT, EXPORT_WIDTH, LIGHT.card)


def css_variables(palette: Palette) -> str:
    """Return the palette as CSS custom properties."""
    return " ".join(f"--{name}: {colour};" for name, colour in asdict(palette).items())


def chart_config(theme: ChartTheme) -> dict[str, Any]:
    """Return the Vega-Lite configuration: light axes, horizontal grid, legend on top."""
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
        # The viewer of a saved chart may have a wider font than the one that was measured here.
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
