"""A learnt line layout reads what decoding JSON reads, only faster."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.log_reading.native_lines import (
    Event,
    Faults,
    LineLayout,
    columns_of,
    decode_events,
    lines_of,
)
from tests.files.test_events import STEP

FIGURES = st.one_of(
    st.none(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False)
)


def line(event: Event) -> bytes:
    return json.dumps(event).encode()


def block(*events: Event) -> bytes:
    return b"".join(line(event) + b"\n" for event in events)


def step(number: int, **changes: Any) -> Event:
    return {**STEP, "step": number, **changes}


def assert_read_alike(layout: LineLayout, content: bytes) -> None:
    """What the layout reads of a block is what decoding it gives; it may also read nothing."""
    learnt = layout.columns(content)
    if learnt is None:
        return
    faults = Faults()
    events = decode_events(lines_of(content), faults, ends_whole=True)
    index, columns = columns_of(events)
    assert faults.unread == 0
    np.testing.assert_array_equal(learnt[0], index)
    for name, column in columns.items():
        np.testing.assert_array_equal(learnt[1].get(name, np.full(len(index), np.nan)), column)


@given(st.lists(st.fixed_dictionaries({"loss": FIGURES, "grad_norm": FIGURES}), min_size=1))
def test_it_reads_what_decoding_reads(changes: list[dict[str, Any]]):
    layout = LineLayout.learn(line(STEP))
    assert layout is not None

    content = block(*(step(k, **change) for k, change in enumerate(changes)))

    assert layout.columns(content) is not None
    assert_read_alike(layout, content)


@given(st.text(alphabet='0123456789.eE+-nulNaInfity",{}: ', max_size=12))
def test_it_takes_no_number_that_json_does_not_allow(number: str):
    layout = LineLayout.learn(line(STEP))
    assert layout is not None

    assert_read_alike(layout, block(step(1)).replace(b'"loss": 2.0', b'"loss": ' + number.encode()))


def test_it_leaves_a_block_with_any_other_line_of_the_trainer():
    layout = LineLayout.learn(line(STEP))
    assert layout is not None

    for other in (b'{"event": "end"}\n', b'{"event": "step", "step": 2}\n', b'{"step": 3}\n'):
        assert layout.columns(block(step(1)) + other) is None
    assert layout.columns(b"noise\n" + block(step(1)) + b"{nonsense\n") is not None
    assert layout.columns(b"noise\n") is None


def test_it_is_learnt_from_any_order_of_fields_and_from_merged_steps():
    shuffled = {"event": "step", **dict(reversed(step(7).items()))}
    merged = {"step": 7, "step_time_s": 0.5, "loss": None, "resident_bytes": 5.0}

    for event, of_one_rank in ((shuffled, True), (merged, False)):
        layout = LineLayout.learn(line(event))
        assert layout is not None and layout.of_one_rank == of_one_rank
        columns = layout.columns(block(event))
        assert columns is not None and columns[0].tolist() == [7]
        assert columns[1]["resident_bytes"].tolist() == [5.0]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"3",
        b'{"event": "end", "step": 1}',
        b'{"event": "step"}',
        b'{"step": 1',
        b'{"step": 1, "loss": "x" }',
        b'{"step":1}',
        b"[" * 5000,
        b'{"step": 1, "a": {"step": 2}',
        line(step(1, skipped=True)),
        line(step(1, note="x" * 5000)),
        b'{"step": 1.5}',
    ],
)
def test_nothing_is_learnt_from_what_is_no_usual_step_line(text: bytes):
    assert LineLayout.learn(text) is None


def test_many_broken_objects_in_one_line_are_given_up_soon():
    faults = Faults()
    line = b'{"step": ' * 100_000

    assert decode_events([line], faults, ends_whole=True) == []
    assert faults.unread == 1
