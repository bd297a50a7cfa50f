"""What two ranks print of the same steps is joined although lines are swapped, late or lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.steps import FloatColumn
from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.step_time_join import MOST_WAITING, STEP_TIME, StepTimeJoin

FLOPS = "flops_per_s_per_device"
WORK_TFLOP = 6746.0


def steady(n: int, seed: int = 0) -> FloatColumn:
    """Step times around 5.7 s that differ by 1 %, the first much longer."""
    times = 5.7 * (1 + 0.01 * np.random.default_rng(seed).standard_normal(n))
    times[0] = 43.8
    return times


def line(seconds: float) -> tuple[bytes, bytes]:
    return f"{seconds:.2f}".encode(), f"{WORK_TFLOP / seconds:.1f}".encode()


def joined(
    records_s: Sequence[float] | FloatColumn,
    lines_s: Sequence[float] | FloatColumn,
    batch: int = 10**9,
) -> LogContent:
    """The log of records numbered from 1 and lines that come in batches of so many."""
    log = LogContent()
    join = StepTimeJoin(log)
    times = np.asarray(records_s, dtype=np.float64)
    for start in range(0, max(len(times), len(lines_s)), batch):
        part = times[start : start + batch]
        index = np.arange(start + 1, start + 1 + len(part))
        join.add(index, {"step_time_s": part}, [line(t) for t in lines_s[start : start + batch]])
    join.finish()
    return log


def assert_joined(log: LogContent, times: FloatColumn, missing: Sequence[int] = ()) -> None:
    """Each step has the figure of its own time, within what the printed time resolves."""
    flops = log.steps()[FLOPS]
    finite = np.isfinite(flops)
    assert len(flops) == len(times) and int((~finite).sum()) == len(missing)
    np.testing.assert_allclose(flops[finite] * times[finite] / 1e12, WORK_TFLOP, rtol=3e-3)


@pytest.mark.parametrize("batch", [1, 3, 10**9])
def test_complete_logs_join_line_by_line(batch: int):
    times = steady(200)
    log = joined(times, times, batch)

    assert_joined(log, times)
    assert log.remarks == []


@pytest.mark.parametrize("batch", [1, 7, 10**9])
@pytest.mark.parametrize("lost", [0, 1, 57, 198, 199])
def test_a_lost_line_leaves_one_record_without(lost: int, batch: int):
    times = steady(200)
    log = joined(times, np.delete(times, lost), batch)

    assert_joined(log, times, missing=[lost])
    assert log.remarks == ["iteration lines without Step Time line: 1"]


@pytest.mark.parametrize("lost", [0, 1, 57, 198, 199])
def test_a_lost_record_leaves_one_line_out(lost: int):
    times = steady(200)
    log = joined(np.delete(times, lost), times)

    assert_joined(log, np.delete(times, lost))
    assert log.remarks == ["Step Time lines without iteration line, left out: 1"]


def test_many_lost_lines_on_both_sides():
    times = steady(2000)
    draw = np.random.default_rng(1)
    records, lines = (times[draw.random(2000) > 0.05] for _ in range(2))

    flops = joined(records, lines).steps()[FLOPS]

    finite = np.isfinite(flops)
    assert finite.mean() > 0.85
    np.testing.assert_allclose(flops[finite] * records[finite] / 1e12, WORK_TFLOP, rtol=3e-3)


def test_clocks_of_two_ranks_differ_a_little():
    times = steady(100)

    assert_joined(joined(times, times + 0.0015), times)


def test_a_pair_that_disagrees_is_not_joined_and_the_next_one_is():
    times = steady(60)
    other = times.copy()
    other[30] += 3.0

    assert_joined(joined(times, other), times, missing=[30])


def test_all_lines_before_all_records():
    times = steady(300)
    log, empty = LogContent(), np.zeros(0, np.int64)
    join = StepTimeJoin(log)
    join.add(empty, {}, [line(t) for t in times])
    join.add(np.arange(1, 301), {"step_time_s": times}, [])
    join.finish()

    assert_joined(log, times)


def test_other_columns_stay_with_their_records():
    log, times = LogContent(), steady(3)
    join = StepTimeJoin(log)
    join.add(np.array([1]), {"step_time_s": times[:1]}, [line(times[0])])
    join.add(np.array([2]), {"step_time_s": times[1:2], "loss": np.array([2.5])}, [])
    join.add(np.array([3]), {"step_time_s": times[2:]}, [line(times[1]), line(times[2])])
    join.finish()

    assert np.nan_to_num(log.steps()["loss"]).tolist() == [0, 2.5, 0]
    assert_joined(log, times)


def test_lines_that_never_agree_are_given_up():
    draw = np.random.default_rng(2)
    log = joined(draw.uniform(1, 9, 20_000), draw.uniform(100, 900, 20_000), 1000)

    assert len(log) == 20_000
    assert not log.steps().known(FLOPS)


def test_lines_that_wait_too_long_become_steps_of_a_log_without_records():
    log = LogContent()
    join = StepTimeJoin(log)
    for _ in range(3):
        join.add(np.zeros(0, np.int64), {}, [line(5.7)] * MOST_WAITING)
    assert len(log) == 2 * MOST_WAITING
    join.finish()

    assert log.steps().index.tolist() == list(range(1, 3 * MOST_WAITING + 1))


def test_records_do_not_wait_for_ever():
    log = LogContent()
    join = StepTimeJoin(log)
    n = MOST_WAITING + 5
    join.add(np.arange(1, n + 1), {"step_time_s": np.full(n, 5.7)}, [])

    assert len(log) == 5


def test_times_that_are_no_times_agree_with_nothing():
    log = joined([np.inf, 5.7, 5.7], [5.7, 5.7])

    assert np.isnan(log.steps()[FLOPS]).tolist()[0]
    assert len(log) == 3


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        (b"Step Time : 5.69s GPU utilization: 1185.6MODEL_TFLOP/s/GPU", (b"5.69", b"1185.6")),
        (b"Step Time : 7.14s GPU utilization: 1031.0TFLOP/s/GPU", (b"7.14", b"1031.0")),
        (b"Step Time : 7.14s GPU utilization: nanMODEL_TFLOP/s/GPU", (b"7.14", b"nan")),
    ],
)
def test_both_spellings_of_the_line(text: bytes, groups: tuple[bytes, bytes]):
    assert STEP_TIME.findall(text) == [groups]
