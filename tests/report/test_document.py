"""One document in every medium: the same facts, escaped for each, colour on a terminal alone."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console

from paceline.cli.options import ReportFormat
from paceline.cli.output import render
from paceline.core.errors import UserError
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Preformatted,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.report.html import MAX_PAGE_ROWS, render_document
from paceline.report.terminal import print_document

HOSTILE = "\x1b[31m<b>*x*</b>\u202e | [bold]y[/bold]"
WIDTH = 60


def example(text: str = "a text") -> Document:
    """A document with every kind of block, each of which holds `text`."""
    columns = (Column("name", "name"), Column("value", "value", lambda x: f"{x:.1f}", "right"))
    return Document(
        kind="an example",
        title=f"title {text}",
        verdict=Verdict(f"verdict {text}", "alert"),
        setup=(f"setup {text}",),
        answer=(f"answer {text}. " + "word " * 20,),
        figures=(
            Figure("Step time", "0.2 s", f"interval {text}", (text,)),
            unknown_figure("MFU", text),
        ),
        sections=(
            Notes(title="Warnings", lines=(f"warning {text}",), tone="alert"),
            Table(
                title=f"table {text}",
                columns=columns,
                rows=[{"name": f"=row {text}", "value": 1.25}, {"name": "none", "value": None}],
                note=f"note {text}",
            ),
            Preformatted(title="spark", text=f"▁█ {text}", media="text"),
            Preformatted(title="script", text=f"echo {text}", media="folded"),
            Notes(title="on the page", lines=(f"page {text}",), media="page"),
            Notes(title="never", lines=()),
        ),
        notes=(f"reservation {text}",),
        data={"value": 1.25},
    )


def on_a_terminal(document: Document, **more: bool) -> str:
    """The document as a terminal gets it, with its escape sequences."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=WIDTH, color_system="standard", **more
    )
    print_document(document, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("form", ["text", "md", "html"])
def test_every_medium_shows_every_block_once_and_nothing_of_an_empty_one(form: str):
    shown = render(example(), ReportFormat(form)).replace("\N{NO-BREAK SPACE}", " ")
    for part in ("verdict", "setup", "answer", "interval", "warning", "note", "reservation"):
        assert shown.count(f"{part} a text") == 1
    assert "not known" in shown and "never" not in shown
    assert ("▁█" in shown, "echo" in shown, "on the page" in shown) == (
        (False, True, True) if form == "html" else (True, False, False)
    )
    assert shown.index("warning a text") < shown.index("Step time") < shown.index("=row")


def test_an_empty_detail_leaves_no_separator():
    figure = Figure("Step time", "0.2 s", "", ("one", "", "two"))
    shown = render(Document(kind="a", title="b", figures=(figure,)), ReportFormat.md)
    assert "| one; two |" in shown


def test_a_file_has_no_colours_where_a_terminal_is_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in render(example(), ReportFormat.text)


def test_text_in_a_pipe_is_plain_and_its_lines_are_whole():
    text = render(example(), ReportFormat.text)
    assert "\x1b" not in text and "title a text · setup a text\n" in text
    assert any(
        line.startswith("  answer a text") and len(line) > WIDTH for line in text.splitlines()
    )
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_terminal_gets_emphasis_a_coloured_verdict_and_lines_of_its_width():
    shown = on_a_terminal(example())
    assert "\x1b[1mtitle a text" in shown and "\x1b[1;31mverdict a text" in shown
    plain = on_a_terminal(example(), no_color=True)
    assert "\x1b[1;31m" not in plain and "verdict a text" in plain


@pytest.mark.parametrize("form", ["text", "md", "html"])
def test_no_text_is_markup_or_a_command_in_any_medium(form: str):
    shown = render(example(HOSTILE), ReportFormat(form))
    assert not set("\x1b\u202e") & set(shown)
    shown = re.sub(r"```.*?```", "", shown, flags=re.DOTALL)
    assert "<b>" not in shown if form != "text" else "[bold]y[/bold]" in shown
    assert not set("\u202e") & set(on_a_terminal(example(HOSTILE)))


def test_csv_is_the_first_table_unrounded_and_no_formula():
    rows = list(csv.reader(io.StringIO(render(example(), ReportFormat.csv))))
    assert rows == [["name", "value"], ["'=row a text", "1.25"], ["none", ""]]
    with pytest.raises(UserError, match="is not available, because there is no table"):
        render(Document(kind="a", title="b"), ReportFormat.csv)


def test_json_is_the_data():
    assert render(example(), ReportFormat.json) == '{\n  "value": 1.25\n}\n'


def test_a_page_shortens_a_long_table_and_says_so():
    rows = [{"name": f"row-{at}."} for at in range(MAX_PAGE_ROWS + 7)]
    table = Table(columns=(Column("name", "name"),), rows=rows, note="All runs.")
    page = render_document(Document(kind="an example", title="long", sections=(table,)))
    assert f"row-{MAX_PAGE_ROWS - 1}." in page and f"row-{MAX_PAGE_ROWS}." not in page
    assert "All runs. 7 more rows are left out" in page.replace("\N{NO-BREAK SPACE}", " ")
