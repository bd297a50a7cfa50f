"""Series of trials: resumed, not stopped by a failure, each with its log in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import EXIT_SYSTEM_FAULT, PacelineError, SystemFaultError, UserError
from paceline.engines.mlperf import LOGS
from paceline.files.documents import read_value, write_text, write_value
from paceline.files.run_folder import RUN_FILE, read_record, this_controller
from paceline.machines.slurm.foreign import RECORD_FILE, SubmittedScript
from paceline.mlperf.report import series_document, trial_text
from paceline.mlperf.rules import TINY_VARIANTS
from paceline.mlperf.run import trials as mlperf_trials
from paceline.mlperf.run.trials import (
    FINAL,
    LOG_FILE,
    SERIES_FILE,
    SeriesReport,
    Trials,
    TrialSeries,
    TrialSetupError,
    TrialState,
    TrialStatus,
    TrialTask,
    check_cache_drop,
    open_series,
    run_trials,
    status_of,
    trial_tasks,
)
from paceline.report.terminal import plain_text
from paceline.runs import flow
from paceline.runs.flow import CancelledRunError
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot
from tests.example import make_spec
from tests.mlperf.samples import trial as log_of
from tests.runs import series_example
from tests.runs.series_example import make_finished

FLUX = TINY_VARIANTS["flux1_tiny"]
INITIALIZING = (
    ':::MLLOG {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", '
    '"key": "init_start", "value": null, "metadata": {}}\n'
)


class Machine:
    """Stands in for `flow.run`: each run ends as the next word says, and leaves what it would."""

    first_number = 0

    def __init__(self, root: Path, *endings: str) -> None:
        self.root, self.endings, self.seeds = root, list(endings), list[int]()

    def __call__(self, plan: Any, root: Path, *_: Any, **fields: Any) -> Any:
        seed = plan.spec.training.seed
        self.seeds.append(seed)
        ending = self.endings.pop(0)
        if ending == "fault":
            raise SystemFaultError("host-3", "does not answer")
        status, tail = {"success": "ok", "missed": "ok"}.get(ending, ending.split()[0]), ()
        if ending in ("mute", "unstarted"):
            status, tail = "failed", ("mount: /data: no such file",)
        folder = make_finished(
            root,
            self.first_number + len(self.seeds) + seed,
            0.2,
            status=status,
            spec=plan.spec,
            reason=None if status == "ok" else f"it was {ending}",
            log_tail=tail,
        )
        if ending == "unstarted":
            write_text(folder / LOG_FILE, INITIALIZING)
        elif ending != "mute":
            write_text(folder / LOG_FILE, self.log(ending, seed))
        report = evaluate(folder)
        if status == "cancelled":
            raise CancelledRunError(report)
        return report

    def log(self, ending: str, seed: int) -> str:
        reached = "success" in ending
        return log_of(
            seed,
            benchmark=FLUX.name,
            samples=408,
            seed=seed,
            status="success" if reached else "aborted",
            minutes=None if ending == "timeout" else 0.5,
            quality=FLUX.target - 0.01 if reached else 2.0,
        )


class Silent:
    """An observer that only remembers."""

    def __init__(self) -> None:
        self.ended_trials: list[TrialState] = []

    @contextmanager
    def running(self, task: TrialTask, plan: Plan) -> Iterator[Any]:
        yield lambda progress: None

    def task_ended(self, task: TrialTask, kept: TrialState) -> None:
        self.ended_trials.append(kept)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        raise AssertionError("trials look after no hosts")


def new_series(wanted: int, **fields: Any) -> TrialSeries:
    known: dict[str, Any] = {
        "name": "s",
        "benchmark": FLUX.name,
        "label": FLUX.label,
        "recipe": FLUX.recipe,
        "variant": "v",
        "key": "0a",
        "first_seed": 1,
        "num_trials": wanted,
    }
    return TrialSeries(**(known | fields))


def plan_of(trial: TrialState, count: int = 1) -> Any:
    """Plan of a trial, as far as the fake machine reads it."""
    spec = make_spec(ranks=1)
    training = spec.training.model_copy(update={"seed": trial.seed})
    return SimpleNamespace(spec=spec.model_copy(update={"training": training}), job=None)


def run_with(
    monkeypatch: pytest.MonkeyPatch, root: Path, wanted: int, *endings: str, **fields: Any
) -> tuple[TrialSeries, bool, Machine, Silent]:
    machine, observer, folder = Machine(root, *endings), Silent(), root / "mlperf" / "s"
    monkeypatch.setattr(flow, "run", machine)
    series = open_series(folder, new_series(wanted, **fields))
    trials = Trials(series, FLUX, folder, root, plan_of)  # type: ignore[arg-type]
    ended, interrupted = run_trials(trials, observer)
    assert read_value(folder / SERIES_FILE, TrialSeries) == ended
    return ended, interrupted, machine, observer


def statuses(series: TrialSeries) -> list[str]:
    return [trial.status for trial in series.trials]


def test_every_trial_has_its_seed_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    series, _, machine, observer = run_with(monkeypatch, tmp_path, 2, "success", "success")

    assert machine.seeds == [1, 2] and statuses(series) == ["success", "success"]
    first = series.trials[0]
    assert (first.file, first.samples_to_target, first.minutes) == ("result_0.txt", 408, 0.5)
    text = (tmp_path / "mlperf" / "s" / "result_1.txt").read_text()
    assert text == machine.log("success", 2)
    assert observer.ended_trials == list(series.trials)


def test_a_trial_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    endings = ("failed", "missed", "timeout", "oom", "success")
    series, *_ = run_with(monkeypatch, tmp_path, 5, *endings)

    assert statuses(series) == ["failed", "missed", "timeout", "failed", "success"]
    assert series.trials[0].reason == "it was failed"
    assert "run_stop reports status aborted" in (series.trials[1].reason or "")
    assert series.missing == []


@pytest.mark.parametrize("ending", ["mute", "unstarted"])
def test_a_run_that_fails_before_run_start_is_no_trial_and_stops_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
):
    first, interrupted, machine, observer = run_with(monkeypatch, tmp_path, 3, "success", ending)

    assert machine.seeds == [1, 2] and not interrupted
    assert statuses(first) == ["success", "waiting", "waiting"] and status_of(first) == "stopped"
    assert not (tmp_path / "mlperf" / "s" / "result_1.txt").exists()
    assert observer.ended_trials[-1].reason == f"ended before run_start: it was {ending}"
    failure = first.failed_start
    assert failure and failure.trial == 1 and (tmp_path / failure.run).is_dir()
    assert failure.log_tail == ("mount: /data: no such file",)
    report = SeriesReport(series=first, folder="f", status="stopped", label=first.label)
    text = plain_text(series_document(report))
    assert "run the same command again" in " ".join(text.split())
    assert "mount: /data: no such file" in text and "stopped: 1 of 3 trials finished" in text

    whole, _, machine, _ = run_with(monkeypatch, tmp_path, 3, "success", "success")

    assert machine.seeds == [2, 3] and whole.failed_start is None
    assert statuses(whole) == ["success"] * 3 and status_of(whole) == "complete"


@pytest.mark.parametrize("ending", ["success", "oom"])
@pytest.mark.parametrize("status", ["running", "cancelled"])
def test_a_trial_whose_controller_died_after_its_end_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, status: TrialStatus
):
    """Killed while the report was written: the run's record has its end, the series has not."""
    left = leave_run(monkeypatch, tmp_path, status, Machine(tmp_path, ending))

    series, interrupted, machine, _ = run_with(monkeypatch, tmp_path, 2, "success")

    assert machine.seeds == [2] and not interrupted
    assert statuses(series) == ["success" if ending == "success" else "failed", "success"]
    assert series.trials[0].run == left.name
    text = (tmp_path / "mlperf" / "s" / "result_0.txt").read_text()
    assert text == (left / LOG_FILE).read_text()


