"""Score a set of MLPerf runs by the rules of a round; never an official result."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isclose, isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.core.errors import UserError, unknown_name
from paceline.core.flops import FlopsInput, flops_per_sample
from paceline.core.telemetry import (
    Energy,
    TelemetryStart,
    energy_between,
    read_telemetry,
)
from paceline.core.text import as_text
from paceline.files.documents import parse_json, read_text, write_text
from paceline.files.recipe import load_recipe
from paceline.logs.disagreement import peak_doubt
from paceline.machines.probe.telemetry import FOLDER
from paceline.mlperf.result_logs import (
    PLACEHOLDER,
    LoggedTrial,
    RunLog,
    described_accelerator,
    described_devices,
    run_logs,
)
from paceline.mlperf.rules import (
    MAX_INITIALIZATION_MINUTES,
    Benchmark,
    Ruleset,
    find_benchmark,
    first_evaluation,
    select_ruleset,
)
from paceline.mlperf.score.convergence import compare_with_reference, references, rulesets
from paceline.mlperf.score.score import (
    COUNTED_STATUSES,
    MAX_FAILED,
    Score,
    ScoredRun,
    convergence_samples,
    windows_of,
    with_model_flops,
    with_parts,
)

NamedTrials = list[tuple[str, LoggedTrial]]


def score(place: Path, ruleset: str | None = None, num_devices: int | None = None) -> Score:
    """Return the score of the runs at `place`, in minutes, with everything it is based on.

    Raises UserError for a place without MLPerf logs or with two benchmarks, and for a ruleset that
    is unknown or does not have the benchmark.
    """
    if ruleset is not None:
        _check_known(ruleset)
    logs = run_logs(place)
    trials = [(_name(log, at), trial) for log in logs for at, trial in enumerate(log.trials, 1)]
    benchmark = find_benchmark(_benchmark(place, trials), str(place))
    rules = _ruleset(place, ruleset, benchmark, logs)
    runs = [*_runs(logs, benchmark), *_unreadable(logs)]
    bare = Score(
        folder=as_text(str(place)),
        benchmark=benchmark.name,
        ruleset=rules.name,
        ruleset_from=rules.origin,
        label=benchmark.label,
        status="ok",
        runs=tuple(runs),
        runs_required=benchmark.num_runs,
        **_system_and_model(place, trials, logs, num_devices, benchmark),
        warnings=(
            *rules.warnings,
            *_warnings(trials, logs, runs),
            *_wrong_first_evaluations(trials, benchmark, rules.name),
        ),
    )
    result = with_model_flops(_with_score(bare, benchmark, _gaps(logs)))
    extra_warnings = (
        scaling_file_warning(place, result.scaling_factor, result.olympic_mean_minutes),
        peak_doubt(result.model_flops_per_s_per_device, result.device, None),
    )
    warnings = (*result.warnings, *(doubt for doubt in extra_warnings if doubt))
    return result.model_copy(update={"warnings": warnings})


def _check_known(ruleset: str) -> None:
    names = rulesets()
    if ruleset not in names:
        raise unknown_name(f"--ruleset {ruleset}", "is not known", ruleset, names)


def _ruleset(
    place: Path, option: str | None, benchmark: Benchmark, logs: Sequence[RunLog]
) -> Ruleset:
    """Return the requested ruleset, else the one that logs, path and benchmark imply."""
    names = rulesets() if benchmark.tiny_variant_of else rulesets(benchmark.name)
    if option is None:
        from_logs = [log.ruleset for log in logs if log.ruleset]
        return select_ruleset(place, from_logs, rulesets(), names)
    if option not in names:
        raise UserError(f"--ruleset {option}", f"has no {benchmark.name}", allowed=", ".join(names))
    return Ruleset(option, "option")


def _name(log: RunLog, trial: int) -> str:
    """Return the name of a run: its file, with a number if the file holds several runs."""
    name = as_text(log.path.name)
    return name if len(log.trials) == 1 else f"{name} (trial {trial})"


def _benchmark(place: Path, trials: NamedTrials) -> str:
    """Return the benchmark of all runs; raises UserError if there are two, or none is logged."""
    files: dict[str, list[str]] = {}
    for name, trial in trials:
        if trial.benchmark:
            files.setdefault(trial.benchmark, []).append(name)
    if not files:
        raise UserError(
            str(place),
            "no log reports its submission_benchmark",
            remedy="the runs stopped before they logged it",
        )
    if len(files) > 1:
        summary = "; ".join(
            f"{name}: {_first_five(where)}" for name, where in sorted(files.items())
        )
        raise UserError(
            str(place),
            f"contains runs of {len(files)} benchmarks ({summary})",
            remedy="score each in its own folder",
        )
    return next(iter(files))


def _runs(logs: Sequence[RunLog], benchmark: Benchmark) -> list[ScoredRun]:
    """Return one run per trial; a trial that is in two files counts once."""
    first_files: dict[tuple[float | None, ...], str] = {}
    runs: list[ScoredRun] = []
    for log in logs:
        for at, trial in enumerate(log.trials, 1):
            run = _run(_name(log, at), trial, log, benchmark)
            key = tuple(trial.times_ms.get(m) for m in ("init_start", "run_start", "run_stop"))
            first = first_files.setdefault(key, run.file) if any(key) else run.file
            if first != run.file:
                why = f"same run as {first}"
                run = run.model_copy(update={"status": "duplicate", "reason": why})
            runs.append(run)
    return runs


def _run(name: str, trial: LoggedTrial, log: RunLog, benchmark: Benchmark) -> ScoredRun:
    fault = trial.fault(benchmark)
    reason = fault[1] if fault else None
    if reason and log.read_error:
        reason = f"{reason}: {log.read_error}"
    return ScoredRun(
        file=name,
        status=fault[0] if fault else "success",
        reason=reason,
        minutes=trial.minutes,
        samples_to_target=None if fault else trial.samples_to_target,
        initialization_minutes=trial.initialization_minutes,
        median_samples_per_s=trial.median_samples_per_s,
        global_batch=trial.global_batch,
        seeds=tuple(sorted(set(trial.seeds))),
        started_ms=trial.times_ms.get("run_start", trial.times_ms.get("init_start")),
        energy=energy_of(log.path, trial),
    )


def _unreadable(logs: Iterable[RunLog]) -> Iterator[ScoredRun]:
    for log in logs:
        if log.unreadable:
            yield ScoredRun(file=as_text(log.path.name), status="unreadable", reason=log.unreadable)


def _gaps(logs: Sequence[RunLog]) -> list[int]:
    """Return the numbers that are missing between those of the files."""
    numbers = {log.number for log in logs if log.number is not None}
    if not numbers or max(numbers) - min(numbers) > 10 * len(numbers):
        return []
    return sorted(set(range(min(numbers), max(numbers) + 1)) - numbers)


def _with_score(score: Score, benchmark: Benchmark, gaps: Sequence[int]) -> Score:
    """Return the score with means, convergence test and minutes, as far as its runs allow."""
    counted_runs = [run for run in score.runs if run.status in COUNTED_STATUSES]
    windows = windows_of(counted_runs, benchmark.num_runs)
    if not windows:
        return _without_score(score, "incomplete", _too_few(score, len(counted_runs), gaps))
    window_to_score = next(window for window in windows if window.chosen)
    counted_files = () if window_to_score.olympic_mean_minutes is None else window_to_score.files
    runs = with_parts(score.runs, counted_files)
    score = score.model_copy(update={"runs": tuple(runs), "windows": tuple(windows)})
    inside = [run for run in runs if run.file in window_to_score.files]
    score = score.model_copy(update=_means(inside, score))
    if window_to_score.olympic_mean_minutes is None:
        return _without_score(score, "invalid", _too_many_failed(inside))
    batches = {run.global_batch for run in inside if run.global_batch}
    if len(batches) > 1:
        sizes = ", ".join(map(str, sorted(batches)))
        return _without_score(score, "invalid", f"the runs have different global batches: {sizes}")
    if not batches:
        return _without_score(score, "no-reference", "no run reports global_batch_size")
    points = references(benchmark.name, score.ruleset)
    samples = convergence_samples(inside)
    rcp = compare_with_reference(points, batches.pop(), samples, benchmark.num_runs)
    score = score.model_copy(update={"rcp": rcp})
    if rcp.scaling_factor is None:
        status = "invalid" if rcp.status == "failed" else "no-reference"
        return _without_score(score, status, rcp.reason or rcp.status)
    # MLPerf score: mean run time in minutes, scaled up to the reference's samples.
    minutes = window_to_score.olympic_mean_minutes * rcp.scaling_factor
    return score.model_copy(update={"scaling_factor": rcp.scaling_factor, "score_minutes": minutes})


def _without_score(score: Score, status: str, reason: str) -> Score:
    return score.model_copy(update={"status": status, "reason": reason})


def _too_few(score: Score, num_runs: int, gaps: Sequence[int]) -> str:
    left_out = Counter(run.status for run in score.runs if run.status not in COUNTED_STATUSES)
    parts = [f"{num_runs} of the {score.runs_required} runs that {score.benchmark} needs"]
    parts += [f"missing: number {_first_five(map(str, gaps))}"] if gaps else []
    parts += [f"{n} {status}" for status, n in sorted(left_out.items())]
    return "; ".join(parts)


def _too_many_failed(runs: Sequence[ScoredRun]) -> str:
    failed = [f"{run.file} ({run.reason})" for run in runs if run.status != "success"]
    return (
        f"{len(failed)} of {len(runs)} runs did not converge; only {MAX_FAILED} may be dropped: "
        f"{_first_five(failed)}"
    )


def _means(inside: Sequence[ScoredRun], score: Score) -> dict[str, Any]:
    """Return figures of the submitted window; times and rates are those of the counted runs."""
    converged_runs = [run for run in inside if run.status == "success"]
    rates = [run.median_samples_per_s for run in converged_runs if run.median_samples_per_s]
    waits = [r.initialization_minutes for r in inside if r.initialization_minutes is not None]
    samples = [run.samples_to_target for run in converged_runs if run.samples_to_target]
    window_to_score = next(window for window in score.windows if window.chosen)
    counted_runs = [run for run in converged_runs if run.part == "counted" and run.minutes]
    minutes = sum(run.minutes or 0 for run in counted_runs)
    overall = (
        sum(run.samples_to_target or 0 for run in counted_runs) / (60 * minutes)
        if minutes
        else None
    )
    return {
        "olympic_mean_minutes": window_to_score.olympic_mean_minutes,
        "mean_samples_to_target": fmean(samples) if samples else None,
        "median_samples_per_s": median(rates) if rates else None,
        "mean_initialization_minutes": fmean(waits) if waits else None,
        "overall_samples_per_s": overall,
        "mean_energy_j": mean_energy_j(inside),
    }


def _system_and_model(
    place: Path,
    trials: NamedTrials,
    logs: Sequence[RunLog],
    num_devices: int | None,
    benchmark: Benchmark,
) -> dict[str, Any]:
    """Return what the logs report about the system and the model."""
    return {
        **_model(benchmark),
        "system": _first_value(trials, "submission_platform"),
        "organization": _first_value(trials, "submission_org"),
        "division": _first_value(trials, "submission_division"),
        "num_devices": num_devices
        or next((log.num_devices for log in logs if log.num_devices), None)
        or described_devices(place),
        "device": next((log.device for log in logs if log.device), None)
        or described_accelerator(place),
    }


def _model(benchmark: Benchmark) -> dict[str, Any]:
    """Return the FLOPs of a sample and their convention, if there is a recipe of the model."""
    if not benchmark.recipe:
        return {}
    recipe = load_recipe(benchmark.recipe, benchmark.variant)
    convention, seq_len = recipe.flops_convention, recipe.training.seq_len
    flops = flops_per_sample(convention, FlopsInput(recipe.model, seq_len, lora=recipe.lora))
    return {"flops_per_sample": flops, "convention": convention}


def _first_value(trials: NamedTrials, key: str) -> str | None:
    """Return the first value that is not a placeholder."""
    values = (trial.texts.get(key) for _, trial in trials)
    return next((value for value in values if value and PLACEHOLDER not in value), None)


def _warnings(
    trials: NamedTrials, logs: Sequence[RunLog], runs: Sequence[ScoredRun]
) -> Iterator[str]:
    """Yield what a reviewer of a submission would question."""
    for key in ("submission_org", "submission_platform", "submission_division"):
        values = {trial.texts[key] for _, trial in trials if key in trial.texts}
        if any(PLACEHOLDER in value for value in values):
            yield f"{key} is still a placeholder"
        elif not values:
            yield f"no log reports {key}"
        elif len(values) > 1:
            yield f"the logs have different values of {key}: {_first_five(sorted(values))}"
    yield from dict.fromkeys(log.devices_warning for log in logs if log.devices_warning)
    counts = {log.num_devices for log in logs if log.num_devices}
    if len(counts) > 1:
        numbers = _first_five(map(str, sorted(counts)))
        yield f"the logs report different numbers of devices: {numbers}"
    seeds = Counter(seed for run in runs if run.status in COUNTED_STATUSES for seed in run.seeds)
    repeated_seeds = [str(seed) for seed, n in seeds.items() if n > 1]
    if repeated_seeds:
        yield f"seeds used by several runs: {_first_five(repeated_seeds)}"
    yield from _warnings_of_runs(trials, logs, runs)


def _warnings_of_runs(
    trials: NamedTrials, logs: Sequence[RunLog], runs: Sequence[ScoredRun]
) -> Iterator[str]:
    slow = [r.file for r in runs if (r.initialization_minutes or 0) > MAX_INITIALIZATION_MINUTES]
    if slow:
        limit = f"{MAX_INITIALIZATION_MINUTES:g} minutes"
        yield f"initialization took more than {limit}: {_first_five(slow)}"
    unread = {
        name: trial.num_incomplete_lines for name, trial in trials if trial.num_incomplete_lines
    }
    if unread:
        num_lines = sum(unread.values())
        yield f"skipped {num_lines:,} incomplete :::MLLOG lines ({_first_five(unread)})"
    for log in logs:
        if log.read_error:
            yield f"{as_text(log.path.name)}: {log.read_error}"


def _wrong_first_evaluations(
    trials: NamedTrials, benchmark: Benchmark, ruleset: str
) -> Iterator[str]:
    """Yield closed runs whose first evaluation is not where the round requires it."""
    wrong: list[str] = []
    for name, trial in trials:
        if trial.texts.get("submission_division") != "closed" or not trial.evaluations:
            continue
        expected = first_evaluation(benchmark.name, ruleset, trial.global_batch)
        samples = trial.evaluations[0][0]
        if expected is not None and samples != expected:
            wrong.append(f"{name} ({samples or 0:,} instead of {expected:,} samples)")
    if wrong:
        yield f"first evaluation not where {ruleset} requires it: {_first_five(wrong)}"


def _first_five(names: Iterable[str]) -> str:
    all_names = list(names)
    return ", ".join(all_names[:5]) + (
        f" and {len(all_names) - 5} more" if len(all_names) > 5 else ""
    )


NO_TELEMETRY = "no telemetry received"
_ENDING = re.compile(r"\.(txt|log|out)(\.gz)?$")


def energy_of(log: Path, trial: LoggedTrial) -> Energy | None:
    """Return a trial's energy from run_start to run_stop, None without telemetry.

    The telemetry file is `telemetry/<log without its extension>.jsonl` next to the log, or
    `-<host>.jsonl` for each of several hosts.
    """
    files = _files(log)
    start, stop = trial.times_ms.get("run_start"), trial.times_ms.get("run_stop")
    if not files or start is None or stop is None or stop <= start:
        return None
    telemetry = [read_telemetry(_text(path).splitlines()) for path in files]
    hosts = [host for host in telemetry if host is not None]
    # If one host's file is empty, the sum of the others would be too small.
    complete = hosts if len(hosts) == len(files) else []
    return energy_between(complete, start / 1000, stop / 1000)


def mean_energy_j(runs: Sequence[ScoredRun]) -> float | None:
    """Return the mean energy of the counted runs in joules.

    None unless each of them has its energy, for the same parts.
    """
    energies = [run.energy for run in runs if run.part == "counted"]
    joules = [energy.energy_j for energy in energies if energy and energy.energy_j is not None]
    parts = {tuple(sorted(energy.parts_j)) for energy in energies if energy}
    return fmean(joules) if joules and len(joules) == len(energies) and len(parts) == 1 else None


def copy_telemetry(run: Path, folder: Path, name: str, hosts: Iterable[str] = ()) -> None:
    """Copy the telemetry in a run's folder next to the log `name` of a series.

    For each of the run's `hosts` without telemetry a file records the gap, because the sum of the
    others is too small.
    """
    observed: set[str] = set()
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        target = folder / FOLDER / f"{name}-{path.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        telemetry = read_telemetry(_text(path).splitlines())
        observed |= {telemetry.start.host} if telemetry else set()
    for number, host in enumerate(sorted({*hosts} - observed)):
        why = {"gpu": NO_TELEMETRY, "cpu": NO_TELEMETRY}
        start = TelemetryStart(host=host, interval_s=0, sources={}, unknown=why)
        target = folder / FOLDER / f"{name}-missing-{number:05d}.jsonl"
        target.parent.mkdir(exist_ok=True)
        write_text(target, start.model_dump_json() + "\n")


def _files(log: Path) -> list[Path]:
    stem = _ENDING.sub("", log.name)
    paths = (log.parent / FOLDER).glob("*.jsonl")
    return sorted(path for path in paths if path.stem == stem or path.name.startswith(f"{stem}-"))


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""


SCALING_FILE = "scaling.json"
SAME_FACTOR = 1e-6
"""Relative tolerance at which two factors are equal apart from rounding."""


def scaling_file_warning(
    folder: Path, factor: float | None, mean_minutes: float | None
) -> str | None:
    """Return how the factor in the folder's file would change the score, None if it would not.

    `factor` is that of the convergence test, `mean_minutes` the olympic mean of the run times.
    """
    path = folder / SCALING_FILE
    if factor is None or mean_minutes is None or not path.is_file():
        return None
    try:
        file_factor = parse_json(read_text(path), nan=True)["scaling_factor"]
        file_factor = float(file_factor)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return f"{SCALING_FILE} has no valid scaling_factor; using {factor:.6f}"
    if not isfinite(file_factor) or file_factor <= 0:
        return f"{SCALING_FILE} has the invalid factor {file_factor:g}; using {factor:.6f}"
    if isclose(file_factor, factor, rel_tol=SAME_FACTOR):
        return None
    return (
        f"{SCALING_FILE} has the factor {file_factor:.6f}, but the convergence test gives "
        f"{factor:.6f}, which is used; with the file's factor the score would be "
        f"{mean_minutes * file_factor:.4f} minutes"
    )
