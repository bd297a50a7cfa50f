"""A ledger accounts for every second, and knows which steps were done twice."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.goodput import goodput
from paceline.cli.output import TableOptions
from paceline.core.errors import UserError
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import RUN_FILE
from paceline.runs.goodput.attempt import attempts_of_log, attempts_of_run
from paceline.runs.goodput.ledger import ledger_of
from tests.command import paceline
from tests.example import make_spec
from tests.files.test_events import END, START, STEP, lines
from tests.files.test_run_folder import make_record
from tests.logs.example import megatron_line

ASKED = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
STARTUP_S, SAVE_S, FIRST_S = 30.0, 0.5, 3.0
LINE = "iter {}: loss 4.5, time {:.2f}ms, mfu -100.00%\n"
"""Step and milliseconds as nanoGPT prints them."""


def write_attempt(
    root: Path,
    name: str,
    begins_s: float,
    first: int,
    last: int,
    *,
    killed: bool = False,
    slow: int | None = None,
    steps_requested: int = 100,
    **settings: object,
) -> float:
    """An attempt that begins so late: 1 s a step, 3 s the first, 5 s a slow one, a checkpoint every
    10 steps; the second at which it ended.
    """
    begun = ASKED + begins_s
    ready = begun + STARTUP_S
    steps = [
        {
            **STEP,
            "step": step,
            "step_time_s": (FIRST_S if step == first else 5.0 if step == slow else 1.0)
            + SAVE_S * (step % 10 == 0),
            **({"checkpoint_s": SAVE_S} if step % 10 == 0 else {}),
        }
        for step in range(first, last + 1)
    ]
    end = ready + sum(step["step_time_s"] for step in steps)
    record = make_record(
        "incomplete" if killed else "ok",
        name=name,
        tag="training",
        created=datetime.fromtimestamp(begun, UTC).isoformat(),
        spec=make_spec(steps=steps_requested, **{"ranks": 1, **settings}),
        launched_unix=begun + 1,
        ended_unix=None if killed else end,
    )
    write_value(root / name / RUN_FILE, record)
    start = {**START, "time_unix": ready, "first_step": first}
    ends = [] if killed else [{**END, "time_unix": end}]
    text = "".join(lines(start, *steps, *ends))
    write_text(root / name / "steps" / "rank-00000.jsonl", text)
    return end - ASKED


def test_every_second_of_a_restarted_training_is_in_one_account(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 37, killed=True)
    ended = write_attempt(tmp_path, "b", ended + 60, 31, 60, slow=45)
    ledger = ledger_of([a for name in ("b", "a") for a in attempts_of_run(tmp_path / name)])
    seconds = ledger.seconds
    assert ledger.wall_s == pytest.approx(ended) == pytest.approx(sum(seconds.values()))
    assert seconds["productive"] == pytest.approx(60)
    assert seconds["lost_steps"] == pytest.approx(7)
    assert seconds["initialisation"] == pytest.approx(2 * STARTUP_S)
    assert seconds["compile"] == pytest.approx(2 * (FIRST_S - 1))
    assert seconds["checkpoint"] == pytest.approx(6 * SAVE_S)
    assert seconds["slow_steps"] == pytest.approx(4)
    assert seconds["stopped"] == pytest.approx(60)
    assert seconds["other"] == seconds["queue"] == pytest.approx(0, abs=1e-3)
    assert [entry.name for entry in ledger.attempts] == ["a", "b"]
    assert (ledger.attempts[0].steps_kept, ledger.attempts[0].steps_repeated) == (30, 7)
    assert ledger.goodput == pytest.approx(60 / ended)
    assert ledger.days_left == pytest.approx(40 * ended / 60 / 86400)
    assert ledger.days_left_at_best == pytest.approx(40 / 86400)


def test_restarts_of_a_slurm_job_are_attempts_and_wait_in_the_queue(tmp_path: Path):
    ended = write_attempt(tmp_path, "earlier", 0, 1, 20, killed=True)
    ended_again = write_attempt(tmp_path, "job", ended + 40, 11, 40)
    folder = tmp_path / "job"
    record = json.loads((folder / RUN_FILE).read_text())
    asked = datetime.fromtimestamp(ASKED, UTC).isoformat()
    write_text(folder / RUN_FILE, json.dumps({**record, "created": asked, "launched_unix": ASKED}))
    (folder / "attempts" / "17.0").mkdir(parents=True)
    (tmp_path / "earlier" / "steps").rename(folder / "attempts" / "17.0" / "steps")
    write_text(folder / "slurm.json", "{}")
    first, second = attempts_of_run(folder)
    ledger = ledger_of([first, second])
    assert ledger.wall_s == pytest.approx(ended_again)
    assert ledger.seconds["lost_steps"] == pytest.approx(10.5)
    assert ledger.seconds["queue"] == pytest.approx(STARTUP_S + 40 + STARTUP_S)
    assert ledger.seconds["initialisation"] == ledger.seconds["stopped"] == pytest.approx(0)
    assert "includes the start of the job" in ledger.notes[0]


def test_a_log_with_a_restart_is_two_attempts(tmp_path: Path):
    line = (
        " iteration {:8d}/     200 | consumed samples: {:12d} | elapsed time per iteration (ms): "
        "{:.1f} | learning rate: 1.0E-05 | global batch size:    16 | lm loss: 1.0E+01 |\n"
    )
    made = [*range(10, 80, 10), *range(50, 110, 10)]
    path = tmp_path / "pretrain.log"
    path.write_text("".join(line.format(step, 16 * step, 2000.0) for step in made))
    first, second = attempts_of_log(path)
    assert (first.resumed_after, second.resumed_after) == (0, 40)
    ledger = ledger_of([first, second])
    assert (ledger.attempts[0].steps_kept, ledger.attempts[0].steps_repeated) == (40, 30)
    assert ledger.seconds["lost_steps"] == pytest.approx(60)
    assert ledger.seconds["productive"] == pytest.approx(200)
    assert ledger.goodput == pytest.approx(200 / 260)
    assert (ledger.steps_requested, ledger.whole) == (200, False)
    assert "upper bound" in ledger.notes[0]


def test_a_log_of_two_finished_trainings_is_refused(tmp_path: Path):
    """Step numbers that start over after the last step are not a restart."""
    path = tmp_path / "pretrain.log"
    lines = [megatron_line(step, 2.0) for step in range(60, 101, 10)]  # of 100
    path.write_text("".join([*lines, *lines]))
    with pytest.raises(UserError, match="after a training that was complete"):
        attempts_of_log(path)
    path.write_text("".join([*lines[:-1], *lines]))
    assert len(attempts_of_log(path)) == 2


def test_restarts_after_a_failed_last_save_are_attempts(tmp_path: Path):
    path = tmp_path / "pretrain.log"
    numbers = [*range(1, 101), *range(91, 101), *range(91, 101)]
    path.write_text("".join(megatron_line(step, 2.0) for step in numbers))  # of 100
    ledger = ledger_of(attempts_of_log(path))
    assert [entry.steps_kept for entry in ledger.attempts] == [90, 0, 10]
    assert ledger.seconds["lost_steps"] == pytest.approx(40)


def test_evaluations_of_a_log_have_their_account(tmp_path: Path):
    bars = "".join(
        f" {step}%|##  | {step}/100 [00:10<00:10,  1.00s/it]\n"
        f"{{'loss': 1.5, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}}\n"
        f" {step}%|##  | {step}/100 [00:10<00:10,  1.00s/it]\n"
        for step in range(5, 101, 5)
    )
    path = tmp_path / "train.log"
    path.write_text(
        f"  Total optimization steps = 100\n{bars}"
        "{'eval_loss': 1.5, 'eval_runtime': 50.0, 'eval_steps_per_second': 1.0, 'epoch': 1.0}\n"
        "{'train_runtime': 150.0, 'train_steps_per_second': 0.667, 'train_loss': 1.4}\n"
    )
    ledger = ledger_of(attempts_of_log(path))
    assert ledger.seconds["evaluation"] == 50.0
    assert ledger.seconds["slow_steps"] == 0.0
    assert ledger.wall_s == pytest.approx(145)  # the first 5 steps have no time of their own


def test_a_foreign_run_counts_its_seconds_once(tmp_path: Path):
    folder = tmp_path / "foreign"
    record = make_record(
        "failed",
        name="foreign",
        created=datetime.fromtimestamp(ASKED, UTC).isoformat(),
        spec=make_spec(engine="command", ranks=1, steps=200),
        ended_unix=ASKED + 200,
    )
    write_value(folder / RUN_FILE, record)
    made = [*range(510, 580, 10), *range(550, 610, 10)]
    write_text(folder / "logs" / "rank-00000.log", "".join(map(LINE.format, made, [1000.0] * 13)))
    ledger = ledger_of(attempts_of_run(folder))
    assert ledger.wall_s == pytest.approx(200) and ledger.usual_step_s == pytest.approx(1)
    assert ledger.seconds["productive"] == pytest.approx(100)
    assert ledger.seconds["lost_steps"] == pytest.approx(30)
    assert ledger.seconds["initialisation"] == pytest.approx(70)
    assert ledger.whole and not any("not counted" in note for note in ledger.notes)


@pytest.mark.parametrize("slow", [slice(20, 100), slice(80, 180), slice(60, 200)])
def test_a_training_that_is_throttled_for_half_its_time_is_not_wholly_productive(
    slow: slice, tmp_path: Path
):
    times = np.random.default_rng(1).normal(1000, 5, 200)
    times[slow] *= 1.5
    log = tmp_path / "train.log"
    log.write_text("".join(map(LINE.format, range(1, 201), times)))
    ledger = ledger_of(attempts_of_log(log))
    assert ledger.usual_step_s == pytest.approx(1, rel=0.01)
    assert ledger.goodput == pytest.approx(200_000 / times.sum(), rel=0.02)
    assert (
        "50% longer than the others; the usual step is that of the faster level" in ledger.notes[-1]
    )


def test_throttling_that_comes_and_goes_is_not_productive(tmp_path: Path):
    times = np.random.default_rng(2).normal(1000, 5, 400)
    for begin in range(20, 400, 50):
        times[begin : begin + 28] *= 1.5
    log = tmp_path / "train.log"
    log.write_text("".join(map(LINE.format, range(1, 401), times)))
    ledger = ledger_of(attempts_of_log(log))
    assert ledger.goodput == pytest.approx(400_000 / times.sum(), rel=0.02)


def test_batches_of_two_lengths_in_any_order_have_one_usual_step(tmp_path: Path):
    rng = np.random.default_rng(3)
    times = rng.normal(1000, 5, 400) * np.where(rng.random(400) < 0.45, 1.3, 1.0)
    log = tmp_path / "train.log"
    log.write_text("".join(map(LINE.format, range(1, 401), times)))
    ledger = ledger_of(attempts_of_log(log))
    assert not any("faster level" in note for note in ledger.notes)


def test_a_few_steps_of_a_faster_level_are_not_the_usual_step(tmp_path: Path):
    times = np.random.default_rng(1).normal(1000, 5, 265)
    times[100:115] *= 0.94
    log = tmp_path / "train.log"
    log.write_text("".join(map(LINE.format, range(1, 266), times)))
    ledger = ledger_of(attempts_of_log(log))
    assert ledger.usual_step_s == pytest.approx(1, rel=0.005)
    assert ledger.goodput > 0.99


def test_a_clock_that_is_set_during_a_run_moves_no_end(tmp_path: Path):
    record = make_record(
        "ok",
        name="reset",
        created=datetime.fromtimestamp(ASKED, UTC).isoformat(),
        spec=make_spec(engine="command", ranks=1, steps=60),
        launched_unix=ASKED + 5,
        launched_monotonic_s=100.0,
        ended_unix=ASKED + 3 * 3600,
        ended_monotonic_s=170.0,
    )
    folder = tmp_path / "reset"
    write_value(folder / RUN_FILE, record)
    write_text(
        folder / "logs" / "rank-00000.log",
        "".join(LINE.format(step, 1000.0) for step in range(1, 61)),
    )
    assert ledger_of(attempts_of_run(folder)).wall_s == pytest.approx(75)


def test_a_run_without_a_date_is_refused(tmp_path: Path):
    write_value(tmp_path / "it" / RUN_FILE, make_record("ok", name="it", created="yesterday"))
    with pytest.raises(UserError, match="created: 'yesterday' is not a date and time"):
        attempts_of_run(tmp_path / "it")


def test_lines_of_several_steps_are_judged_by_the_step(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text("".join(map(LINE.format, (1, 10, 20, 30, 50), [2000.0] * 5)))
    ledger = ledger_of(attempts_of_log(log), steps_requested=86400)
    assert ledger.seconds["slow_steps"] == pytest.approx(0) and ledger.goodput == pytest.approx(1)
    assert ledger.usual_step_s == pytest.approx(2)
    assert ledger.days_left_at_best == pytest.approx(2 * (86400 - 50) / 86400)
    assert ledger.attempts[0].steps_kept == 50


def test_steps_that_were_rolled_back_are_still_to_be_done(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 90, killed=True)
    write_attempt(tmp_path, "b", ended, 51, 60)
    ledger = ledger_of([a for name in ("a", "b") for a in attempts_of_run(tmp_path / name)])
    assert ledger.days_left_at_best == pytest.approx(40 / 86400)


def test_an_attempt_that_is_named_twice_is_refused(tmp_path: Path):
    write_attempt(tmp_path, "a", 0, 1, 20)
    write_attempt(tmp_path, "b", 200, 21, 40)
    for names in (["a", str(tmp_path / "a")], ["training", "b"]):
        with pytest.raises(UserError, match="twice"):
            goodput(names, runs_dir=tmp_path, output=TableOptions())


def test_of_a_finished_training_no_days_are_told(tmp_path: Path):
    write_attempt(tmp_path, "a", 0, 1, 100)
    text = paceline("runs", "goodput", "a", runs=tmp_path).stdout
    assert "all 100 steps are done" in text and "rate so far" not in text


def test_the_verb_takes_tags_runs_and_logs(tmp_path: Path):
    ended = write_attempt(tmp_path, "a", 0, 1, 20, killed=True)
    write_attempt(tmp_path, "b", ended, 11, 40)
    told = json.loads(paceline("runs", "goodput", "training", "--json", runs=tmp_path).stdout)
    assert told["steps_kept"] == 40 and told["seconds"]["lost_steps"] == pytest.approx(10.5)
    text = paceline("runs", "goodput", "a", tmp_path / "b", "--steps", 80, runs=tmp_path).stdout
    assert "2 attempts" in text and "to step 80" in text and "lost steps" in text


def test_what_tells_no_times_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    with pytest.raises(UserError):
        attempts_of_log(tmp_path / "notes.txt")
    with pytest.raises(UserError, match="no step"):
        ledger_of([])