def test_a_trial_that_reached_its_end_before_it_was_cancelled_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    series, interrupted, *_ = run_with(monkeypatch, tmp_path, 1, "cancelled after success")

    assert interrupted and statuses(series) == ["success"]


def test_a_trial_of_another_series_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_run(monkeypatch, tmp_path, "running", Machine(tmp_path, "success"), group="another")

    _, _, machine, _ = run_with(monkeypatch, tmp_path, 1, "success")

    assert machine.seeds == [1]


def leave_run(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    status: TrialStatus,
    machine: Machine,
    group: str = "s",
) -> Path:
    """Leave an ended run of seed 1, and a series whose controller died before it recorded that."""
    machine(plan_of(TrialState(number=0, seed=1)), root)
    (folder,) = (file.parent for file in root.glob("*/run.json"))
    write_value(folder / RUN_FILE, read_record(folder).model_copy(update={"group": group}))
    dead = this_controller().model_copy(update={"boot_id": "another"})
    series = new_series(1, controller=dead).up_to(1)
    started = series.trials[0].model_copy(update={"status": status})
    mlperf_trials.write_series(root / "mlperf" / "s", series.with_trial(started))
    monkeypatch.setattr(Machine, "first_number", 7)
    return folder


def test_the_same_command_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, interrupted, *_ = run_with(monkeypatch, tmp_path, 4, "success", "failed", "cancelled")
    assert interrupted and statuses(first) == ["success", "failed", "cancelled", "waiting"]
    assert not (tmp_path / "mlperf" / "s" / "result_2.txt").exists()

    whole, interrupted, machine, _ = run_with(monkeypatch, tmp_path, 4, "success", "success")

    assert machine.seeds == [3, 4] and not interrupted
    assert statuses(whole) == ["success", "failed", "success", "success"]
    assert whole.trials[0] == first.trials[0]


