"""Records that something wrapped over several lines say what they said on one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import numpy as np
import pytest

from paceline.core.steps import FLOATS
from paceline.engines import megatron, megatron_deepspeed
from paceline.engines.log_reading.iteration_records import RECORD, Wrapping
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from tests.engines.megatron_lines import MS, S, column, read, record
from tests.engines.promises import check_read

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
