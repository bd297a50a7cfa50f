from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.output import TableFormat, emit_json, emit_table, select_rows
from paceline.core.errors import UserError
from paceline.report.document import Column

ROWS: list[dict[str, Any]] = [
    {"name": "first", "rate_per_s": 1234567.125, "note": 'a | b, "c"', "hidden": 1},
    {"name": "second one", "rate_per_s": None, "note": "[bold]not markup[/bold]"},
]
COLUMNS = [
    Column("name", "name"),
    Column("rate_per_s", "1000/s", lambda value: f"{value / 1000:.1f}", "right"),
    Column("note", "note"),
]


def printed(capsys: pytest.CaptureFixture[str], form: TableFormat, **more: Any) -> str:
    emit_table(ROWS, COLUMNS, form, **more)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_text_in_a_pipe_is_aligned_and_scaled(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, TableFormat.text).splitlines() == [
        "name        1000/s  note",
        'first       1234.6  a | b, "c"',
        "second one       -  [bold]not markup[/bold]",
    ]


def test_json_keeps_every_key_and_digit(capsys: pytest.CaptureFixture[str]):
    assert json.loads(printed(capsys, TableFormat.json)) == ROWS


def test_json_may_be_a_richer_document_and_an_empty_one_counts(capsys: pytest.CaptureFixture[str]):
    assert json.loads(printed(capsys, TableFormat.json, document={"rows": 2})) == {"rows": 2}
    assert json.loads(printed(capsys, TableFormat.json, document=[])) == []


def test_json_refuses_what_is_not_a_number():
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit_json({"rate_per_s": float("nan")})


def test_csv_reads_back_unrounded_under_the_keys(capsys: pytest.CaptureFixture[str]):
    rows = list(csv.DictReader(io.StringIO(printed(capsys, TableFormat.csv))))
    assert rows[0] == {"name": "first", "rate_per_s": "1234567.125", "note": ROWS[0]["note"]}
    assert rows[1]["rate_per_s"] == ""


def test_markdown_keeps_its_columns_whatever_the_cells_hold(capsys: pytest.CaptureFixture[str]):
    header, rule, first, second = printed(capsys, TableFormat.md).splitlines()
    assert header == "| name | 1000/s | note |" and rule == "| --- | ---: | --- |"
    assert "a \\| b" in first and second.startswith("| second one | - |")


def test_a_terminal_gets_no_control_character_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    row = {"name": "a\x1b[31mred\u202eback", "rate_per_s": 1.0, "note": f"hf_{'a1B2' * 9}"}
    emit_table([row], COLUMNS, TableFormat.text)
    shown = capsys.readouterr().out
    assert "ared\N{REPLACEMENT CHARACTER}back" in shown
    assert "[31m" not in shown and "\u202e" not in shown and "a1B2a1B2" not in shown


HOSTILE = {"name": "=cmd|'/C calc'!A0", "rate_per_s": -1.5, "note": "a_b|[x](y)\nc"}


def test_no_text_in_csv_is_a_formula_and_no_number_becomes_text(
    capsys: pytest.CaptureFixture[str],
):
    emit_table([HOSTILE], COLUMNS, TableFormat.csv)
    cells = list(csv.reader(io.StringIO(capsys.readouterr().out)))[1]
    assert cells == ["'=cmd|'/C calc'!A0", "-1.5", HOSTILE["note"]]


def test_no_text_in_markdown_is_markup_or_ends_the_row(capsys: pytest.CaptureFixture[str]):
    emit_table([HOSTILE], COLUMNS, TableFormat.md)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and r"a\_b\|\[x\](y) c" in lines[2]


def test_a_condition_on_an_unknown_column_is_refused_even_when_no_row_is_left():
    assert select_rows(ROWS, ["name=FIRST"]) == ROWS[:1]
    for rows in (ROWS, []):
        with pytest.raises(UserError, match="did you mean 'name'"):
            select_rows(rows, ["name=nobody", "nam=x"], ["name", "rate_per_s"])


def test_no_rows_still_give_a_header(capsys: pytest.CaptureFixture[str]):
    for form, expected in ((TableFormat.csv, "name,rate_per_s,note\n"), (TableFormat.json, "[]\n")):
        emit_table([], COLUMNS, form)
        assert capsys.readouterr().out == expected
    emit_table([], COLUMNS, TableFormat.text)
    assert capsys.readouterr().out.split() == ["name", "1000/s", "note"]


@pytest.mark.parametrize("width", [30, 100])
def test_a_terminal_gets_a_table_that_never_cuts_the_figures(width: int):
    shown = on_a_terminal(width)
    assert "1234.6" in shown and "second one" in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("[bold]not markup[/bold]" in shown) is (width == 100)


def on_a_terminal(width: int) -> str:
    """The same table as a program prints it on a terminal `width` columns wide."""
    code = (
        "from tests.cli.test_output import COLUMNS, ROWS\n"
        "from paceline.cli.output import TableFormat, emit_table\n"
        "emit_table(ROWS, COLUMNS, TableFormat.text)"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=slave,
        stdin=slave,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as process:
        os.close(slave)
        output = b"".join(iter(lambda: read(master), b""))
        assert process.wait(60) == 0
    os.close(master)
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r\n", "\n")


def read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # Linux says EIO when the other end of the terminal is closed.
        return b""