def test_a_fault_of_the_machine_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    series, *_ = run_with(monkeypatch, tmp_path, 2, "fault", "success")
    assert statuses(series) == ["waiting", "success"]
    assert series.trials[0].reason == "host-3: does not answer"

    series, *_ = run_with(monkeypatch, tmp_path, 2, "success")
    assert statuses(series) == ["success", "success"]
    assert series.trials[0].reason is None


def test_a_trial_that_the_launcher_broke_off_ends_the_series_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    series, interrupted, _, observer = run_with(monkeypatch, tmp_path, 2, "incomplete")

    assert interrupted and statuses(series) == ["cancelled", "waiting"]
    assert [trial.status for trial in observer.ended_trials] == ["cancelled"]


def test_an_interrupt_before_a_trial_began_leaves_it_to_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mlperf_trials, "drop_caches", interrupt)
    series, interrupted, machine, _ = run_with(monkeypatch, tmp_path, 2, drop_caches=True)

    assert interrupted and machine.seeds == []
    assert statuses(series) == ["cancelled", "waiting"] and series.controller is None


def test_caches_that_the_machine_does_not_drop_end_the_series_with_a_system_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse() -> None:
        raise SystemFaultError("--drop-caches", "drop_caches: Permission denied")

    monkeypatch.setattr(mlperf_trials, "drop_caches", refuse)
    with pytest.raises(PacelineError, match="Permission denied") as raised:
        run_with(monkeypatch, tmp_path, 2, drop_caches=True)

    assert raised.value.exit_code == EXIT_SYSTEM_FAULT


def test_a_run_of_a_few_steps_that_make_no_figure_has_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(series_example, "NUM_STEPS", 3)

    series, *_ = run_with(monkeypatch, tmp_path, 2, "success", "missed")

    assert statuses(series) == ["success", "missed"]
    assert "run_stop reports status aborted" in (series.trials[1].reason or "")


def test_random_samples_are_measured_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    series, *_ = run_with(monkeypatch, tmp_path, 2, "missed", "failed", synthetic=True)

    assert statuses(series) == ["measured", "failed"]
    assert series.trials[0].samples_per_s is not None and series.trials[0].samples_to_target is None


@pytest.mark.parametrize(
    "change", [{"key": "0b"}, {"first_seed": 9}, {"benchmark": "llama31_8b_tiny"}]
)
def test_another_series_in_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
):
    run_with(monkeypatch, tmp_path, 1, "success")

    with pytest.raises(
        UserError, match=r"contains a series of flux1_tiny with a different.*--name"
    ):
        open_series(tmp_path / "mlperf" / "s", new_series(1, **change))


def test_a_series_that_another_process_runs_is_left_alone(tmp_path: Path):
    at_work = new_series(2, controller=this_controller()).up_to(2)
    mlperf_trials.write_series(tmp_path, at_work)

    with pytest.raises(UserError, match=r"is in use by process \d+ on"):
        open_series(tmp_path, new_series(2))


def test_a_series_whose_process_is_gone_is_gone_on_with(tmp_path: Path):
    gone = this_controller().model_copy(update={"boot_id": "another"})
    begun = new_series(2, controller=gone).up_to(2)
    mlperf_trials.write_series(
        tmp_path, begun.with_trial(begun.trials[0].model_copy(update={"status": "running"}))
    )

    assert [trial.number for trial in open_series(tmp_path, new_series(2)).missing] == [0, 1]


