"""Plan a series from a request of `paceline mlperf run`, and report the series."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from paceline.core.errors import UserError, unknown_name
from paceline.core.mmdit import MMDiTShape
from paceline.core.run import EngineSettings
from paceline.engines import engine
from paceline.files.documents import read_value
from paceline.files.recipe import full_key, load_recipe
from paceline.files.run_folder import is_alive
from paceline.machines.node.binding import with_binding
from paceline.machines.placement import Request
from paceline.mlperf.rules import (
    BENCHMARKS,
    DEFAULT_RULESET,
    NOT_A_RESULT,
    TINY_VARIANTS,
    TRIAL_VARIANT,
    Benchmark,
)
from paceline.mlperf.run import trials as mlperf_trials
from paceline.mlperf.run.tiny_data import ShowProgress, TrialData, prepare_data
from paceline.mlperf.run.trials import (
    SERIES_FILE,
    SeriesReport,
    Trials,
    TrialSeries,
    TrialState,
    status_of,
)
from paceline.mlperf.score.convergence import (
    ExpectedTime,
    MeasuredSpeed,
    expected_time,
    reference_at,
    rulesets,
)
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.score import Score
from paceline.runs.ending import read_ranks
from paceline.runs.logged_run import NATIVE
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, make_plan

LAYOUT_KEYS = ("layout.", "training.global_batch", "devices")
"""Overrides with which users set the layout; other variants are then not tried."""


@dataclass(frozen=True)
class TrialVariant:
    """Variant that trials run, its plan, and the reason if it is not the default variant."""

    name: str
    plan: Plan
    notice: str | None = None


def trial_variant(request: Request) -> TrialVariant:
    """Return the variant `mlperf-trial`, else the first `mlperf-trial-*` that fits the machine.

    If the engine's own files set other sizes than `mlperf-trial`, a variant with exactly these
    sizes is preferred. If none fits, raises the UserError of `mlperf-trial`, with the variants
    tried.
    """
    keys = [full_key(text.partition("=")[0]) for text in request.overrides]
    sets_layout = any(key.startswith(LAYOUT_KEYS) for key in keys)
    try:
        plan = make_plan(replace(request, variant=TRIAL_VARIANT))
    except UserError as refusal:
        if sets_layout:
            raise
        return _alternative_variant(request, refusal)
    variant = TrialVariant(TRIAL_VARIANT, plan)
    return variant if sets_layout or not plan.differences else _same_sizes(request, variant)


def _same_sizes(request: Request, default: TrialVariant) -> TrialVariant:
    """Return the variant whose sizes are those of the engine's own files, else the default."""
    for name in _other_variants(request):
        with suppress(UserError):
            plan = make_plan(replace(request, variant=name))
            if not plan.differences:
                return TrialVariant(name, plan, f"variant {name}: its sizes are the config's")
    return default


def _other_variants(request: Request) -> list[str]:
    names = load_recipe(request.recipe).variants
    return [name for name in names if name.startswith(f"{TRIAL_VARIANT}-")]


def _alternative_variant(request: Request, refusal: UserError) -> TrialVariant:
    errors: dict[str, UserError] = {}
    for name in _other_variants(request):
        try:
            plan = make_plan(replace(request, variant=name))
        except UserError as error:
            errors[name] = error
            continue
        sizes, batch = plan.spec.layout.label(plan.spec.world_size), plan.spec.training.global_batch
        notice = (
            f"using variant {name} ({sizes}, {batch:,} samples per step), because "
            f"{TRIAL_VARIANT} cannot run here: {refusal.what}"
        )
        return TrialVariant(name, plan, notice)
    if all(str(other) == str(refusal) for other in errors.values()):
        raise refusal
    attempts = ", ".join(f"{name}{_why(other, refusal)}" for name, other in errors.items())
    raise UserError(
        refusal.where,
        refusal.what,
        allowed=refusal.allowed,
        remedy="; ".join(
            filter(None, (f"these variants do not fit either: {attempts}", refusal.remedy))
        ),
    ) from refusal


def _why(other: UserError, refusal: UserError) -> str:
    """Return why another variant does not fit, in brackets; empty if the reason is the same."""
    return "" if other.what == refusal.what else f" ({other.what})"


