"""Steps leave no gap, and waits are counted once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from paceline.trainer.measure.clock import DeviceClock, HostClock, StepClock


@dataclass
class Tape:
    """A clock that the test turns by hand, with marks that can be read only once settled."""

    now: float = 0.0
    settled: float = -1.0
    steps_behind: int = 2

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark <= self.settled

    def wait(self, mark: float) -> None:
        self.settled = max(self.settled, mark)

    def seconds(self, start: float, end: float) -> float:
        assert max(start, end) <= self.settled, "read before the device came so far"
        return end - start


@pytest.fixture
def tape() -> Tape:
    return Tape(now=100.0)


@pytest.fixture
def steps(tape: Tape) -> StepClock:
    return StepClock(tape)


def test_the_first_step_begins_at_the_start_and_the_next_where_it_ends(
    tape: Tape, steps: StepClock
) -> None:
    steps.start()
    tape.now += 2
    first = steps.lap()
    tape.now += 3
    second = steps.lap()

    assert steps.steps_done == 0
    assert steps.read(second) == (3.0, 0.0)
    assert steps.read(first) == (2.0, 0.0)
    assert steps.steps_done == 2


def test_a_wait_inside_a_wait_counts_once(tape: Tape, steps: StepClock) -> None:
    steps.start()
    with steps.waiting():
        tape.now += 1
        with steps.waiting():
            tape.now += 1
    tape.now += 5
    steps.begin_wait()
    tape.now += 1
    steps.begin_wait()
    with steps.waiting():
        tape.now += 1
    steps.end_wait()
    steps.end_wait()

    assert steps.read(steps.lap()) == (9.0, 4.0)


def test_waits_belong_to_the_step_in_which_they_end(tape: Tape, steps: StepClock) -> None:
    steps.begin_wait()
    tape.now += 1
    steps.end_wait()
    steps.start()
    tape.now += 1
    with steps.waiting():
        tape.now += 2
    laps = [steps.lap()]
    tape.now += 4
    laps.append(steps.lap())

    assert [steps.read(lap) for lap in laps] == [(3.0, 2.0), (4.0, 0.0)]


def test_a_wait_that_fails_is_closed(tape: Tape, steps: StepClock) -> None:
    steps.start()
    with pytest.raises(ConnectionError), steps.waiting():
        tape.now += 1
        raise ConnectionError
    tape.now += 1

    assert steps.read(steps.lap()) == (2.0, 1.0)


def test_the_host_clock_measures_real_time() -> None:
    steps = StepClock(HostClock())
    steps.start()
    time.sleep(0.01)
    with steps.waiting():
        time.sleep(0.02)

    step_time_s, wait_s = steps.read(steps.lap())

    assert step_time_s >= wait_s + 0.01 and wait_s >= 0.02


def test_a_rank_waits_while_it_is_inside_a_wait() -> None:
    steps = StepClock(HostClock())
    steps.start(step=7)
    assert not steps.is_waiting()
    with steps.waiting():
        assert steps.is_waiting()
    assert not steps.is_waiting()
    steps.lap()
    assert not steps.is_waiting() and steps.step == 8


def test_a_device_waits_where_it_is_and_not_where_the_program_is(
    tape: Tape, steps: StepClock
) -> None:
    steps.start()
    for begin, end in ((101.0, 102.0), (104.0, 105.0)):
        tape.now = begin
        steps.begin_wait()
        tape.now = end
        steps.end_wait()
        tape.now = end + 1
        steps.lap()
    where = {100.5: False, 101.5: True, 103.0: False, 104.0: True, 105.0: False}
    for reached, waits in where.items():
        tape.settled = reached
        assert steps.is_waiting() == waits, reached


def test_a_device_that_has_failed_passes_no_more_marks() -> None:
    """The watchdog asks from a thread of its own, which an exception would end."""

    class Event:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not DeviceClock.passed(object.__new__(DeviceClock), Event())  # type: ignore[arg-type]