def test_caches_are_dropped_by_the_kernels_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "drop_caches"
    file.write_text("")
    monkeypatch.setattr(mlperf_trials, "DROP_FILE", file)

    check_cache_drop()
    mlperf_trials.drop_caches()

    assert file.read_text() == "3\n"


def test_caches_that_may_not_be_dropped_are_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mlperf_trials, "DROP_FILE", tmp_path / "none" / "drop_caches")

    with pytest.raises(UserError, match="is not writable"):
        check_cache_drop()
    with pytest.raises(SystemFaultError, match="drop_caches"):
        mlperf_trials.drop_caches()


def test_the_record_of_a_series_is_json_that_anyone_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_with(monkeypatch, tmp_path, 1, "success")

    document = json.loads((tmp_path / "mlperf" / "s" / SERIES_FILE).read_text())
    assert document["schema_version"] == 1 and document["trials"][0]["status"] == "success"
    assert "not an MLPerf result" in document["label"]


def series(*statuses: TrialStatus, num_trials: int | None = None) -> TrialSeries:
    empty = TrialSeries(
        name="s",
        benchmark="flux1_tiny",
        label="not an MLPerf result",
        recipe="r",
        variant="v",
        key="00000000",
        first_seed=5,
        num_trials=1,
    )
    begun = empty.up_to(num_trials or len(statuses))
    for trial, status in zip(begun.trials, statuses, strict=False):
        begun = begun.with_trial(trial.model_copy(update={"status": status}))
    return begun


def test_more_trials_go_on_where_the_seeds_ended_and_fewer_lose_none():
    begun = series("success", "missed")

    assert [trial.seed for trial in begun.up_to(3).trials] == [5, 6, 7]
    assert [trial.status for trial in begun.up_to(3).trials] == ["success", "missed", "waiting"]
    assert len(begun.up_to(1).trials) == 2


def test_fewer_trials_leave_out_what_has_not_begun_and_keep_what_has():
    assert len(series("success", "cancelled", "waiting", "waiting").up_to(1).trials) == 2
    assert len(series("success", "waiting", "waiting", "waiting").up_to(2).trials) == 2
    fewer = series("success", "cancelled", "waiting").up_to(1)
    assert (fewer.num_trials, [trial.status for trial in fewer.trials]) == (
        2,
        ["success", "cancelled"],
    )


def test_what_has_ended_is_not_missing():
    begun = series("success", "cancelled", "failed", "running", "missed", "waiting", "timeout")

    assert [trial.number for trial in begun.missing] == [1, 3, 5]
    assert {trial.status for trial in begun.trials} - {t.status for t in begun.missing} <= FINAL


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("success", "failed"), "complete"),
        (("missed", "failed"), "complete"),
        (("measured",), "complete"),
        (("failed", "timeout"), "failed"),
        (("success", "waiting"), "unfinished"),
        (("cancelled",), "unfinished"),
    ],
)
def test_the_status_of_a_series(statuses: tuple[TrialStatus, ...], expected: str):
    assert status_of(series(*statuses)) == expected


def test_a_series_that_is_at_work_is_running():
    assert status_of(series("running", "waiting"), alive=True) == "running"


def test_a_failed_trial_says_why_and_no_control_character():
    trial = TrialState(number=3, seed=4, status="failed", reason="rank 1: \x1b[31mout of memory")

    assert trial_text(trial).startswith("trial 3, seed 4: failed: rank 1: ")
    assert "\x1b" not in trial_text(trial)


def test_no_trial_starts_while_slurm_does_not_say_whether_an_earlier_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_run(monkeypatch, tmp_path, "running", Machine(tmp_path, "success"))
    with monkeypatch.context() as patch:
        patch.setattr(flow, "resume", raise_fault)
        with pytest.raises(TrialSetupError, match="squeue: timed out"):
            run_with(monkeypatch, tmp_path, 2, "success")
    series, _, machine, _ = run_with(monkeypatch, tmp_path, 2, "success")
    assert machine.seeds == [2] and statuses(series) == ["success", "success"]


def raise_fault(*_: object, **__: object) -> None:
    raise SystemFaultError("squeue", "timed out")