RUNS_FOLDER = "mlperf"
FIRST_SEED = 1
SYNTHETIC_STEPS = 40
SYNTHETIC = f"random samples: {NOT_A_RESULT}"
ENGINES = (NATIVE, "mlperf")
"""Engines that can run trials."""
NO_DATA = TrialData((), None)
"""Data of an engine that brings its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MASK = "loss_mask="
"""Mark of an override that selects the tokens that count for the loss."""


@dataclass(frozen=True)
class SeriesRequest:
    """Request of the command line."""

    benchmark: str
    run: Request
    """Devices, placement and overrides; its recipe is ignored."""
    tiny: bool = False
    synthetic: bool = False
    trials: int = 10
    first_seed: int = FIRST_SEED
    trial_limit_s: float | None = None
    drop_caches: bool = False
    data: Path | None = None
    heldout: Path | None = None
    name: str | None = None
    root: Path = Path("runs")


def benchmark_of(request: SeriesRequest) -> Benchmark:
    """Return the benchmark, or its tiny variant, by its name or that of its recipe.

    Raises UserError for an unknown name.
    """
    names = {benchmark.option: benchmark for benchmark in BENCHMARKS.values()}
    names_and_recipes = {benchmark.recipe: benchmark for benchmark in BENCHMARKS.values()} | names
    name = request.benchmark.replace("_", "-").lower()
    if name not in names_and_recipes:
        raise unknown_name(f"benchmark {request.benchmark!r}", "is not known", name, names)
    benchmark = names_and_recipes[name]
    return TINY_VARIANTS[f"{benchmark.name}_tiny"] if request.tiny else benchmark


def plan_trials(request: SeriesRequest, show: ShowProgress) -> Trials:
    """Return the requested series, new or resumed, with all that its trials need.

    `show` displays the training of a missing base model. Raises UserError if the series cannot run
    on this machine, if data is missing, or if its folder holds another series.
    """
    benchmark = benchmark_of(request)
    if request.name is not None and not _NAME.fullmatch(request.name):
        raise UserError(
            f"--name {request.name}",
            "is not a valid name of a series",
            allowed="letters, digits, . _ and -, starting with a letter or digit",
        )
    if request.drop_caches:
        mlperf_trials.check_cache_drop()
    request, foreign = _for_engine(request, benchmark)
    variant = _variant(request, benchmark)
    data = (
        NO_DATA
        if foreign
        else _data(request, benchmark, variant.plan.spec.training.global_batch, show)
    )
    fixed = (*data.overrides, *_labels(request, benchmark), *request.run.overrides)
    base = replace(
        request.run,
        recipe=benchmark.recipe,
        variant=variant.name,
    )
    per_job = _trials_per_job(variant.plan.spec.engine_settings)

    def plan_trial(trial: TrialState, count: int = 1) -> Plan:
        of_trial = (
            f"training.seed={trial.seed}",
            f"mlperf.cache_cleared={str(request.drop_caches).lower()}",
            *((f"engine_settings.nexp={count}",) if per_job > 1 else ()),
        )
        limit_s = request.trial_limit_s and request.trial_limit_s * count
        plan = make_plan(replace(base, overrides=(*fixed, *of_trial), timeout_s=limit_s))
        notices = (variant.notice, *plan.notices) if variant.notice else plan.notices
        return _without_restarts(replace(plan, notices=notices))

    first = plan_trial(TrialState(number=0, seed=0), per_job)
    if request.drop_caches and not first.spec.cluster.runs_here:
        raise UserError(
            "--drop-caches",
            "drops caches only on this machine, but the trials run on other hosts",
            remedy="omit it; the log then reports that caches were not cleared",
        )
    name = (
        request.name
        or f"{benchmark.name}-{'synthetic-' if request.synthetic else ''}{first.spec.key}"
    )
    folder = request.root / RUNS_FOLDER / name
    series = TrialSeries(
        name=name,
        benchmark=benchmark.name,
        label=SYNTHETIC if request.synthetic else benchmark.label,
        recipe=benchmark.recipe,
        variant=variant.name,
        overrides=request.run.overrides,
        key=first.spec.key,
        synthetic=request.synthetic,
        data_digest=data.digest,
        first_seed=request.first_seed,
        num_trials=request.trials,
        trial_limit_s=request.trial_limit_s,
        drop_caches=request.drop_caches,
        trials_per_job=per_job,
    )
    return Trials(
        mlperf_trials.open_series(folder, series), benchmark, folder, request.root, plan_trial
    )


def _for_engine(request: SeriesRequest, benchmark: Benchmark) -> tuple[SeriesRequest, bool]:
    """Return the request for its engine, and whether that is not the native trainer.

    Raises UserError for options that only the native trainer has.
    """
    recipe = load_recipe(benchmark.recipe, TRIAL_VARIANT, request.run.overrides)
    if recipe.engine == NATIVE:
        return request, False
    engine(recipe.engine)
    if recipe.engine not in ENGINES:
        raise UserError(
            f"--engine {recipe.engine}", "writes no MLPerf log", allowed=", ".join(ENGINES)
        )
    native_only = {
        "--tiny": request.tiny,
        "--synthetic": request.synthetic,
        "--validation": request.heldout,
    }
    if options := [name for name, value in native_only.items() if value]:
        raise UserError(
            options[0],
            f"applies to the native trainer, not to engine {recipe.engine}",
            remedy="omit it; the submission has its own data and settings",
        )
    if request.data is None:
        return request, True
    data_override = f"engine_settings.data={json.dumps(str(request.data.absolute()))}"
    run = replace(request.run, overrides=(*request.run.overrides, data_override))
    return replace(request, run=run), True


def _trials_per_job(settings: EngineSettings) -> int:
    """Return how many trials a job of the submission's script runs; raise UserError if invalid."""
    count = settings.get("nexp", 1)
    if not isinstance(count, int) or count < 1:
        raise UserError(
            f"engine_settings.nexp={count}", "is not a number of trials", allowed="1-99"
        )
    return count


