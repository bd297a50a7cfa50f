"""One document with a hostile text in every place, through every renderer.

The text may be changed, but it stays text: whatever stands in its place, the output has the same
lines, cells, elements and attributes as with a word.
"""

from __future__ import annotations

import csv
import io
import json
import random
from html.parser import HTMLParser
from typing import Any

import markdown
import pytest

from paceline.cli.options import ReportFormat
from paceline.cli.output import render
from paceline.core.text import printable
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Links,
    Notes,
    Preformatted,
    Table,
    Verdict,
)

WORD = "plain"
PIECES = (
    *("\x1b]0;owned\x07", "\x1b[31m", "\x9b31m", "\x00", "\x08", "\r", "\n", "\r\n", "\t", "\v"),
    *("\f", "\x1c", "\x85", "\u2028", "\u2029", "\u202e", "\u061c", "\u200b", "\ufeff", "\ud800"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;b&gt;", "&#60;", "'", '"'),
    *("</textarea></style></script>", "<!--", "]]>", "javascript:alert(1)", "[a](http://b)"),
    *("![a](http://b)", "<http://a.b>", "# a", "- a", "1. a", "> a", "```", "`a`", "**a**", "_a_"),
    *("| a | b |", "|", "\\", "\\|", "---", "$a$", "~~a~~", "{{ a }}", "{% a %}", "www.a.org"),
    *("=1+1", "+1", "-1", "@a", "=cmd|' /C calc'!A0", "\uff1d1", "\t=1", " =1", ",", ";", '"",=1'),
)
RANDOM = random.Random(41)
TEXTS = (
    *PIECES,
    *("".join(RANDOM.choices((*PIECES, "a", " "), k=RANDOM.randint(2, 6))) for _ in range(60)),
)
TEXTS = tuple(text for text in TEXTS if printable(text).strip())


def document(text: str) -> Document:
    """A document in which every text is `text`."""
    columns = (Column("a", "a"), Column("b", "b", wraps=True))
    rows = [{"a": text, "b": text, "hint": text}, {"a": 1.5, "b": None, "hint": ""}]
    return Document(
        kind=text,
        title=text,
        verdict=Verdict(text, "alert"),
        setup=(text, text),
        answer=(text,),
        figures=(Figure(text, f"a {text}", text, (text,), text),),
        sections=(
            Table(title=text, columns=columns, rows=rows, note=text, hint_key="hint"),
            Notes(title=text, lines=(text, text)),
            Links(title=text, paths=(text,)),
        ),
        notes=(text,),
        data={"a": text, "rows": rows},
        headline=text,
        source=text,
        command=text,
    )


class Elements(HTMLParser):
    """Elements of a page with the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def assert_clean(output: str) -> None:
    """Assert that nothing moves a terminal, ends a line elsewhere or cannot be written."""
    output.encode()
    assert printable(output) == output
    assert output.splitlines() == output.removesuffix("\n").split("\n")


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_text_stays_text_in_every_form(text: str):
    printed, plain = render(document(text), ReportFormat.text), render(document(WORD), "text")  # type: ignore[arg-type]
    assert_clean(printed)
    marked = render(document(text), ReportFormat.md)
    assert_clean(marked)
    assert _elements(marked) == _elements(render(document(WORD), ReportFormat.md))
    page = Elements(render(document(text), ReportFormat.html))
    assert page.found == Elements(render(document(WORD), ReportFormat.html)).found
    assert not [link for link in page.links if link.startswith(("javascript:", "data:text"))]
    assert len(printed.splitlines()) <= len(plain.splitlines()) + 12


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_cell_of_csv_is_one_cell_and_no_formula(text: str):
    content = render(document(text), ReportFormat.csv)
    assert_clean(content.replace("\r\n", "\n"))
    rows = list(csv.reader(io.StringIO(content)))
    assert [len(row) for row in rows] == [2, 2, 2]
    for cell in rows[1]:
        assert not cell.strip().startswith(("=", "+", "-", "@", "\uff1d")), cell


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_json_holds_the_text_itself(text: str):
    if "\ud800" in text:
        return  # readers refuse or replace it: nothing could be written
    data: Any = document(text).data
    assert json.loads(render(document(text), ReportFormat.json)) == data


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_log_keeps_its_lines_and_nothing_else(text: str):
    log = Document(kind="a", title="b", sections=(Preformatted(title="c", text=text),))
    for form in (ReportFormat.text, ReportFormat.md):
        assert_clean(render(log, form).replace("\t", " "))
    plain = Document(kind="a", title="b", sections=(Preformatted(title="c", text=WORD),))
    empty = not printable(text).strip()
    if not empty:
        elements = Elements(render(log, ReportFormat.html)).found
        assert elements == Elements(render(plain, ReportFormat.html)).found


def _elements(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return Elements(markdown.markdown(text, extensions=["tables", "fenced_code"])).found
