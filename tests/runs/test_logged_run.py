"""Runs of a foreign program, really started: placeholders, logs, and every way of its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import engines
from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.run_report import RunReport
from paceline.core.steps import Step
from paceline.core.training import RampUp, Training
from paceline.files.documents import read_json
from paceline.files.recipe import load_recipe
from paceline.machines.placement import Request
from paceline.runs import flow, logged_run, step_follower
from paceline.runs.flow import Progress
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, make_plan
from tests.example import make_spec

ENGINE = '''
"""An engine whose program prints nanoGPT's lines, and may say that it has come to its end."""
from dataclasses import replace
from paceline.engines.launch.programs import launch, unknown_settings
from paceline.engines import log_format

def read(blocks, log, lines=log_format("nanogpt")):
    blocks = list(blocks)
    lines.read(blocks, log)
    log.end_line = "that is all" if b"that is all" in b"".join(blocks) else None

LOG_FORMAT = replace(log_format("nanogpt"), read=read, end_marker="that is all")
PROGRAM = """{program}"""

def last_step(spec):
    counts = {{"epochs": None, "warm-up": 20 + 4}}
    return counts.get(spec.engine_settings.get("mode"), spec.steps_requested)

def unsupported(spec):
    return unknown_settings(spec, ("mode", "per"))

def missing(spec):
    return None

def settings(spec):
    return {{}}

def job(spec, name):
    mode, per = (spec.engine_settings.get(key) for key in ("mode", "per"))
    argv = ("{{python}}", "program.py", mode or "", "{{rank}} of {{world_size}} {{other}}")
    return launch(spec, name, argv, python=spec.cluster.interpreter, per=per or "device",
                  files={{"program.py": PROGRAM}})