def _without_restarts(plan: Plan) -> Plan:
    """Return the plan without restarts: a trial that loses a node fails, and is not retried."""
    cluster = plan.spec.cluster
    if not cluster.capabilities.restarts:
        return plan
    slurm = cluster.slurm.model_copy(update={"retries": 0, "requeue": False})
    once = cluster.model_copy(update={"slurm": slurm})
    spec = plan.spec.model_copy(update={"cluster": once})
    return replace(plan, spec=spec, job=with_binding(engine(spec.engine).job(spec, plan.job.name)))


def _variant(request: SeriesRequest, benchmark: Benchmark) -> TrialVariant:
    """Return the variant that trials run with the user's settings.

    Raises UserError if no variant fits the machine, before data is checked.
    """
    # Random samples have no mask.
    overrides = [text for text in request.run.overrides if MASK not in text]
    changes = ("data.source=synthetic", "data.path=null", *overrides)
    return trial_variant(replace(request.run, recipe=benchmark.recipe, overrides=changes))


def _data(
    request: SeriesRequest, benchmark: Benchmark, batch: int, show: ShowProgress
) -> TrialData:
    options = {"--data": request.data, "--validation": request.heldout}
    data_options = [name for name, value in options.items() if value]
    if request.synthetic:
        if data_options:
            raise UserError(data_options[0], "has no effect with --synthetic", remedy="omit it")
        short = _speed_test_overrides(benchmark, batch)
        return TrialData(("data.source=synthetic", "data.path=null", *short), None)
    if benchmark.tiny_variant_of is not None:
        if data_options:
            raise UserError(
                data_options[0], "is for the official benchmark; --tiny creates its own data"
            )
        return prepare_data(benchmark, request.run.device, show)
    has_path = any(text.startswith("data.path=") for text in request.run.overrides)
    if request.data is None and not has_path:
        raise UserError(
            f"{benchmark.name}: data",
            f"missing; the benchmark trains on {benchmark.trains_on}",
            remedy="set --data FILE (and --validation FILE), measure the speed with "
            "--synthetic, or train the tiny variant with --tiny",
        )
    return TrialData(tuple(_data_overrides(request, benchmark)), None)


def _data_overrides(request: SeriesRequest, benchmark: Benchmark) -> list[str]:
    """Return the overrides that select the user's files."""
    recipe = load_recipe(benchmark.recipe, TRIAL_VARIANT)
    source = "tokens"
    if isinstance(recipe.model, MMDiTShape):
        source = "latents" if _path(request).endswith(".json") else "webdataset"
    if recipe.lora is not None and not any("initial_weights" in t for t in request.run.overrides):
        raise UserError(
            f"{benchmark.name}: base weights",
            "missing",
            remedy="--set training.initial_weights=CHECKPOINT",
        )
    if recipe.lora is not None and not any(MASK in text for text in request.run.overrides):
        raise UserError(
            f"{benchmark.name}: loss mask of the validation samples",
            "missing; the target is the loss on the summaries only",
            remedy="--set training.evaluation.loss_mask=FILE, with one byte per token "
            "(docs/reference/mlperf.md)",
        )
    overrides = [f"data.source={source}"]
    if request.data:
        overrides.append(f"data.path={json.dumps(str(request.data))}")
    if request.heldout:
        overrides.append(f"training.evaluation.path={json.dumps(str(request.heldout))}")
    return overrides


def _path(request: SeriesRequest) -> str:
    """Return the path of the user's data."""
    paths = [t.partition("=")[2] for t in request.run.overrides if t.startswith("data.path=")]
    return str(request.data) if request.data else paths[-1].strip("\"'")


