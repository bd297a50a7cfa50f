"""Whatever happens to a training, its files say so and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.trainer.example import (
    LIMIT_S,
    end,
    lines,
    log,
    program,
    run_ranks,
    settings,
    start,
    steps,
    train,
    world_size,
)
from tests.waiting import wait_until

ENDLESS = 10**6


def wait_for_steps(folder: Path, count: int, ranks: int = 1) -> list[int]:
    """Wait until every rank has written `count` lines; the ranks' process ids."""

    def pids() -> list[int] | None:
        files = sorted(folder.glob("steps/rank-*.jsonl"))
        if len(files) == ranks and all(f.read_text().count("\n") > count for f in files):
            return [json.loads(f.read_text().splitlines()[0])["pid"] for f in files]
        return None

    return wait_until(pids, f"{count} steps of every rank", LIMIT_S)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids: list[int], within_s: float = 30) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}", within_s)


def begin(folder: Path, ranks: int = 1) -> tuple[Popen[str], list[int]]:
    """A training without end that is well under way, and its ranks."""
    process = start(folder, settings(ranks, ENDLESS, source="synthetic", num_layers=1))
    return process, wait_for_steps(folder, 20, ranks)


def finish(process: Popen[str]) -> int:
    process.communicate(timeout=LIMIT_S)
    return process.returncode


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learning_rate_that_destroys_the_weights_ends_as_nan(tmp_path: Path, ranks: int) -> None:
    raw = settings(ranks, 50, source="stdlib", lr=1e20, positions="learned", norm="layernorm")

    assert train(tmp_path, raw) != 0
    for rank in range(ranks):
        assert end(tmp_path, rank)["status"] == "nan"
        assert f"in step {end(tmp_path, rank)['steps'] + 1}" in end(tmp_path, rank)["reason"]
        assert all(row["loss"] is not None for row in steps(tmp_path, rank))


def train_by(folder: Path, raw: dict[str, Any], text: str) -> tuple[int, str]:
    """The exit code and the output of a training by a program with this text."""
    program = folder / "program.py"
    program.write_text(text)
    (folder / "trainer.json").write_text(json.dumps(raw))
    return run_ranks(world_size(raw), program, "trainer.json", folder=folder)


SLOW_TO_END = """
import os, sys, time
from paceline.trainer import main
write = main.write_end
if os.environ["RANK"] == "1":
    main.write_end = lambda *words: (time.sleep(2), write(*words))
os._exit(main.main(sys.argv[1]))
"""


def test_a_rank_that_is_slow_to_end_still_says_why(tmp_path: Path) -> None:
    """Launchers end the other ranks as soon as one has failed."""
    raw = settings(2, 50, source="stdlib", lr=1e20, positions="learned", norm="layernorm")

    code, output = train_by(tmp_path, raw, SLOW_TO_END)

    assert code == 1, output
    assert [end(tmp_path, rank)["status"] for rank in (0, 1)] == ["nan", "nan"]


BROKEN_PROFILER = """
import os, sys
from paceline.trainer import main, train
from paceline.trainer.measure.profiler import Profiler

class Broken(Profiler):
    def close(self):
        raise OSError("no space left")

train.make_profiler = lambda *_: Broken()
close = train.Loader.close
train.Loader.close = lambda self: (close(self), print("the loader is closed", flush=True))
os._exit(main.main(sys.argv[1]))
"""


def test_a_profiler_that_cannot_be_closed_hides_no_other_failure(tmp_path: Path) -> None:
    raw = settings(1, 50, source="stdlib", lr=1e20, positions="learned", norm="layernorm")

    code, output = train_by(tmp_path, raw, BROKEN_PROFILER)

    assert code == 1, output
    assert end(tmp_path)["status"] == "nan"
    assert "the loader is closed" in log(tmp_path)


def test_a_wrong_parameter_count_fails_before_the_first_step(tmp_path: Path) -> None:
    assert train(tmp_path, settings(expected_parameters=7)) != 0

    (only,) = lines(tmp_path)
    assert only["status"] == "failed" and only["steps"] == 0
    assert "expected_parameters 7: the model has" in only["reason"]
    assert "Traceback" in log(tmp_path)


def test_a_corpus_shorter_than_a_batch_fails_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")

    assert train(tmp_path, settings(source="text", path="a.txt")) != 0
    assert (
        "not enough for one sample; a packed sample has seq_len + 1 tokens"
        in end(tmp_path)["reason"]
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert train(tmp_path, settings(source="text", path="nowhere.txt")) != 0
    assert "nowhere.txt" in end(tmp_path)["reason"]


def test_settings_that_cannot_be_read_are_said_on_standard_error(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text("{")

    process = Popen(
        [sys.executable, str(program()), "trainer.json"],
        cwd=tmp_path, stderr=-1, text=True,
    )  # fmt: skip
    _, errors = process.communicate(timeout=LIMIT_S)

    assert process.returncode != 0
    assert errors.startswith("trainer: ") and errors.count("\n") == 1


def test_a_killed_rank_tears_at_most_its_last_line(tmp_path: Path) -> None:
    process, (pid,) = begin(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL

    *whole, _ = (tmp_path / "steps" / "rank-00000.jsonl").read_text().split("\n")
    events = [json.loads(line)["event"] for line in whole]
    assert events[0] == "start" and {"step"} <= set(events[1:]) <= {"step", "memory"}


def test_terminating_a_rank_ends_it_at_once_without_a_verdict(tmp_path: Path) -> None:
    process, (pid,) = begin(tmp_path)
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)

    assert finish(process) == -signal.SIGTERM
    assert time.monotonic() - began < 20
    assert lines(tmp_path)[-1]["event"] == "step"


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    process, pids = begin(tmp_path, ranks=2)
    process.kill()
    finish(process)

    wait_until_gone(pids)


def test_when_one_rank_dies_the_other_does_not_wait_for_it(tmp_path: Path) -> None:
    process, pids = begin(tmp_path, ranks=2)
    os.kill(pids[1], signal.SIGKILL)

    assert finish(process) != 0
    wait_until_gone(pids)
    last: dict[str, Any] = lines(tmp_path)[-1]
    assert last["event"] == "step" or last["cause"] == "peer_lost"
