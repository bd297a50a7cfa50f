"""Documents as HTML pages: one self-contained file each, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

import altair as alt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline import __version__
from paceline.core.text import one_line, printable
from paceline.report.document import Document, Links, Preformatted, Section, Table
from paceline.report.figures import split_unit
from paceline.report.svg import page_svg
from paceline.report.theme import DARK, LIGHT, ON_PAGE, TITLE_SEPARATOR, css_variables

UNEVEN_PAIR = ["step-times", "distribution"]
"""Charts of a run that share a row in the ratio 2:1."""
FIGURE_START = "0123456789+-\N{MINUS SIGN}±<"
MAX_FIGURE_CHARS, MAX_SHORT_CHARS, MAX_NAME_CHARS = 32, 20, 40
"""Maximum lengths of cells that stay on one line, by kind of column."""


COLUMN_GAP, PANEL_SPACE, PAGE_WIDTH = 14, 34, 1072
"""Pixels of the page's layout in `page.css`: gap between panels, padding and border of a panel."""
PHONE_WIDTH = 346
"""Width in pixels of a chart on a phone."""
MAX_PAGE_ROWS = 500
"""Maximum number of rows of a table; thousands of layouts or nodes would make a page slow."""


@dataclass(frozen=True)
class EmbeddedChart:
    """One chart as SVG, with its heading and notes as text of the page."""

    name: str
    title: str
    subject: str
    """Recipe, device or run of the chart; empty if the page has no other."""
    notes: tuple[str, ...]
    wide: Markup
    narrow: Markup
    """Chart for a phone; empty if the wide one fits."""


def render_document(document: Document, command: str = "") -> str:
    """Return a document as a page that loads nothing. All texts of the document are escaped.

    `command` is the command that produced the page, unless the document has its own.
    """
    chart_by_name = document.charts(ON_PAGE) if document.charts else {}
    widths = chart_widths(list(chart_by_name))
    charts = [_embedded_chart(name, chart, widths[name]) for name, chart in chart_by_name.items()]
    script = _template_text("page.js")
    sections = [_limit_rows(section) for section in document.sections_for("page")]
    title = one_line(document.headline) or one_line(document.title)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            document=document,
            title=title,
            setup=_page_setup(document, title),
            cards=[
                (figure, *split_unit(one_line(figure.value)), tuple(filter(None, figure.details)))
                for figure in document.figures
            ],
            charts=charts,
            alerts=[each for each in sections if each.tone == "alert"],
            panels=[each for each in sections if each.tone != "alert" and each.media != "folded"],
            folds=[each for each in sections if each.tone != "alert" and each.media == "folded"],
            policy=_policy(script),
            style=Markup(_template_text("page.css")),
            light=Markup(css_variables(LIGHT)),
            dark=Markup(css_variables(DARK)),
            script=Markup(script),
            version=__version__,
            command=one_line(document.command or command),
        )
    )


def _page_setup(document: Document, title: str) -> tuple[str, ...]:
    """Return the setup, preceded by the document's title unless the page's title starts with it."""
    own_title = one_line(document.title)
    return document.setup if title.startswith(own_title) else (own_title, *document.setup)


def chart_widths(names: Sequence[str]) -> dict[str, int]:
    """Return the width in pixels of each chart on a wide window, following the page's layout.

    Step times and their distribution share a row in the ratio 2:1. All others are in two columns,
    the last of an odd number over both.
    """
    columns = PAGE_WIDTH - COLUMN_GAP
    widths = dict.fromkeys(names, columns // 2 - PANEL_SPACE)
    others = list(names)
    if others[:2] == UNEVEN_PAIR:
        third = columns // 3
        widths.update(zip(UNEVEN_PAIR, (2 * third - PANEL_SPACE, third - PANEL_SPACE), strict=True))
        others = others[2:]
    if len(others) % 2:
        widths[others[-1]] = PAGE_WIDTH - PANEL_SPACE
    return widths


def _limit_rows(section: Section) -> Section:
    """Return a section with at most MAX_PAGE_ROWS rows, and a note of how many are left out."""
    num_omitted = len(section.rows) - MAX_PAGE_ROWS if isinstance(section, Table) else 0
    if not isinstance(section, Table) or num_omitted <= 0:
        return section
    note = f"{num_omitted:,} more rows are left out; CSV and JSON have all of them."
    note = f"{section.note} {note}" if section.note else note
    return replace(section, rows=section.rows[:MAX_PAGE_ROWS], note=note)


def _embedded_chart(name: str, chart: alt.LayerChart, width: int) -> EmbeddedChart:
    """Return the chart without its title, which becomes text of the page."""
    spec = chart.to_dict()
    title = spec.pop("title")
    text, _, subject = title["text"].partition(TITLE_SEPARATOR)
    narrow = ""
    if width > PHONE_WIDTH:
        narrow = page_svg(spec, PHONE_WIDTH, f"{name}-narrow", labels=False)
    wide = page_svg(spec, width, name)
    return EmbeddedChart(
        name, text, subject, tuple(title["subtitle"]), Markup(wide), Markup(narrow)
    )


def column_kinds(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a CSS class per column: figures are right-aligned, figures and short texts never wrap.

    The first column names the row and is always left-aligned.
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    kinds = [_kind([cell for cell in cells if cell]) for cells in columns]
    names = max((len(cells[0]) for cells in rows), default=0)
    return ["short" if names <= MAX_NAME_CHARS else "words", *kinds[1:]]


def _kind(cells: Sequence[str]) -> str:
    longest = max(map(len, cells), default=0)
    if longest <= MAX_FIGURE_CHARS and all(
        cell == "-" or cell[0] in FIGURE_START for cell in cells
    ):
        return "figure"
    return "short" if longest <= MAX_SHORT_CHARS else "words"


def _policy(script: str) -> str:
    """Return a content security policy that loads nothing and runs only the page's script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean_string,
    )
    environment.filters["unbroken"] = with_no_break_spaces
    environment.filters["quoted"] = quote
    environment.globals["uneven_pair"] = UNEVEN_PAIR
    environment.globals["column_kinds"] = column_kinds
    environment.globals["hints"] = lambda table: (
        [row.get(table.hint_key, "") for row in table.rows] if table.hint_key else ()
    )
    environment.tests["table"] = lambda section: isinstance(section, Table)
    environment.tests["links"] = lambda section: isinstance(section, Links)
    environment.tests["preformatted"] = lambda section: isinstance(section, Preformatted)
    return environment


def with_no_break_spaces(text: str) -> str:
    """Return `text` with no-break spaces between numbers and their units."""
    return re.sub(r"(?<=±) (?=\d)|(?<=\d) (?=[%A-Za-z])", "\N{NO-BREAK SPACE}", text)


def _clean_string(value: Any) -> Any:
    """Return strings without control characters; markup of the page itself is unchanged."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _template_text(name: str) -> str:
    return (resources.files("paceline.report") / "templates" / name).read_text(encoding="utf-8")