def _speed_test_overrides(benchmark: Benchmark, batch: int) -> list[str]:
    """Return overrides for a short run with two evaluations and no target, to measure speed."""
    recipe = load_recipe(benchmark.recipe, TRIAL_VARIANT)
    evaluation = recipe.training.evaluation
    assert evaluation is not None, "a trial is evaluated"
    every = SYNTHETIC_STEPS // 2 * batch
    fields = {"every_samples": every, "skip_first": 0, "samples": evaluation.samples}
    return [f"steps={SYNTHETIC_STEPS}", f"training.evaluation={json.dumps(fields)}"]


def _labels(request: SeriesRequest, benchmark: Benchmark) -> list[str]:
    """Return overrides for the system name in the log; the user's own --set takes precedence."""
    if benchmark.tiny_variant_of is None and not request.synthetic:
        return []
    kind = "tiny system" if benchmark.tiny_variant_of else "random samples"
    return [f"mlperf.platform={json.dumps(f'{kind}, {NOT_A_RESULT}')}"]


def report_series(trials: Trials, series: TrialSeries, command: Sequence[str]) -> SeriesReport:
    """Return the output for a series so far; `command` is the one that resumes it."""
    status = status_of(series)
    bare = SeriesReport(
        series=series,
        folder=str(trials.folder),
        status=status,
        label=series.label,
        resume=shlex.join(["paceline", *command[1:]])
        if status in ("unfinished", "stopped")
        else None,
    )
    if series.synthetic:
        return bare.model_copy(update={"expected": _expected(trials, series)})
    return bare.model_copy(update={"score": _score(trials.folder, series)})


def series_report(request: SeriesRequest) -> SeriesReport:
    """Return the state of a benchmark's named or newest series.

    Nothing is run or written. Raises UserError if there is no such series.
    """
    benchmark, place = benchmark_of(request), request.root / RUNS_FOLDER
    files = sorted(
        place.glob(f"{request.name or '*'}/{SERIES_FILE}"), key=lambda f: f.stat().st_mtime
    )
    for file in reversed(files):
        series = read_value(file, TrialSeries)
        if (series.benchmark, series.synthetic) != (benchmark.name, request.synthetic):
            continue
        alive = series.controller is not None and is_alive(series.controller)
        return SeriesReport(
            series=series,
            folder=str(file.parent),
            status=status_of(series, alive),
            label=series.label,
            score=None if series.synthetic else _score(file.parent, series),
        )
    raise UserError(
        str(place),
        f"contains no such series of {benchmark.name}",
        remedy="start one with the same command without --status",
    )


def _score(folder: Path, series: TrialSeries) -> Score | None:
    """Return the score of the logs so far, None if they are all empty."""
    logs = [folder / trial.file for trial in series.trials if trial.file]
    return score(folder) if any(log.is_file() and log.stat().st_size for log in logs) else None


def _expected(trials: Trials, series: TrialSeries) -> ExpectedTime | None:
    """Return the expected time to train at the measured speed; None without speed or reference."""
    runs = [t.run for t in series.trials if t.status == "measured" and t.run]
    speeds = [speed for run in runs if (speed := _speed(trials.root / run))]
    recipe = load_recipe(series.recipe, series.variant, series.overrides)
    evaluation = recipe.training.evaluation
    if not speeds or evaluation is None:
        return None
    plan = trials.plan_trial(TrialState(number=0, seed=0))
    batch = plan.spec.training.global_batch
    benchmark = trials.benchmark
    rounds = rulesets(benchmark.name) or [DEFAULT_RULESET]
    ruleset = DEFAULT_RULESET if DEFAULT_RULESET in rounds else rounds[-1]
    reference = reference_at(benchmark.name, ruleset, batch, benchmark.num_runs)
    if reference is None:
        return None
    median_speed = sorted(speeds, key=lambda speed: speed.samples_per_s)[len(speeds) // 2]
    return expected_time(reference, median_speed, evaluation.every_samples, evaluation.skip_first)


def _speed(run: Path) -> MeasuredSpeed | None:
    """Return a run's samples/s over steady steps and its median evaluation time in seconds."""
    result, first = evaluate(run).result, read_ranks(run).get(0)
    rate = result.metrics.get("samples_per_s")
    times = [event.eval_time_s for event in first.evaluations] if first else []
    if rate is None or rate.value is None or not times:
        return None
    return MeasuredSpeed(
        samples_per_s=rate.value,
        relative_spread=rate.spread or 0.0,
        num_steps=rate.n or 1,
        evaluation_s=median(times),
    )
