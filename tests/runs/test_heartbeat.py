"""The heartbeat detects silent and failed ranks, and checks few of their files at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.follow_ranks import make_ranks
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.runs import flow, step_follower
from paceline.runs.step_follower import CHECK_PERIOD_S, MIN_FILES, JobHeartbeat
from paceline.trainer.measure.event_log import EventLog
from tests.example import make_spec

LIMIT_S = 60.0


def check(heartbeat: JobHeartbeat, times: int = 1) -> None:
    """Check `times` times, a second apart."""
    for _ in range(times):
        heartbeat._last_check_s -= 1.01 * CHECK_PERIOD_S
        heartbeat.check()


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders whose modification time was read."""
    asked: list[str] = []
    written = step_follower._modified_ns

    def counted(path: str) -> int | None:
        asked.append(path)
        return written(path)

    monkeypatch.setattr(step_follower, "_modified_ns", counted)
    return asked


def test_each_look_is_at_few_files_and_a_round_at_all(tmp_path: Path, stats: list[str]):
    make_ranks(tmp_path, 2000)
    heartbeat = JobHeartbeat(tmp_path, LIMIT_S)
    check(heartbeat)
    assert len(stats) <= MIN_FILES + 2 + 750
    assert heartbeat.silent_s == 0.0

    stats.clear()
    check(heartbeat, 15)

    assert len({path for path in stats if "rank-" in path}) == 6000
    assert len(stats) / 15 < 760


def test_another_program_may_be_silent_for_an_hour_before_its_first_step(tmp_path: Path):
    heartbeat, spec = JobHeartbeat(tmp_path, 300.0), make_spec(engine="nemo")
    assert flow._silence_limit_s(spec, heartbeat, False) == 3600
    assert flow._silence_limit_s(spec, heartbeat, True) == 600
    assert flow._silence_limit_s(make_spec(), heartbeat, False) == 600, "the native trainer"
    chosen = make_spec(engine="nemo", hang_limit_s=60)
    assert flow._silence_limit_s(chosen, JobHeartbeat(tmp_path, 60.0), False) == 120


def test_one_live_rank_among_many_is_found_before_all_are_taken_as_silent(tmp_path: Path):
    make_ranks(tmp_path, 500)
    heartbeat = JobHeartbeat(tmp_path, LIMIT_S)
    check(heartbeat, 8)
    check(heartbeat, 5)
    assert heartbeat.silent_s > 4.0
    alive = tmp_path / LOGS_FOLDER / "rank-00437.stack"
    for _ in range(round(heartbeat.limit_s)):
        os.utime(alive, ns=(1, time.time_ns()))
        check(heartbeat)
    assert heartbeat.silent_s < heartbeat.limit_s / 2
    assert not heartbeat.failed_s

    check(heartbeat, round(heartbeat.limit_s) + 10)

    assert heartbeat.silent_s > heartbeat.limit_s


def test_a_rank_that_tells_its_failure_is_known_at_the_next_look(tmp_path: Path):
    make_ranks(tmp_path, 400)
    log = EventLog(str(tmp_path / STEPS_FOLDER), 399)
    heartbeat = JobHeartbeat(tmp_path, LIMIT_S)
    check(heartbeat, 2)
    assert heartbeat.failed_s == 0.0

    log.write("end", status="failed", reason="lost", steps=3, time_unix=1.0)
    check(heartbeat)

    assert heartbeat.failed_s > 0.0
    assert not (tmp_path / STEPS_FOLDER / "rank-00398.failed").exists()
    EventLog(str(tmp_path / STEPS_FOLDER), 399)
    assert not (tmp_path / STEPS_FOLDER / "rank-00399.failed").exists(), "not removed"


def test_a_program_without_marks_is_found_failed_by_its_lines(tmp_path: Path):
    """As `paceline.steplog` and older trainers write them."""
    make_ranks(tmp_path, 2)
    heartbeat = JobHeartbeat(tmp_path, LIMIT_S)
    check(heartbeat)
    time.sleep(0.02)  # a tick of the file system's clock
    with (tmp_path / STEPS_FOLDER / "rank-00001.jsonl").open("a") as file:
        file.write('{"event": "end", "status": "oom", "reason": "x", "steps": 1, "time_unix": 1}\n')
    os.utime(file.name)
    check(heartbeat)

    assert heartbeat.failed_s > 0.0


def test_a_file_that_is_removed_is_no_sign_and_no_fault(tmp_path: Path):
    make_ranks(tmp_path, 1)
    heartbeat = JobHeartbeat(tmp_path, LIMIT_S)
    check(heartbeat, 2)
    (tmp_path / LOGS_FOLDER / "rank-00000.stack").unlink()
    check(heartbeat, 3)

    assert heartbeat.silent_s > 2.0
    assert [Path(path).name for path in heartbeat._files] == ["rank-00000.jsonl", "rank-00000.log"]
