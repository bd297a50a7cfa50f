"""Programs of the user's own, really started: what is read of them, and every way of their end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from paceline import steplog
from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.engines import command as engine
from paceline.files.documents import read_json
from paceline.files.run_folder import read_record
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.flow import CancelledRunError
from paceline.runs.outcome import evaluate
from paceline.runs.plan import make_plan
from tests.command import paceline
from tests.logs.example import megatron_log

LOOP = """
import os, signal, sys, time
import steplog

rank = int(os.environ["RANK"])
print("argv", sys.argv[1:], "env", os.environ.get("API_KEY"))
for number in range(120):
    with steplog.step(tokens=1000, samples=4, loss=3.0) as step:
        time.sleep(0.03 if rank else 0.01)
        with steplog.waiting_for_ranks():
            time.sleep(0.0 if rank else 0.02)
    if "killed" in sys.argv and number == 20:
        os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)
    if "nan" in sys.argv and number == 20:
        with steplog.step(loss=float("nan")):
            break
    if "slow" in sys.argv:
        time.sleep(1)
if "quits" in sys.argv:
    sys.exit("error: diverged")
"""
LOGGED = f"""
import sys
print({megatron_log([0.5] * 12)!r}, flush=True)
if "crash" in sys.argv:
    raise ValueError("no such thing")
if "oom" in sys.argv:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""A launcher of the program's own, which alone knows how its ranks ended."""
Runner = Callable[..., RunReport]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    shutil.copy(steplog.__file__, tmp_path / "steplog.py")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "logged.py").write_text(LOGGED)
    monkeypatch.chdir(tmp_path)

    def started(*words: str, recipe: str = "", **request: object) -> RunReport:
        asked = Request(recipe, device="cpu", command=(sys.executable, *words), **request)  # type: ignore[arg-type]
        return flow.run(make_plan(asked), tmp_path / "runs", ["x"], print, probe=False)

    return started


def test_a_program_is_measured_by_its_event_lines(start: Runner) -> None:
    report = start("loop.py", "--key", "--rank={rank}", per="device", devices=2)

    result = report.result
    assert result.status == "ok" and result.recipe == "loop.py"
    assert (result.steps_done, result.steps_requested) == (120, 0)
    metrics = {name: metric.value for name, metric in result.metrics.items()}
    step_time_s = metrics["step_time_s"]
    assert step_time_s and metrics["tokens_per_s"] == pytest.approx(2000 / step_time_s)
    assert metrics["samples_per_s"] == pytest.approx(8 / step_time_s)
    assert metrics["memory_resident_bytes"] and metrics["startup_s"]
    assert metrics["mfu"] is None and result.num_parameters is None
    assert result.straggler and result.straggler.rank == 1 and result.straggler.named
    log = (Path(report.folder) / "logs" / "rank-00001.log").read_text()
    assert log == "argv ['--key', '--rank=1'] env None\n"
    assert evaluate(Path(report.folder)).result == result


def test_nothing_is_made_up_of_a_program_without_a_recipe(start: Runner) -> None:
    report = start("logged.py")

    result, facts = report.result, report.facts
    assert result.status == "ok" and result.reason is None
    assert result.metrics["step_time_s"].value == pytest.approx(0.5)
    assert result.metrics["samples_per_s"].value == pytest.approx(128 / 0.5)
    assert (facts.model, facts.dtype, facts.layout, facts.num_devices) == (None,) * 4
    assert facts.global_batch is None or facts.global_batch == 128
    stored = read_json(Path(report.folder) / "run.json")["spec"]
    assert not {"model", "training", "layout", "data"} & stored.keys()
    record = read_record(Path(report.folder))
    assert record.spec and RunSpec.model_validate(stored).key == record.spec.key


def test_a_recipe_says_what_the_program_trains(start: Runner) -> None:
    report = start("logged.py", recipe="tiny-llama", overrides=("training.global_batch=64",))

    assert report.result.recipe == "tiny-llama" and report.facts.model is not None
    assert report.result.metrics["model_flops_per_s_per_device"].value
    said = [w for w in report.result.warnings if "global batch" in w or "but the plan" in w]
    assert report.result.status == "ok" and report.result.steps_requested == 0, said


