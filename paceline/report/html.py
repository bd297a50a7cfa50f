"""Documents as HTML pages: one self-contained file each, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
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

from paceline.core.text import one_line, printable
from paceline.report.document import Document, Links, Preformatted, Section, Table
from paceline.report.figures import split_unit
from paceline.report.theme import DARK, LIGHT, ON_PAGE, TITLE_SEPARATOR, css_variables
from paceline.report.vega import vega_bundle

FIGURE_START = "0123456789+-\N{MINUS SIGN}±<"
MAX_FIGURE_CHARS, MAX_SHORT_CHARS, MAX_NAME_CHARS = 32, 20, 40
"""Maximum lengths of cells that stay on one line, by kind of column."""


@dataclass(frozen=True)
class EmbeddedChart:
    """One chart with its heading and notes as text of the page."""

    name: str
    title: str
    whose: str
    """The recipe, device or run that it shows; empty where the page is of nothing else."""
    notes: tuple[str, ...]
    spec: Markup


MAX_PAGE_ROWS = 500
"""Maximum number of rows of a table; thousands of layouts or nodes would make a page slow."""


def render_document(document: Document) -> str:
    """Return the page of a document, which loads nothing; every text in it is escaped."""
    chart_by_name = document.charts(ON_PAGE) if document.charts else {}
    charts = [_embedded_chart(name, chart) for name, chart in chart_by_name.items()]
    bundle = vega_bundle() if charts else ""
    script = _template_text("page.js")
    sections = [_limit_rows(section) for section in document.sections_for("page")]
    title = one_line(document.title)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            document=document,
            title=title,
            window_title=one_line(document.window_title) or title,
            cards=[
                (figure, *split_unit(one_line(figure.value)), tuple(filter(None, figure.details)))
                for figure in document.figures
            ],
            charts=charts,
            alerts=[each for each in sections if each.tone == "alert"],
            panels=[each for each in sections if each.tone != "alert" and each.media != "folded"],
            folds=[each for each in sections if each.tone != "alert" and each.media == "folded"],
            policy=_policy(bundle, script),
            style=Markup(_template_text("page.css")),
            light=Markup(css_variables(LIGHT)),
            dark=Markup(css_variables(DARK)),
            bundle=Markup(bundle),
            script=Markup(script),
        )
    )


def _limit_rows(section: Section) -> Section:
    """Return a section with at most MAX_PAGE_ROWS rows, and a note of how many are left out."""
    num_omitted = len(section.rows) - MAX_PAGE_ROWS if isinstance(section, Table) else 0
    if not isinstance(section, Table) or num_omitted <= 0:
        return section
    note = f"{num_omitted:,} more rows are left out; CSV and JSON have all of them."
    note = f"{section.note} {note}" if section.note else note
    return replace(section, rows=section.rows[:MAX_PAGE_ROWS], note=note)


def _embedded_chart(name: str, chart: alt.LayerChart) -> EmbeddedChart:
    """The chart with its title taken out: the page sets and wraps that itself."""
    spec = chart.to_dict()
    title = spec.pop("title")
    text, _, whose = title["text"].partition(TITLE_SEPARATOR)
    notes = tuple(title["subtitle"])
    return EmbeddedChart(name, text, whose, notes, json_for_script(spec))


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


def json_for_script(content: Any) -> Markup:
    """JSON that no HTML parser can take for markup."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _policy(*scripts: str) -> str:
    """Return a content security policy that loads nothing and runs only the given scripts."""
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts if script)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
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