'''
PROGRAM = """
import os, sys, time
mode, words = sys.argv[1:]
print("argv", words, "env", os.environ.get("RANK"), os.environ.get("NODE_RANK"))
if os.environ.get("RANK", "0") == "0":
    last = 24 if mode == "warm-up" else 12 if "early" in mode or mode == "short" else 20
    for step in range(last - (mode == "last")):
        print(f"iter {step}: loss {5 - step / 10:.4f}, time {100 + step % 3}.00ms, mfu -100.00%")
        time.sleep(0.01)
    if mode.startswith("ends-early"):
        print("that is all")
        sys.exit(int(mode == "ends-early-badly"))
    if mode == "oom":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        sys.exit(1)
    if mode in ("crash", "last"):
        print("ValueError: no such thing", file=sys.stderr)
        sys.exit(3)
if mode == "fails-late":
    time.sleep(0.5)
    os._exit(134)
if mode == "hangs":
    time.sleep(600)
"""


RAMPING = """
import sys, time
for step in range(1, 21):
    batch = 4 if step < 18 else 8
    print(f" iteration {step:8d}/      20 | consumed samples: {4 * step:12d} | "
          f"elapsed time per iteration (ms): 100.0 | learning rate: 1.0E-04 | "
          f"global batch size: {batch:5d} | lm loss: 3.0E+00 | "
          "loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   0 | "
          "number of nan iterations:   0 |", flush=True)
    time.sleep(0.02)
print("[after training is done]")
"""
"""A program whose batch is half of the planned one, as during a ramp-up."""


@pytest.fixture(autouse=True)
def example_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "engines"
    folder.mkdir()
    (folder / "example_engine.py").write_text(ENGINE.format(program=PROGRAM))
    ramping = ENGINE.format(program=RAMPING).replace('"nanogpt"', '"megatron"')
    (folder / "ramping_engine.py").write_text(ramping)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(folder)])
    yield


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunReport]:
    def started(mode: str = "", per: str = "device", limit_s: float = 120.0) -> RunReport:
        spec = make_spec(
            engine="example_engine",
            engine_settings={"mode": mode, "per": per},
            time_limit_s=limit_s,
        )
        job = engines.engine("example_engine").job(spec, "example")
        return flow.run(Plan(spec, job, {}), tmp_path / "runs", ["x"], seen.append, probe=False)

    return started


seen: list[Progress] = []


def test_steps_come_from_the_log_and_every_process_has_one_of_its_own(
    run: Callable[..., RunReport],
):
    result = (report := run()).result
    assert result.status == "ok" and result.reason is None
    assert (result.steps_done, result.steps_requested) == (20, 20)
    assert not any("without an end marker" in warning for warning in result.warnings), "exit 0"
    assert result.metrics["step_time_s"].value == pytest.approx(0.101)
    assert result.metrics["tokens_per_s"].value == pytest.approx(8 * 32 / 0.101)
    logs = sorted((Path(report.folder) / "logs").glob("rank-*.log"))
    first_lines = [log.read_text().splitlines()[0] for log in logs]
    assert first_lines == [f"argv {n} of 2 {{other}} env {n} 0" for n in range(2)]
    assert read_json(Path(report.folder) / "result.json")["status"] == "ok"
    assert evaluate(Path(report.folder)).result == result


def test_a_run_that_ends_at_a_target_has_no_time_left() -> None:
    step = Step(3, 2.0, None)
    assert flow._progress(make_spec(engine="mlperf"), step).total_steps == 0
    assert flow._progress(make_spec(), step).total_steps == make_spec().training.steps


@pytest.mark.parametrize("start", [4, None])
def test_rates_come_from_the_batch_of_each_step(tmp_path: Path, start: int | None) -> None:
    ramp_up = RampUp(start=start, increment=4, samples=70) if start else None
    training = Training(seq_len=32, global_batch=8, steps=20, ramp_up=ramp_up, dtype="fp32")
    spec = make_spec(engine="ramping_engine", training=training)
    job = engines.engine("ramping_engine").job(spec, "example")
    progress: list[Progress] = []
    report = flow.run(Plan(spec, job, {}), tmp_path / "runs", ["x"], progress.append, probe=False)
    window, metrics = report.result.window, report.result.metrics
    assert window is not None and window.global_batch == 4
    assert metrics["tokens_per_s"].value == pytest.approx(4 * 32 / 0.1)
    assert metrics["samples_per_s"].value == pytest.approx(4 / 0.1)
    assert all(p.tokens_per_step == p.step.global_batch * 32 for p in progress if p.step)
    expected = "the step lines report global batch 4, but the plan requested 8"
    assert (expected in report.result.warnings) == (start is None)
    assert not any("was given" in warning for warning in report.result.warnings)


@pytest.mark.parametrize(("batch", "is_planned"), [(4, True), (8, True), (6, False)])
def test_a_run_within_its_ramp_up_may_report_a_smaller_batch(batch: int, is_planned: bool) -> None:
    """Megatron prints the batch of its arguments, which is the one that the run reaches."""
    ramp_up = RampUp(start=4, increment=4, samples=70)
    spec = make_spec(
        training=Training(seq_len=32, global_batch=8, steps=4, ramp_up=ramp_up, dtype="fp32")
    )
    log = SimpleNamespace(facts={"global_batch": batch})
    parsing: Any = SimpleNamespace(log=log, document=SimpleNamespace(window=None))
    expected = f"the log reports global batch {batch}, but the plan requested 8"
    assert list(logged_run._differences(spec, parsing)) == ([] if is_planned else [expected])


def test_a_program_that_starts_its_ranks_itself_is_started_once_a_node(
    run: Callable[..., RunReport],
):
    report = run(per="node")
    (log,) = (Path(report.folder) / "logs").glob("rank-*.log")
    assert log.read_text().splitlines()[0] == "argv 0 of 2 {other} env None 0"
    assert report.result.status == "ok"


def test_a_program_that_exits_without_error_has_ended_without_a_marker_in_its_log(
    run: Callable[..., RunReport],
):
    assert not [warning for warning in run().result.warnings if "end marker" in warning]


def test_a_program_that_trains_epochs_was_not_asked_for_steps(run: Callable[..., RunReport]):
    result = run("epochs").result
    assert (result.status, result.steps_done, result.steps_requested) == ("ok", 20, 0)


def test_steps_of_a_warm_up_count_for_a_program_that_counts_them(run: Callable[..., RunReport]):
    result = run("warm-up").result
    assert (result.status, result.steps_done, result.steps_requested) == ("ok", 24, 24)


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("short", "failed", "the program ended after 12 of 20 steps"),
        ("last", "failed", "ValueError: no such thing"),
        ("ends-early-badly", "failed", "exit code 1"),
        ("oom", "oom", "CUDA out of memory"),
        ("crash", "ok", None),
        ("fails-late", "ok", None),
    ],
)
def test_steps_are_asked_before_the_exit_code(
    run: Callable[..., RunReport], mode: str, status: str, reason: str | None
):
    result = run(mode).result
    assert result.status == status
    assert reason is None if result.reason is None else (reason or "") in result.reason
    ended_badly = [warning for warning in result.warnings if "ended with code" in warning]
    assert bool(ended_badly) == (mode in ("crash", "fails-late"))


def test_a_program_that_says_it_is_done_before_all_steps_are_is_believed_with_a_warning(
    run: Callable[..., RunReport],
):
    result = run("ends-early").result
    assert (result.status, result.steps_done, result.steps_requested) == ("ok", 12, 20)
    assert "the program finished after 12 of 20 steps" in result.warnings


def test_a_program_that_hangs_when_its_work_is_done_has_done_it(run: Callable[..., RunReport]):
    result = run("hangs", per="node", limit_s=12.0).result
    assert result.status == "ok" and result.steps_done == 20
    assert [warning for warning in result.warnings if "the time limit of 12 s passed" in warning]


@pytest.mark.parametrize("engine_name", ["nanogpt", "command"])
def test_a_log_is_followed_whoever_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_name: str
):
    monkeypatch.setattr(step_follower, "MIN_LOG_PAUSE_S", 0.0)
    monkeypatch.setattr(step_follower, "MAX_READ_SHARE", 1e9)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-00000.log"
    following = step_follower.make_follower(tmp_path, engine_name)
    assert following.new_steps() == []
    lines = [f"iter {n}: loss 4.5, time 120.00ms, mfu -100.00%\n" for n in range(4)]
    for known in (2, 4):
        log.write_text("".join(lines[:known]))
        assert [(step.index, step.step_time_s) for step in following.new_steps()] == [
            (known - 1, pytest.approx(0.12))
        ]
        assert following.new_steps() == []


def test_deepspeed_chat_counts_the_steps_of_its_warm_up():
    spec = load_recipe("opt-350m-sft-tiny")
    training = make_spec().training.model_copy(update={"lr_schedule": spec.training.lr_schedule})
    warmup = int(training.lr_schedule.warmup)
    counted = engines.last_step(make_spec(engine="deepspeed_chat", training=training))
    assert warmup > 0 and counted == training.steps + warmup
    assert engines.last_step(make_spec()) == make_spec().training.steps


def test_what_only_an_engine_knows_is_refused_by_others(tmp_path: Path):
    request = Request("tiny-llama", device="cpu", overrides=("engine_settings.mode=x",))
    with pytest.raises(UserError, match="mode is not a setting of engine native"):
        make_plan(request)


def test_a_spec_without_engine_settings_keeps_its_key():
    cluster = Cluster(name="here", device="cpu", devices_per_node=2, threads_per_device=1)
    spec = make_spec(cluster=cluster)
    assert spec.key == make_spec(cluster=cluster, engine_settings={}, command=()).key
    assert spec.key != make_spec(cluster=cluster, engine_settings={"a": 1}).key
