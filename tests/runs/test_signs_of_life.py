"""What tells that a run's ranks live or have failed, and that few of their files are looked at."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.follow_ranks import make_ranks
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.runs import step_follower
from paceline.runs.step_follower import FEW_FILES, LOOK_S, SignsOfLife
from paceline.trainer.measure.event_log import EventLog

LIMIT_S = 60.0


def look(life: SignsOfLife, times: int = 1) -> None:
    """So many looks, a second apart."""
    for _ in range(times):
        life._looked -= 1.01 * LOOK_S
        life.look()


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders whose time was asked for."""
    asked: list[str] = []
    written = step_follower._written

    def counted(path: str) -> int | None:
        asked.append(path)
        return written(path)

    monkeypatch.setattr(step_follower, "_written", counted)
    return asked


def test_each_look_is_at_few_files_and_a_round_at_all(tmp_path: Path, stats: list[str]):
    make_ranks(tmp_path, 2000)
    life = SignsOfLife(tmp_path, LIMIT_S)
    look(life)
    assert len(stats) <= FEW_FILES + 2 + 750
    assert life.silent_s == 0.0

    stats.clear()
    look(life, 15)

    assert len({path for path in stats if "rank-" in path}) == 6000
    assert len(stats) / 15 < 760


def test_one_live_rank_among_many_is_found_before_all_are_taken_as_silent(tmp_path: Path):
    make_ranks(tmp_path, 500)
    life = SignsOfLife(tmp_path, LIMIT_S)
    look(life, 8)
    look(life, 5)
    assert life.silent_s > 4.0
    alive = tmp_path / LOGS_FOLDER / "rank-00437.stack"
    for _ in range(round(life.limit_s)):
        os.utime(alive, ns=(1, time.time_ns()))
        look(life)
    assert life.silent_s < life.limit_s / 2
    assert not life.failed_s

    look(life, round(life.limit_s) + 10)

    assert life.silent_s > life.limit_s


def test_a_rank_that_tells_its_failure_is_known_at_the_next_look(tmp_path: Path):
    make_ranks(tmp_path, 400)
    log = EventLog(str(tmp_path / STEPS_FOLDER), 399)
    life = SignsOfLife(tmp_path, LIMIT_S)
    look(life, 2)
    assert life.failed_s == 0.0

    log.write("end", status="failed", reason="lost", steps=3, time_unix=1.0)
    look(life)

    assert life.failed_s > 0.0
    assert not (tmp_path / STEPS_FOLDER / "rank-00398.failed").exists()
    EventLog(str(tmp_path / STEPS_FOLDER), 399)
    assert not (tmp_path / STEPS_FOLDER / "rank-00399.failed").exists(), "it begins anew"


def test_a_program_without_marks_is_found_failed_by_its_lines(tmp_path: Path):
    """As `paceline.steplog` and older trainers write them."""
    make_ranks(tmp_path, 2)
    life = SignsOfLife(tmp_path, LIMIT_S)
    look(life)
    time.sleep(0.02)  # a tick of the file system's clock
    with (tmp_path / STEPS_FOLDER / "rank-00001.jsonl").open("a") as file:
        file.write('{"event": "end", "status": "oom", "reason": "x", "steps": 1, "time_unix": 1}\n')
    os.utime(file.name)
    look(life)

    assert life.failed_s > 0.0


def test_a_file_that_is_removed_is_no_sign_and_no_fault(tmp_path: Path):
    make_ranks(tmp_path, 1)
    life = SignsOfLife(tmp_path, LIMIT_S)
    look(life, 2)
    (tmp_path / LOGS_FOLDER / "rank-00000.stack").unlink()
    look(life, 3)

    assert life.silent_s > 2.0
    assert [Path(path).name for path in life._files] == ["rank-00000.jsonl", "rank-00000.log"]
