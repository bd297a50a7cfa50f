"""One query serves all runs, at growing intervals, and silence does not count as an answer."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from paceline.machines.slurm import client
from paceline.machines.slurm.client import Queue
from tests.machines.slurm.fake_slurm import put

RUNNING = "echo '1|RUNNING|a|None'; echo '2|RUNNING|b|None'"


class Clock:
    """time.monotonic, turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    return clock


def test_many_runs_ask_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    calls, queue = put(tmp_path, monkeypatch, squeue=RUNNING), Queue()
    queue.watch("1")
    queue.watch("2")
    threads = [threading.Thread(target=queue.state, args=(job,)) for job in "1212"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (line,) = calls.read_text().splitlines()
    assert line.endswith("-j 1,2")


def test_questions_grow_rare_while_nothing_changes_and_urgent_ones_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    put(tmp_path, monkeypatch, squeue=RUNNING)
    queue = Queue()
    queue.watch("1")
    question_times: list[float] = []
    while clock.now < 1120:
        before = queue.num_queries
        queue.state("1")
        question_times += [clock.now] if queue.num_queries > before else []
        clock.now += 0.1
    gaps = [later - earlier for earlier, later in itertools.pairwise(question_times)]
    assert gaps[0] < 1 and 9.9 < max(gaps) < 10.2 and gaps == sorted(gaps)
    before = queue.num_queries
    clock.now += client.MIN_INTERVAL_S
    assert queue.state("1", urgent=True) and queue.num_queries == before + 1


def test_a_change_makes_questions_frequent_again_and_an_end_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    put(
        tmp_path,
        monkeypatch,
        squeue=RUNNING,
        scontrol="echo 'AccountingStorageType = x/slurmdbd'",
        sacct="true",
    )
    queue = Queue()
    queue.watch("1")
    for _ in range(20):
        queue.state("1")
        clock.now += 20
    put(
        tmp_path,
        monkeypatch,
        squeue="echo '1|FAILED|a|NonZeroExitCode'",
        sacct="echo '1|FAILED|7:0|a|NonZeroExitCode'",
    )
    state = queue.state("1")
    assert state and (state.state, state.exit_code) == ("FAILED", 7)
    questions = (tmp_path / "calls").read_text().count("squeue")
    clock.now += 60
    queue.state("1")
    assert (tmp_path / "calls").read_text().count("squeue") == questions


def test_no_row_is_unknown_and_no_answer_keeps_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    put(tmp_path, monkeypatch, squeue="true", sacct="true", scontrol="true")
    queue = Queue()
    queue.watch("1")
    assert queue.state("1") is None and queue.silent_since is None
    put(tmp_path, monkeypatch, squeue=RUNNING)
    clock.now += 20
    assert queue.state("1")
    put(tmp_path, monkeypatch, squeue="exit 1")
    clock.now += 20
    state = queue.state("1")
    assert state and state.state == "RUNNING" and queue.silent_since == clock.now
