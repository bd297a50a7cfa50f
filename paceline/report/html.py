"""Documents as HTML pages: one self-contained file each, which loads nothing."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import altair as alt
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline import __version__
from paceline.core.text import one_line, printable
from paceline.report.document import Document, Links, Preformatted, Section, Table
from paceline.report.figures import split_unit
from paceline.report.theme import DARK, FONT, LIGHT, ON_PAGE, TITLE_SEPARATOR, css_variables

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
    environment.filters["quoted"] = partial(quote, errors="replace")  # names of any bytes
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


VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
NAMESPACE = "{http://www.w3.org/2000/svg}"
LABEL = "aria-label"
REMOVED = frozenset(("role", "aria-roledescription", "aria-hidden", "pointer-events", "version"))
DEFAULTS = {
    "font-family": FONT,
    "font-size": "11px",
    "font-weight": "normal",
    "font-style": "normal",
    "opacity": "1",
    "stroke-opacity": "1",
    "fill-opacity": "1",
    "stroke-dashoffset": "0",
    "transform": "translate(0,0)",
    "stroke-miterlimit": "10",
}
"""Attributes without effect: the page's style sheet or SVG itself has the same values."""
CIRCLE = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0")
TRANSLATION = re.compile(r"translate\(([-\d.]+,[-\d.]+)\)")
BEYOND_BASIC = re.compile("[\U00010000-\U0010ffff]")
NUMBER = re.compile(r"-?\d*\.\d{2,}(?:e-?\d+)?")


def page_svg(spec: Mapping[str, Any], width: int, name: str, *, labels: bool = True) -> str:
    """Return a Vega-Lite chart as an SVG element for a page.

    `name` makes the ids of the element unique within the page. With `labels`, each mark that has a
    tooltip carries its text as `aria-label`, separated by semicolons, which the page's
    script shows when the pointer is on the mark.
    """
    content = _drawable({**copy.deepcopy(dict(spec)), "width": width})
    content.pop("title", None)
    for layer in content.get("layer", [content]):
        _describe_marks(layer)
    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(content, VEGA_LITE))
    _shrink(root, labels, in_mark=False)
    if not labels:
        _merge_dots(root)
    _prefix_ids(root, name)
    root.set("role", "img")
    root.set(LABEL, str(content.get("description", "")))
    text = ElementTree.tostring(root, encoding="unicode")
    return text.replace("ns0:", "").replace(":ns0", "")


def _drawable(value: Any) -> Any:
    """Return nested JSON values without characters in texts that cannot be drawn.

    These are control characters, and those beyond the basic plane: Vega cuts long labels between
    the two halves of such a character, which vl-convert then refuses.
    """
    if isinstance(value, dict):
        return {key: _drawable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_drawable(each) for each in value]
    if not isinstance(value, str):
        return value
    return BEYOND_BASIC.sub("\N{REPLACEMENT CHARACTER}", printable(value))


def _describe_marks(layer: dict[str, Any]) -> None:
    """Make the tooltip of a layer the label of its marks; marks without one get no label."""
    encoding = layer.get("encoding", {})
    tooltip = encoding.pop("tooltip", None)
    if tooltip and "description" not in encoding:
        fields = tooltip if isinstance(tooltip, list) else [tooltip]
        calculate = " + '; ' + ".join(_label_line(each) for each in fields)
        layer["transform"] = [
            *layer.get("transform", []),
            {"calculate": calculate, "as": "tooltip_text"},
        ]
        encoding["description"] = {"field": "tooltip_text", "type": "nominal"}
    elif "description" not in encoding:
        mark = layer["mark"]
        layer["mark"] = {**(mark if isinstance(mark, dict) else {"type": mark}), "aria": False}


def _label_line(field: Mapping[str, Any]) -> str:
    """Return the Vega expression of one line of a tooltip: `TITLE: VALUE`."""
    value = f"datum[{json.dumps(field['field'])}]"
    form = json.dumps(field.get("format", ""))
    if field["type"] == "temporal":
        value = f"utcFormat(toDate({value}), {form})"
    elif "format" in field:
        value = f"format({value}, {form})"
    return f"{json.dumps(str(field.get('title') or field['field']) + ': ')} + {value}"


def _shrink(element: ElementTree.Element, labels: bool, in_mark: bool) -> None:
    """Remove what has no effect from an element and its children, in place."""
    in_mark = in_mark or "role-mark" in element.get("class", "")
    for key, value in list(element.attrib.items()):
        is_unwanted_label = key == LABEL and not (labels and in_mark)
        if key in REMOVED or is_unwanted_label or DEFAULTS.get(key) == value:
            del element.attrib[key]
        elif key not in (LABEL, "class", "id"):
            element.set(key, NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value))
    for child in list(element):
        invisible = child.get("display") == "none" or child.get("d") == ""
        background = child.get("class") == "background" and not child.get("fill")
        if invisible or (background and not child.get("stroke")):
            element.remove(child)
        else:
            _shrink(child, labels, in_mark)
    element.tail = None


def _merge_dots(root: ElementTree.Element) -> None:
    """Draw the circles of one colour in a layer as one path: zero-length lines with round ends."""
    for group in root.iter(f"{NAMESPACE}g"):
        dots: dict[tuple[str, str], ElementTree.Element] = {}
        for mark in list(group):
            circle = CIRCLE.match(mark.get("d", ""))
            place = TRANSLATION.fullmatch(mark.get("transform", ""))
            if not circle or not place or mark.get("stroke") or not mark.get("fill"):
                continue
            group.remove(mark)
            key = circle[1], mark.get("fill", "")
            if key not in dots:
                attributes = {"d": "", "stroke": key[1], "stroke-width": f"{2 * float(key[0]):g}"}
                dots[key] = ElementTree.SubElement(
                    group, mark.tag, {**attributes, "stroke-linecap": "round"}
                )
            dots[key].set("d", f"{dots[key].get('d')}M{place[1]}h0")


def _prefix_ids(root: ElementTree.Element, name: str) -> None:
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key in ("clip-path", "fill", "stroke") and value.startswith("url(#"):
                element.set(key, value.replace("url(#", f"url(#{name}-"))
