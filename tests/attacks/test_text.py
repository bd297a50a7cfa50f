"""One escape per renderer: characters of a terminal, line ends, markup and formulas."""

from __future__ import annotations

import csv
import io
import unicodedata
from pathlib import Path

import pytest

from paceline.core.text import one_line, printable
from paceline.report.csv_table import csv_text
from paceline.report.document import Column
from paceline.report.markdown import markdown_table
from tests.attacks.reproductions import stored_run
from tests.command import paceline

ALLOWED = {"\n", "\t", "\u200d"}
"""The joiner makes one sign of several in ordinary text."""
FORGED = "x\n2026-12-31-llama31-405b-official   ok    9,999,999,999  0.00001  99.9%"


def test_no_control_character_or_invisible_mark_is_printed():
    for number in range(0x110000):
        character = chr(number)
        category = unicodedata.category(character)
        if category in ("Cc", "Cs", "Zl", "Zp") and character not in ALLOWED | {"\r"}:
            assert printable(character) != character, hex(number)
    for character in "\u061c\u00ad\u115f\u200b\u2060\u3164\ufeff\uffa0\U000e0041\u202e":
        assert printable(f"a{character}b") == "a\N{REPLACEMENT CHARACTER}b", hex(ord(character))


@pytest.mark.parametrize("end", ["\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_one_line_is_one_line(end: str):
    assert len(one_line(f"a{end}b").splitlines()) == 1


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\uff1d", "\uff0b", " =", "\t="])
def test_no_cell_of_a_table_is_a_formula(sign: str):
    (_, (cell,)) = csv.reader(io.StringIO(csv_text([{"a": f"{sign}1+1"}], [Column("a", "a")])))
    assert cell.startswith("'")


def test_no_cell_of_markdown_is_markup():
    text = "# <b>a</b> | [b](http://c) `d` *e* _f_ ~g~ $h$ &lt;\u2028| new | row |"
    (*_, row) = markdown_table([{"a": text}], [Column("a", "a")]).splitlines()
    assert row.startswith(r"| \# \<b\>") and r"\| new \| row \|" in row


@pytest.mark.parametrize("field", ["group", "tag", "name", "reason"])
@pytest.mark.parametrize("end", ["\n", "\u2028", "\x85"])
def test_no_field_of_a_record_forges_a_row(tmp_path: Path, field: str, end: str):
    folder = stored_run(tmp_path, **{field: FORGED.replace("\n", end)})
    (folder / "result.json").unlink(missing_ok=True)
    for verb in ("list", f"show {folder.name}", "history"):
        done = paceline("runs", *verb.split(), runs=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        lines = (done.stdout + done.stderr).splitlines()
        assert not any(line.startswith("2026-12-31") for line in lines), (verb, done.stdout)
