"""What `paceline mlperf run` is asked for, and what is refused before anything starts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host
from paceline.core.run import RunSpec
from paceline.files import references
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import this_controller
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe import inventory
from paceline.mlperf.rules import BENCHMARKS, TINY_VARIANTS, TRIAL_VARIANT
from paceline.mlperf.run import request as mlperf_run
from paceline.mlperf.run import tiny_data
from paceline.mlperf.run import trials as mlperf_trials
from paceline.mlperf.run.request import (
    SeriesRequest,
    benchmark_of,
    plan_trials,
    report_series,
    series_report,
)
from paceline.mlperf.run.tiny_data import prepare_data, refuse_training
from paceline.mlperf.run.trials import TrialState
from paceline.mlperf.score import convergence
from paceline.runs.flow import CancelledRunError
from paceline.runs.outcome import evaluate
from tests.mlperf.samples import trial as log_of
from tests.runs.series_example import make_finished

NAMES = [benchmark.option for benchmark in BENCHMARKS.values()]


@pytest.fixture(autouse=True)
def a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> float:
    """A reference point of the small Llama; its mean."""
    tiny = references.source("mlperf-tiny")
    point = references.ConvergencePoint(
        id="p",
        benchmark="llama31_8b_tiny",
        rulesets=("tiny",),
        global_batch=8,
        samples_to_target=(900, 950, 1000, 1050, 1100) * 4,
    )
    made_up = tiny.model_copy(update={"convergence": (point,)})

    def source(name: str) -> references.Source:
        return made_up if name == "mlperf-tiny" else references.source(name)

    monkeypatch.setattr(convergence, "source", source)
    return 1000.0


@contextmanager
def unshown(plan: Any) -> Any:
    raise AssertionError("no base model should be trained here")
    yield


@contextmanager
def shown(plan: Any) -> Any:
    yield lambda progress: None


def series_request(tmp_path: Path, benchmark: str = "llama31-8b", **fields: Any) -> SeriesRequest:
    run = Request("", None, fields.pop("overrides", ()), 1, "cpu")
    return SeriesRequest(benchmark, run, root=tmp_path / "runs", **fields)


def spec_of(request: SeriesRequest, number: int = 0) -> RunSpec:
    trials = plan_trials(request, unshown)
    return trials.plan_trial(trials.series.trials[number]).spec


@pytest.mark.parametrize("name", [*NAMES, "LLAMA31_8B", "llama2_70b_lora", "flux1-schnell"])
def test_a_benchmark_is_found_by_both_spellings(tmp_path: Path, name: str):
    whole, small = (
        benchmark_of(series_request(tmp_path, name, tiny=tiny)) for tiny in (False, True)
    )

    assert whole in BENCHMARKS.values() and small in TINY_VARIANTS.values()
    assert small.tiny_variant_of == whole.name


def test_an_unknown_benchmark_is_refused_with_the_nearest(tmp_path: Path):
    with pytest.raises(UserError, match=r"is not known.*llama31-8b"):
        benchmark_of(series_request(tmp_path, "llama31-8"))


@pytest.mark.parametrize("name", [*BENCHMARKS, *TINY_VARIANTS])
def test_every_benchmark_has_a_trial_that_is_logged_under_its_name(name: str):
    benchmark = (BENCHMARKS | TINY_VARIANTS)[name]
    recipe = load_recipe(benchmark.recipe, TRIAL_VARIANT)

    assert recipe.mlperf is not None and recipe.mlperf.benchmark == name
    assert recipe.training.evaluation is not None
    assert recipe.training.evaluation.target == benchmark.target
    assert ("not an MLPerf result" in recipe.mlperf.platform) == (
        benchmark.tiny_variant_of is not None
    )


def test_a_trial_of_a_small_sibling_trains_on_real_text_with_its_own_seed(tmp_path: Path):
    request = series_request(tmp_path, tiny=True, trials=3, first_seed=7)
    first, last = spec_of(request), spec_of(request, 2)

    assert (first.training.seed, last.training.seed) == (7, 9)
    assert first.data.source == "text" and Path(str(first.data.path)).is_file()
    assert first.mlperf is not None and first.mlperf.cache_cleared is False
    assert "tiny" in first.mlperf.platform and "not an MLPerf result" in first.mlperf.platform


def test_the_small_flux_trains_on_drawings_that_are_made_once(tmp_path: Path):
    spec = spec_of(series_request(tmp_path, "flux1", tiny=True))
    index = Path(str(spec.data.path))
    made = index.stat().st_mtime_ns

    again = prepare_data(TINY_VARIANTS["flux1_tiny"], "cpu", unshown)

    assert spec.data.source == "latents" and str(index) in again.overrides[1]
    assert index.stat().st_mtime_ns == made
    assert [path.name for path in index.parent.parent.iterdir()] == [index.parent.name]


def test_the_small_lora_starts_from_a_base_of_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[RunSpec] = []

    def trained(plan: Any, root: Path, *_: Any, **__: Any) -> None:
        seen.append(plan.spec)
        folder = make_finished(root, 0, 0.1, spec=plan.spec)
        checkpoint = folder / "checkpoints" / "step-000240"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        (checkpoint.parent / "latest").write_text(checkpoint.name)

    monkeypatch.setattr(tiny_data.flow, "run", trained)
    trials = plan_trials(series_request(tmp_path, "llama2-70b-lora", tiny=True), shown)
    spec = trials.plan_trial(trials.series.trials[0]).spec

    (base,) = seen
    assert base.lora is None and base.training.evaluation is None and base.mlperf is None
    assert base.checkpoint.every == base.training.steps
    assert base.data.path != spec.data.path and "prose" in str(spec.data.path)
    assert str(spec.training.initial_weights).endswith("step-000240")
    plan_trials(series_request(tmp_path, "llama2-70b-lora", tiny=True), unshown)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("status", "fault"), [("cancelled", KeyboardInterrupt), ("nan", SystemFaultError)]
)
def test_a_base_that_was_not_trained_to_its_end_is_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, fault: type[BaseException]
):
    def broken(plan: Any, root: Path, *_: Any, **__: Any) -> Any:
        report = evaluate(make_finished(root, 0, 0.1, spec=plan.spec, status=status))
        if status == "cancelled":
            raise CancelledRunError(report)
        return report

    monkeypatch.setattr(tiny_data.flow, "run", broken)

    with pytest.raises(fault, match="was not trained: nan" if status == "nan" else None):
        plan_trials(series_request(tmp_path, "llama2-70b-lora", tiny=True), shown)


def test_the_same_question_is_the_same_series_and_another_is_another(tmp_path: Path):
    names = [
        plan_trials(series_request(tmp_path, tiny=True, **fields), unshown).series.name
        for fields in ({}, {"trials": 3}, {"overrides": ("lr=5e-4",)}, {"synthetic": True})
    ]

    assert names[0] == names[1]
    assert len(set(names)) == 3 and all(name.startswith("llama31_8b_tiny-") for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_without_room_is_told_before_anything_is_said_of_data(tmp_path: Path, name: str):
    request = series_request(tmp_path, name)
    with pytest.raises(UserError, match="cannot fit"):
        plan_trials(on_cluster(request, tmp_path, 16e9), unshown)


@pytest.mark.parametrize("name", NAMES)
def test_data_that_is_not_there_is_named(tmp_path: Path, name: str):
    request = series_request(tmp_path, name)
    with pytest.raises(UserError, match=r"missing; the benchmark trains on .*--data FILE"):
        plan_trials(on_cluster(request, tmp_path, 4e12), unshown)
    assert benchmark_of(request).trains_on


def test_the_whole_lora_wants_a_base_and_the_mask_of_its_summaries(tmp_path: Path):
    base, ids = tmp_path / "step-000001", tmp_path / "ids.bin"
    base.mkdir()
    for file in (base / "state.json", ids):
        file.write_text("{}")

    def of(*overrides: str) -> RunSpec:
        request = series_request(
            tmp_path, "llama2-70b-lora", overrides=overrides, data=ids, heldout=ids
        )
        return spec_of(on_cluster(request, tmp_path, 4e12))

    weights, mask = f"training.initial_weights={base}", f"training.evaluation.loss_mask={ids}"
    with pytest.raises(UserError, match="base weights"):
        of()
    with pytest.raises(
        UserError, match=r"loss mask of the validation samples.*loss on the summaries"
    ):
        of(weights)
    evaluation = of(weights, mask).training.evaluation
    assert evaluation and (evaluation.mean, evaluation.loss_mask, evaluation.path) == (
        "samples",
        str(ids),
        str(ids),
    )


def on_cluster(request: SeriesRequest, tmp_path: Path, memory_bytes: float) -> SeriesRequest:
    path = tmp_path / f"cluster-{memory_bytes:g}.yaml"
    path.write_text(
        f"name: c\ndevice: cpu\nnodes: 1\ndevices_per_node: 1\n"
        f"device_memory_bytes: {memory_bytes:g}\n"
    )
    run = replace(request.run, cluster=str(path), devices=None, device="auto")
    return replace(request, run=run)


def test_a_small_sibling_takes_no_data(tmp_path: Path):
    with pytest.raises(UserError, match="--tiny creates its own"):
        plan_trials(series_request(tmp_path, tiny=True, data=tmp_path / "x"), unshown)


def test_random_samples_are_few_steps_with_evaluations_and_no_target(tmp_path: Path):
    spec = spec_of(series_request(tmp_path, "flux1", tiny=True, synthetic=True))
    evaluation = spec.training.evaluation

    assert spec.data.source == "synthetic" and spec.training.steps == mlperf_run.SYNTHETIC_STEPS
    assert evaluation is not None and evaluation.target is None
    assert 2 * evaluation.every_samples == spec.training.steps * spec.training.global_batch
    assert evaluation.samples == 32


def test_a_series_on_random_samples_has_an_expected_time_and_no_score(
    tmp_path: Path, recorded: float
):
    trials = plan_trials(series_request(tmp_path, tiny=True, synthetic=True, trials=1), unshown)
    folder = make_finished(tmp_path / "runs", 0, 0.2)
    events = folder / "steps" / "rank-00000.jsonl"
    evaluation = (
        '{"event": "eval", "step": 9, "samples": 72, "num_samples": 32, "loss": 6.2, '
        '"reached": false, "eval_time_s": 0.5}\n'
    )
    events.write_text(events.read_text() + evaluation)
    done = trials.series.with_trial(
        TrialState(number=0, seed=1, status="measured", run=folder.name)
    )

    yielded = report_series(trials, done, ["x"])

    assert yielded.score is None and "not an MLPerf result" in yielded.label
    assert yielded.expected is not None and yielded.expected.speed.evaluation_s == 0.5
    assert yielded.expected.samples == recorded and yielded.expected.minutes > 0
    rarer = done.model_copy(update={"overrides": ("training.evaluation.every_samples=240",)})
    other = report_series(trials, rarer, ["x"]).expected
    assert other is not None and other.num_evaluations < yielded.expected.num_evaluations


def test_a_whole_series_of_a_small_sibling_has_a_score_under_its_label(
    tmp_path: Path, recorded: float
):
    trials = plan_trials(series_request(tmp_path, tiny=True), unshown)
    trials.folder.mkdir(parents=True)
    small, done = trials.benchmark, trials.series
    for trial in done.trials:
        text = log_of(
            trial.number,
            benchmark=small.name,
            batch=8,
            samples=int(recorded),
            minutes=0.5,
            quality=small.target - 0.01,
            org="nobody",
        )
        file = f"result_{trial.number}.txt"
        (trials.folder / file).write_text(text)
        done = done.with_trial(trial.model_copy(update={"status": "success", "file": file}))

    yielded = report_series(trials, done, ["x"])

    assert yielded.status == "complete" and yielded.score is not None
    assert yielded.score.status == "ok" and yielded.score.score_minutes == pytest.approx(
        0.5, rel=0.01
    )
    assert yielded.score.label == "not an MLPerf result: tiny variant of llama31_8b"


def test_an_unfinished_series_says_how_to_go_on(tmp_path: Path):
    trials = plan_trials(series_request(tmp_path, tiny=True), unshown)

    yielded = report_series(trials, trials.series, ["__main__.py", "mlperf", "run", "a b"])

    assert (yielded.status, yielded.resume) == ("unfinished", "paceline mlperf run 'a b'")


def test_the_status_of_a_series_is_read_and_nothing_is_made(tmp_path: Path):
    request = series_request(tmp_path, tiny=True, trials=2)
    with pytest.raises(UserError, match="contains no such series of llama31_8b_tiny"):
        series_report(request)
    trials = plan_trials(request, unshown)
    text = log_of(0, benchmark="llama31_8b_tiny", batch=8, minutes=0.5, quality=1.0)
    (trials.folder).mkdir(parents=True)
    (trials.folder / "result_0.txt").write_text(text)
    done = TrialState(number=0, seed=1, status="success", file="result_0.txt")
    mlperf_trials.write_series(trials.folder, trials.series.with_trial(done))

    yielded = series_report(request)

    assert (yielded.status, yielded.series.trials[0].status) == ("unfinished", "success")
    assert yielded.score is not None and yielded.score.status == "incomplete"
    with pytest.raises(UserError, match="no such series"):
        series_report(replace(request, synthetic=True))
    with pytest.raises(UserError, match="no such series"):
        series_report(replace(request, name="another"))


def test_a_series_that_a_process_is_at_work_on_is_running(tmp_path: Path):
    request = series_request(tmp_path, tiny=True)
    trials = plan_trials(request, unshown)
    at_work = trials.series.model_copy(update={"controller": this_controller()})
    mlperf_trials.write_series(trials.folder, at_work)

    assert series_report(request).status == "running"


def test_caches_that_were_dropped_are_logged_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "drop"
    file.write_text("")
    monkeypatch.setattr(mlperf_trials, "DROP_FILE", file)

    spec = spec_of(series_request(tmp_path, tiny=True, drop_caches=True))

    assert spec.mlperf is not None and spec.mlperf.cache_cleared is True


@pytest.mark.parametrize("launcher", ["ssh", "slurm"])
def test_caches_of_other_hosts_are_not_said_to_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
):
    monkeypatch.setattr(mlperf_trials, "check_cache_drop", lambda: None)

    with pytest.raises(UserError, match="--drop-caches: drops caches only on this machine"):
        plan_trials(
            elsewhere(series_request(tmp_path, tiny=True, drop_caches=True), launcher), unshown
        )


def test_a_trial_that_loses_a_node_is_not_begun_anew_in_its_place(tmp_path: Path):
    local = plan_trials(series_request(tmp_path, tiny=True), unshown)
    queued = plan_trials(elsewhere(series_request(tmp_path, tiny=True), "slurm"), unshown)
    plan = queued.plan_trial(queued.series.trials[0])

    assert plan.spec.cluster.slurm.retries == 0 and not plan.spec.cluster.slurm.requeue
    assert plan.job.cluster == plan.spec.cluster
    assert local.series.key == queued.series.key


def elsewhere(request: SeriesRequest, launcher: str) -> SeriesRequest:
    where = HostPlacement((Host(name="node-1"),), launcher=launcher)
    return replace(request, run=replace(request.run, where=where))


def test_random_samples_at_another_batch_have_two_evaluations_as_well(tmp_path: Path):
    request = series_request(tmp_path, tiny=True, synthetic=True, overrides=("global_batch=16",))
    training = spec_of(request).training

    assert training.global_batch == 16 and training.evaluation is not None
    assert 2 * training.evaluation.every_samples == training.steps * 16


def test_a_dry_run_trains_no_base(tmp_path: Path):
    with pytest.raises(UserError, match=r"does not exist yet; run once without --dry-run"):
        plan_trials(series_request(tmp_path, "llama2-70b-lora", tiny=True), refuse_training)
