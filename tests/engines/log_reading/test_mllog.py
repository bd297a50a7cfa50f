"""MLPerf's result lines are found wherever they stand, and nothing else passes for one."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.log_reading.mllog import MlRecord, number, record_of, records, whole_number


def line(key: str = "run_start", value: Any = None, **metadata: Any) -> bytes:
    fields = {
        "namespace": "",
        "time_ms": 1759855621073,
        "event_type": "INTERVAL_START",
        "key": key,
        "value": value,
        "metadata": {"file": "a.py", "lineno": 3, **metadata},
    }
    return b":::MLLOG " + json.dumps(fields).encode()


def read(text: bytes) -> list[MlRecord | None]:
    return list(records([text]))


def test_a_line_tells_key_value_time_and_metadata():
    (record,) = read(line("run_stop", None, status="success", step=387) + b"\n")

    assert record is not None
    assert (record.key, record.value, record.time_ms) == ("run_stop", None, 1759855621073)
    assert record.event_type == "INTERVAL_START"
    assert record.metadata["status"] == "success" and record.count("step") == 387


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b" 0: ", b"\n"),
        (b"0: ", b"\r\n"),
        (b"[rank3]: ", b"\x1b[0m\n"),
        (b"glued text", b" and more"),
        (b"\xff\x00", b"\r"),
        (b"\x1b[31m", b""),
    ],
)
def test_what_stands_around_a_record_does_not_matter(before: bytes, after: bytes):
    assert [r and r.key for r in read(before + line() + after)] == ["run_start"]


def test_two_ranks_that_share_a_physical_line_are_both_read():
    assert [r and r.key for r in read(line("a") + b" " + line("b") + b"\n")] == ["a", "b"]


def test_bytes_that_are_no_utf_8_are_latin_1():
    (record,) = read(line("submission_org", "X").replace(b"X", b"M\xfcller"))

    assert record is not None and record.value == "Müller"


def test_nan_and_infinity_read_as_infinity():
    (record,) = read(line("eval_accuracy", float("nan")))

    assert record is not None and record.value == inf


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"key": "a"}',
        b'{"key": 1, "time_ms": 1, "metadata": {}}',
        b'{"key": "a", "time_ms": "x", "metadata": {}}',
        b'{"key": "a", "time_ms": 1, "metadata": 3}',
        b'{"key": "a", "time_ms": true, "metadata": {}}',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"key": "a",\n "time_ms": 1, "metadata": {}}',
    ],
)
def test_what_is_no_whole_record_is_none(text: bytes):
    assert record_of(text) is None


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_token_are_read_without_an_exception(text: bytes):
    assert all(r is None or r.key for r in read(b":::MLLOG " + text + b":::MLLOG " + text))


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (36, 36),
        (31.0, 31),
        (0, 0),
        (2.5, None),
        (-1, None),
        (10**400, None),
        (True, None),
        ("3", None),
        (None, None),
        (inf, None),
    ],
)
def test_a_count_is_a_whole_number_from_0_on(value: object, count: int | None):
    assert whole_number(value) == count


def test_a_number_beyond_a_floats_range_is_infinite():
    assert number(10**400) == inf and number(-2.5) == -2.5 and number("1") is None