class OneJob(Machine):
    """Stands in for jobs of several trials: a word per trial, and one log for each as run.sub."""

    def __init__(self, root: Path, *jobs: str) -> None:
        super().__init__(root, *jobs)
        self.counts: list[int] = []

    def __call__(self, plan: Any, root: Path, *_: Any, **fields: Any) -> Any:
        seed, endings = plan.spec.training.seed, self.endings.pop(0).split()
        self.seeds.append(seed)
        self.counts.append(plan.count)
        # The run has the status of its first log.
        status = "cancelled" if "cancelled" in endings else "ok"
        status = "failed" if endings[0] in ("unstarted", "crashed") else status
        spec = plan.spec
        folder = make_finished(root, len(self.seeds) + seed, 0.2, status=status, spec=spec)
        record = SubmittedScript(script="/s/run.sub", sha256="", folder="/s", options=(), logs=LOGS)
        write_value(folder / RECORD_FILE, record)
        for number, ending in enumerate(endings, 1):
            text = self.log("success" if ending == "success" else "timeout", seed + number - 1)
            if ending == "unstarted":
                text = INITIALIZING
            if ending != "cancelled":
                # Published scripts count from 01 (`seq -w` of ten and more), from 1, or from 0.
                name = f"{number:02}" if len(endings) > 9 else str(number - (len(endings) == 2))
                write_text(folder / "results" / f"2611290300_{name}.log", text)
        report = evaluate(folder)
        if status == "cancelled":
            raise CancelledRunError(report)
        return report


def run_jobs(
    monkeypatch: pytest.MonkeyPatch, root: Path, wanted: int, per_job: int, *jobs: str
) -> tuple[TrialSeries, OneJob, Silent]:
    machine, observer, folder = OneJob(root, *jobs), Silent(), root / "mlperf" / "s"
    monkeypatch.setattr(flow, "run", machine)

    def plan(trial: TrialState, count: int = 1) -> Any:
        planned = plan_of(trial)
        planned.count = count
        return planned

    series = open_series(folder, new_series(wanted, trials_per_job=per_job))
    ended, _ = run_trials(Trials(series, FLUX, folder, root, plan), observer)
    return ended, machine, observer


def test_one_job_runs_several_trials_with_consecutive_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = ("success crashed success", "success success")
    series, machine, observer = run_jobs(monkeypatch, tmp_path, 5, 3, *jobs)

    assert (machine.seeds, machine.counts) == ([1, 4], [3, 2])
    assert statuses(series) == ["success", "failed", "success", "success", "success"]
    assert [state.number for state in observer.ended_trials] == [0, 1, 2, 3, 4]
    for trial in series.trials:
        text = (tmp_path / "mlperf" / "s" / f"result_{trial.number}.txt").read_text()
        assert f'"key": "seed", "value": {trial.seed},' in text


def test_ten_trials_of_a_job_have_their_own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    jobs = ("success crashed " + " ".join(["success"] * 8),)
    series, machine, _ = run_jobs(monkeypatch, tmp_path, 10, 10, *jobs)

    assert machine.counts == [10]
    assert statuses(series) == ["success", "failed", *["success"] * 8]


def test_a_trial_that_its_job_did_not_reach_is_run_by_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, machine, _ = run_jobs(monkeypatch, tmp_path, 4, 4, "success success cancelled cancelled")
    assert statuses(first) == ["success", "success", "cancelled", "cancelled"]

    series, machine, _ = run_jobs(monkeypatch, tmp_path, 4, 4, "success success")
    assert (machine.seeds, machine.counts) == ([3], [2])
    assert statuses(series) == ["success"] * 4


def test_a_job_whose_trials_all_fail_before_run_start_stops_the_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    series, machine, _ = run_jobs(monkeypatch, tmp_path, 4, 2, "unstarted unstarted", "success")

    assert machine.seeds == [1] and status_of(series) == "stopped"
    assert statuses(series) == ["waiting"] * 4


def test_started_and_new_trials_do_not_share_a_job():
    fields = {"trials_per_job": 3}
    started = [
        TrialState(number=n, seed=n + 1, status="running" if n in (1, 2) else "waiting")
        for n in range(8)
    ]
    tasks = list(trial_tasks(new_series(8, trials=tuple(started), **fields)))
    numbers = [[trial.number for trial in task.trials] for task in tasks]
    assert numbers == [[0], [1, 2], [3, 4, 5], [6, 7]]
    assert [task.was_started for task in tasks] == [False, True, False, False]