@pytest.mark.parametrize(
    ("words", "request_", "status", "reason"),
    [
        (("logged.py", "crash"), {}, "failed", "exit code 1: ValueError: no such thing"),
        (("logged.py", "oom"), {}, "oom", "out of memory"),
        (("-c", "print('no step')"), {}, "incomplete", "no log of the run has a step line"),
        (("loop.py", "killed"), {"per": "device", "devices": 2}, "failed", "rank 1 was killed by"),
        ((*TORCHRUN, "loop.py", "killed"), {}, "failed", "rank 1 was killed by SIGKILL"),
        (("loop.py", "nan"), {"per": "device", "devices": 1}, "nan", "step 22 is not finite"),
        (
            ("loop.py", "quits"),
            {"per": "device", "devices": 1},
            "failed",
            "code 1: error: diverged",
        ),
        (("-c", "import time; time.sleep(60)"), {"timeout_s": 1.0}, "timeout", "time limit of 1 s"),
    ],
)
def test_every_end_has_its_status_and_reason(
    start: Runner, words: tuple[str, ...], request_: dict[str, object], status: str, reason: str
) -> None:
    result = start(*words, **request_).result
    assert (result.status, reason in (result.reason or "")) == (status, True), result.reason


def test_an_interrupt_ends_its_processes_and_keeps_its_steps(start: Runner, tmp_path: Path) -> None:
    words = (sys.executable, "loop.py", "slow")
    plan = make_plan(Request("", device="cpu", command=words, per="device", devices=1))
    steps = tmp_path / "runs"
    with pytest.raises(CancelledRunError) as ended:
        flow.run(
            plan,
            steps,
            ["x"],
            print,
            probe=False,
            is_cancelled=lambda: any(b'"step"' in p.read_bytes() for p in steps.glob("*/steps/*")),
        )
    assert ended.value.report.result.status == "cancelled"
    assert ended.value.report.result.steps_done >= 1


def test_a_program_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = make_plan(Request("", device="cpu", command=("no-such-program", "x")))
    with pytest.raises(UserError, match="no-such-program was not found on this machine"):
        flow.run(plan, tmp_path / "runs", ["x"], print)
    assert not (tmp_path / "runs").exists()


def test_an_empty_recipe_without_a_program_is_an_unknown_recipe() -> None:
    with pytest.raises(UserError, match="recipe '': is unknown"):
        make_plan(Request("", device="cpu"))


def test_secrets_reach_the_program_and_no_file(start: Runner) -> None:
    words = ("loop.py", "--api-key", "Zx81-qLm4-77fy")
    report = start(*words, per="device", devices=1)
    folder = Path(report.folder)

    assert words[2] in (folder / "logs" / "rank-00000.log").read_text()
    written = [p for p in folder.iterdir() if p.is_file() and p.suffix != ".html"]
    assert not [p.name for p in written if words[2] in p.read_text()]
    stored = read_record(folder).spec
    assert stored is not None and "has no secrets" in engine.unsupported(stored)[0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run", "--"], "must be followed by a program"),
        (["run", "tiny-llama", "x", "--", "y"], "unexpected extra argument"),
        (["run", "--set", "layout.tp=2", "--", "python"], "needs a recipe, and there is none"),
        (["run", "--set", "hang_limit_s=abc", "--", "python"], "hang_limit_s"),
        (
            ["run", "--set", "engine_settings=1", "--set", "engine_settings.x=2", "--", "python"],
            "has a value already",
        ),
        (["run", "tiny-llama", "--launch-per", "node"], "requires a program of your own"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], problem: str) -> None:
    done = paceline(*arguments)
    assert done.returncode == 1 and problem in " ".join(done.stderr.split())


def test_a_dry_run_shows_the_command_as_typed() -> None:
    done = paceline("run", "--dry-run", "--", "python", "train.py", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(
        "starter_program.py node 1 1 1 python train.py --steps 3 --json"
    )


@pytest.mark.parametrize(
    "stored",
    [[], "x", {"bare": True}, {"bare": True, "recipe": "x", "cluster": {"nodes": float("inf")}}],
)
def test_a_stored_run_that_is_none_is_refused(stored: object) -> None:
    with pytest.raises(ValidationError):
        RunSpec.model_validate(stored)
