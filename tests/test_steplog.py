"""What `paceline.steplog` writes for a training loop of somebody else, in processes of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import steplog
from paceline.core.ranks import find_straggler, merge_ranks
from paceline.core.steps import Steps
from paceline.files.events import RankLog, read_rank

LOOP = """
import os, sys, time
import steplog

def batches():
    for _ in range(3):
        time.sleep(0.01)
        yield [1, 2]

for batch in steplog.batches(batches()):
    with steplog.step(tokens=8, samples=len(batch)) as step:
        {work}
        step.loss = 2.5
{after}
"""
WAITS = """
import os, time
import steplog

now_s = [0.0]

def pass_by(seconds):
    now_s[0] += seconds

time.perf_counter, time.sleep = lambda: now_s[0], pass_by
rank = int(os.environ["RANK"])
for _ in range(60):
    with steplog.step(tokens=8):
        time.sleep(0.004 if rank else 0.001)
        with steplog.waiting_for_ranks():
            time.sleep(0.0 if rank else 0.003)
"""
"""By a clock that only its own work moves, for its ranks run one after the other."""


def train(folder: Path, program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The end of a program that runs next to a copy of the one file that it needs."""
    shutil.copy(steplog.__file__, folder / "steplog.py")
    (folder / "train.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def loop(folder: Path, work: str = "pass", after: str = "") -> RankLog:
    train(folder, LOOP.format(work=work, after=after), PACELINE_STEPS="steps")
    return read_lines(folder, 0)


def read_lines(folder: Path, rank: int) -> RankLog:
    log = read_rank((folder / "steps" / f"rank-{rank:05d}.jsonl").read_text().splitlines())
    assert log.skipped_lines.lines == 0
    return log


def test_a_loop_tells_its_steps(tmp_path: Path) -> None:
    log = loop(tmp_path, "time.sleep(0.002)")

    assert log.start is not None and (log.start.rank, log.start.world_size) == (0, 1)
    assert log.start.num_parameters is None and log.start.torch is None
    assert [step.index for step in log.steps] == [1, 2, 3]
    for step in log.steps:
        assert (step.loss, step.tokens, step.samples) == (2.5, 8, 2)
        assert step.data_wait_s is not None and step.data_wait_s >= 0.01
        assert step.step_time_s is not None and step.step_time_s >= step.data_wait_s + 0.002
        assert step.busy_time_s == step.step_time_s and step.comm_wait_s == 0
        assert step.resident_bytes is not None and step.resident_bytes > 1e6
    assert log.end is not None and (log.end.status, log.end.steps) == ("ok", 3)


def test_without_a_place_nothing_is_written(tmp_path: Path) -> None:
    done = train(tmp_path, LOOP.format(work="pass", after=""))

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "__pycache__", "steplog.py", "train.py",
    ]  # fmt: skip


def test_a_folder_and_the_first_step_can_be_named(tmp_path: Path) -> None:
    program = "steplog.begin('steps', first_step=40)\nwith steplog.step():\n    pass"
    train(tmp_path, f"import steplog\n{program}\n")

    log = read_lines(tmp_path, 0)
    assert log.start is not None and log.start.first_step == 40
    assert [step.index for step in log.steps] == [40]


@pytest.mark.parametrize(
    ("work", "after", "end"),
    [
        ("raise ValueError('bad batch')", "", ("failed", "ValueError: bad batch", "own_fault")),
        ("raise MemoryError()", "", ("oom", "MemoryError:", "own_fault")),
        ("pass", "raise RuntimeError('CUDA out of memory. Tried to')", ("oom",)),
        (
            "raise RuntimeError('Connection closed by peer [10.0.0.2]:1')",
            "",
            ("failed", "RuntimeError: Connection closed by peer [10.0.0.2]:1", "peer_lost"),
        ),
        (
            "step.grad_norm = 1.0",
            "with steplog.step(loss=float('nan')):\n    pass",
            ("nan", "the loss of step 4 is not finite", "own_fault"),
        ),
        ("pass", "if os.fork() == 0: sys.exit()\nos.wait()", ("ok", None, None)),
    ],
)
def test_the_end_says_why(tmp_path: Path, work: str, after: str, end: tuple[str | None]) -> None:
    log = loop(tmp_path, work, after)

    assert log.end is not None
    assert (log.end.status, log.end.reason, log.end.cause)[: len(end)] == end


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"])
def test_who_is_ended_has_no_last_word(tmp_path: Path, end: str) -> None:
    log = loop(tmp_path, after=end)

    assert len(log.steps) == 3 and log.end is None


def test_a_loss_that_is_no_number_is_null_in_strict_json(tmp_path: Path) -> None:
    log = loop(tmp_path, "step.loss = float('inf')", "with steplog.step(loss=1e999):\n    pass")

    assert "Infinity" not in (tmp_path / "steps" / "rank-00000.jsonl").read_text()
    assert log.steps[-1].loss is None


def test_what_a_killed_program_tore_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "rank-00000.jsonl").write_text('{"event": "step", "st')
    train(tmp_path, LOOP.format(work="pass", after=""), PACELINE_STEPS="steps")

    log = read_rank((tmp_path / "steps" / "rank-00000.jsonl").read_text().splitlines())
    assert log.start is not None and len(log.steps) == 3


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        train(tmp_path, WAITS, PACELINE_STEPS="steps", RANK=str(rank), WORLD_SIZE="2")
    series = {rank: Steps.of(read_lines(tmp_path, rank).steps) for rank in (0, 1)}

    merged = merge_ranks(series)
    straggler = find_straggler(series, {}, merged.index)
    assert straggler is not None and straggler.rank == 1 and straggler.named
    assert (merged["tokens"] == 16).all()


def test_without_marked_waits_nobody_is_called_slow(tmp_path: Path) -> None:
    program = WAITS.replace("with steplog.waiting_for_ranks():", "if True:")
    for rank in (0, 1):
        train(tmp_path, program, PACELINE_STEPS="steps", RANK=str(rank), WORLD_SIZE="2")
    series = {rank: Steps.of(read_lines(tmp_path, rank).steps) for rank in (0, 1)}

    assert find_straggler(series, {}, merge_ranks(series).index) is None
