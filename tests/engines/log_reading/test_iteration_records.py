"""Iteration records as text: where a piece may end, and what is learnt of the fields."""

from __future__ import annotations

import re

import pytest

from paceline.engines.log_reading import iteration_records
from paceline.engines.log_reading.iteration_records import Fields, last_record, whole_records
from tests.engines.megatron_lines import record

WANTED = re.compile(rb"lm loss|grad norm|TFLOPs")


def test_a_piece_ends_where_the_line_of_its_last_record_begins():
    first, second = b"[x] " + record(1) + b"foo\n", b"[x] " + record(2) + b"bar\n"

    assert list(whole_records([first + second, b"baz\n"])) == [first, second + b"baz\n"]


def test_a_record_is_not_kept_for_ever():
    block = record(1) + b"noise\n" * 4000

    assert list(whole_records([block, b"more\n"])) == [block, b"more\n"]


def test_lines_one_by_one_make_the_same_records_as_all_at_once():
    lines = [record(n) + b"foo\n" for n in range(1, 9)]
    single = [part for line in lines for part in line.splitlines(keepends=True)]

    assert list(whole_records(single)) == lines


def test_colours_and_zeros_are_taken_out():
    assert list(whole_records([b"\x1b[1;32ma\x1b[0m\0b\n"])) == [b"ab\n"]


@pytest.mark.parametrize("far", [0, 100, 1 << 15])
def test_the_last_record_is_found_however_far_back(far: int):
    assert last_record(record(1) + record(2) + b"x" * far) == len(record(1)) + 1
    assert last_record(b"x" * far) == -1


def test_fields_are_learnt_in_their_places():
    fields = Fields(WANTED)
    skipped = record(1, {"lm loss": None, "grad norm": None})

    first = fields.rows(skipped)
    both = fields.rows(skipped + record(2) + record(3, {"TFLOPs": "5.0"}))

    assert first is not None and first.columns == {}
    assert both is not None and both.numbers == (b"1", b"2", b"3")
    assert both.columns == {
        b"lm loss": (b"", b"8.995420E+00", b"8.995420E+00"),
        b"grad norm": (b"", b"6.042", b"6.042"),
        b"TFLOPs": (b"", b"", b"5.0"),
    }


def test_a_text_without_records_has_no_rows():
    assert Fields(WANTED).rows(b"foo\n") is None


def test_a_record_without_its_last_field_does_not_end_whole():
    fields = Fields(WANTED)
    for text, ends_whole in ((record(1), True), (record(2)[:200], False), (record(3), True)):
        rows = fields.rows(text)
        assert rows is not None and rows.ends_whole == ends_whole


def test_records_are_read_on_when_nothing_more_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(iteration_records, "MAX_FUTILE", 3)
    fields, cut = Fields(WANTED), record(2)[:-20] + b"\nfoo\n"
    fields.rows(record(1))
    for _ in range(5):
        rows = fields.rows(cut)
        assert rows is not None and rows.columns[b"lm loss"] == (b"8.995420E+00",)

    rows = fields.rows(record(3) + cut)

    assert rows is not None and rows.columns[b"grad norm"] == (b"6.042", b"6.042")
