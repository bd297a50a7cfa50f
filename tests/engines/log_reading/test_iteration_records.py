"""Iteration records as text: where a piece may end, and what is learnt of the fields.

Records that something wrapped over several lines say what they said on one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import numpy as np
import pytest

from paceline.core.steps import FLOATS
from paceline.engines import megatron, megatron_deepspeed
from paceline.engines.log_reading import iteration_records
from paceline.engines.log_reading.iteration_records import (
    RECORD,
    Fields,
    Wrapping,
    last_record,
    whole_records,
)
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from tests.engines.megatron_specs import MS, S, column, read, record
from tests.engines.promises import check_read

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


WIDTHS = (60, 72, 80, 100, 132, 160, 200)
MANY: dict[str, str | None] = {
    MS: None,
    S: "106.46",
    "consumed tokens": "   97829879808",
    "num zeros": "0.0",
    "samples per second": "19.238",
    "TFLOPs": "147.29",
}
PLAIN = b"".join(record(n, {"lm loss": f"{n}.234567E+00"}, "[default7]: ") for n in range(1, 30))
RICH = b"".join(record(n, {**MANY, "lm loss": f"{n}.234567E+00"}) for n in range(1, 30))


def folded(text: bytes, width: int) -> bytes:
    """Wrap like `fold -w`: after a number of characters, anywhere."""
    parts = [
        line[at : at + width] for line in text.splitlines() for at in range(0, len(line), width)
    ]
    return b"\n".join(parts) + b"\n"


def worded(text: bytes, width: int) -> bytes:
    """Wrapped between words, without the blanks there."""
    lines = [part for line in text.decode().splitlines() for part in textwrap.wrap(line, width)]
    return "\n".join(lines).encode() + b"\n"


def assert_same(log: LogContent, expected: LogContent) -> None:
    ours, theirs = log.steps(), expected.steps()
    assert ours.index.tolist() == theirs.index.tolist()
    for name in FLOATS:
        np.testing.assert_array_equal(ours[name], theirs[name], name)
    assert log.facts == expected.facts


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("wrap", [folded, worded])
@pytest.mark.parametrize(
    ("kind", "text"), [(megatron.LOG_FORMAT, PLAIN), (megatron_deepspeed.LOG_FORMAT, RICH)]
)
def test_a_wrapped_log_says_what_the_log_said(
    kind: LogFormat, text: bytes, wrap: Callable[[bytes, int], bytes], width: int
):
    wrapped = wrap(text, width)
    check_read(kind, wrapped)

    assert_same(read(kind, wrapped), read(kind, text))


@pytest.mark.parametrize("end", [b"\r\n", b"\n    ", b"\n[default7]: ", b"  \n", b"\r"])
def test_line_ends_indents_and_prefixes_of_the_wrapped_lines(end: bytes):
    wrapped = folded(RICH, 80).splitlines()
    unwrapped = read(megatron.LOG_FORMAT, RICH)
    text = b"".join(end + line if b"iteration  " not in line else b"\n" + line for line in wrapped)

    log = read(megatron.LOG_FORMAT, text + b"\n")

    assert log.steps().index.tolist() == unwrapped.steps().index.tolist()
    assert column(log, "step_time_s") == column(unwrapped, "step_time_s")


@pytest.mark.parametrize("at", range(60, len(record(7, MANY)) - 1))
def test_a_break_at_any_place_behind_the_number(at: int):
    line = record(7, MANY)
    text = record(6, MANY) + line[:at] + b"\n" + line[at:] + record(8, MANY)
    log = read(megatron_deepspeed.LOG_FORMAT, text)

    assert column(log, "step_time_s") == [106.46] * 3
    assert column(log, "loss") == [8.99542] * 3
    assert column(log, "samples_per_s") == [19.238] * 3


def test_a_field_that_nobody_knows_may_be_broken():
    broken = record(2).replace(b"| learning", b"| load_bal\nancing_loss: 1.0E+00 | learning")

    log = check_read(megatron.LOG_FORMAT, record(1) + broken + record(3))

    assert column(log, "loss") == [8.99542] * 3


OTHERS = (
    b"time (ms) | forward-compute: 53.79 | backward-compute: 138.84 |",
    b"[Rank 0] (after 20 iterations) memory (MB) | allocated: 5.0 | max allocated: 6.0",
    b"validation loss at iteration 5 | lm loss value: 1.0 | lm loss PPL: 3.0 |",
    b"Step Time : 5.69s GPU utilization: 1185.6MODEL_TFLOP/s/GPU",
    b"Number of parameters in transformer layers in billions: 6.02",
    b"rate: of something else",
    b"",
)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("cut", [b"| learning", b"| global batch size:", b"| lm loss: 8.9"])
def test_lines_of_others_do_not_go_on_with_a_record_that_is_cut_off(other: bytes, cut: bytes):
    line = record(2)
    part = line[: line.index(cut) + len(cut)]
    log = check_read(megatron.LOG_FORMAT, record(1) + part + b"\n" + other + b"\n" + record(3))

    assert column(log, "step_time_s") == [1.2505] * 3
    assert column(log, "loss") == [8.99542, None, 8.99542]


def test_a_record_on_one_line_is_left_as_it_is():
    wrapping = Wrapping(RECORD, [])

    assert wrapping.join(record(1) + b"foo\nbar\n", is_last=True) is None


def test_a_field_that_comes_again_belongs_to_another_record():
    wrapping = Wrapping(RECORD, [])
    lines = record(1)[1:-1] + b"\n lm loss: 5.0 |\n"

    assert wrapping.join(lines, is_last=True) is None


def test_the_beginning_of_the_next_records_line_is_not_taken():
    wrapping = Wrapping(RECORD, [])
    lines = record(1)[1:150] + b"\n samples/sec: 5.0 | "

    assert b"samples/sec" not in (wrapping.join(lines, is_last=False) or b"")
