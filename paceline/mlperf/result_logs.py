"""Find the logs of MLPerf runs in a folder and read the trials from their result lines.

A trial lasts from the start of its initialization to run_stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeGuard

from paceline.core.errors import UserError
from paceline.engines.log_reading.mllog import MlRecord, records
from paceline.engines.log_reading.mlperf_system import System
from paceline.files.documents import open_regular, parse_json, read_text
from paceline.files.log_file import UTF16_MARKS, LogFile
from paceline.mlperf.rules import Benchmark

MARKERS = ("init_start", "init_stop", "run_start", "run_stop")
TEXTS = ("submission_benchmark", "submission_org", "submission_platform", "submission_division")
PROGRESS = frozenset(
    f"{part}_{event}" for part in ("block", "epoch", "eval") for event in ("start", "stop")
) | {"eval_accuracy"}
"""Lines about the training, which lie between run_start and run_stop."""
CLOCK_MS = 1000.0
"""Difference that the clocks of ranks may have; published logs differ by less than 1 ms."""
PLACEHOLDER = "PLACEHOLDER"
MAX_COUNT = 1e15
"""Upper bound of counts and rates in a plausible line."""
MIN_STATISTIC = 1e-9
"""Lower bound of step times in s and rates: a batch divided by a smaller time may be infinite."""


@dataclass
class LoggedTrial:
    """One trial as its log lines report it; lines repeated by every rank count once."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    times_ms: dict[str, float] = field(default_factory=dict[str, float])
    spreads_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Difference between the repeated lines of a marker."""
    progress_ms: list[float] = field(default_factory=list[float])
    """Times of the first and the last of the lines about the training, before run_stop."""
    global_batch: int | None = None
    seeds: list[int] = field(default_factory=list[int])
    stop_status: str | None = None
    evaluations: list[tuple[int | None, float]] = field(
        default_factory=list[tuple[int | None, float]]
    )
    """Samples so far and the result of each evaluation before run_stop."""
    rates: list[float] = field(default_factory=list[float])
    """Samples/s from the lines that report them."""
    step_times_s: list[float] = field(default_factory=list[float])
    """Times of single steps, from lines that also report a training loss."""
    block_times_s: list[float] = field(default_factory=list[float])
    """Mean step times between two evaluations; the first may include start-up time."""
    num_incomplete_lines: int = 0
    """Number of result lines without a complete record."""

    @property
    def benchmark(self) -> str | None:
        return self.texts.get("submission_benchmark")

    @property
    def has_started(self) -> bool:
        """Return whether the trial reached its initialization."""
        return "init_start" in self.times_ms or "run_start" in self.times_ms

    @property
    def has_stopped(self) -> bool:
        return "run_stop" in self.times_ms

    @property
    def minutes(self) -> float | None:
        """Run time in minutes, run_stop - run_start; None unless both are logged in this order."""
        return self._minutes("run_start", "run_stop")

    @property
    def initialization_minutes(self) -> float | None:
        """Initialization time in minutes, init_stop - init_start; not part of the run time."""
        return self._minutes("init_start", "init_stop")

    @property
    def samples_to_target(self) -> int | None:
        """Samples at the last evaluation before run_stop; None if that evaluation reports none."""
        return self.evaluations[-1][0] if self.evaluations else None

    @property
    def median_samples_per_s(self) -> float | None:
        """Median samples/s of the run.

        It is the median of the logged rates. Without them it is the global batch / median step
        time. Without step times it is the global batch / median of the mean step times between
        evaluations.
        """
        if self.rates:
            return median(self.rates)
        if (times := self.step_times_s or self.block_times_s) and self.global_batch:
            return self.global_batch / median(times)
        return None

    def fault(self, benchmark: Benchmark) -> tuple[Literal["failed", "aborted"], str] | None:
        """Return the status and reason of a run that did not converge, or None if it did."""
        if "run_start" not in self.times_ms:
            return "aborted", "no run_start line"
        if not self.has_stopped:
            return "aborted", "no run_stop line"
        if self.minutes is None:
            return "failed", "run_stop is not later than run_start"
        if contradiction := self._contradiction():
            return "failed", contradiction
        if self.stop_status != "success":
            status = f"status {self.stop_status}" if self.stop_status else "no status"
            return "failed", f"run_stop reports {status}"
        if not self.evaluations:
            return "failed", "run_stop reports success, but no evaluation precedes it"
        best = benchmark.best(result for _, result in self.evaluations)
        if not any(benchmark.reached_by(result) for _, result in self.evaluations):
            return "failed", (
                f"run_stop reports success, but the best evaluation is {best:.6g} "
                f"and the target is {benchmark.target:g}"
            )
        if self.samples_to_target is None:
            return "failed", "the last evaluation reports no samples_count"
        return None

    def _contradiction(self) -> str | None:
        """Return how the run time contradicts the times of the other lines; None if they agree.

        A later run_start or an earlier run_stop would shorten the run.
        """
        for marker in ("run_start", "run_stop"):
            if (spread_ms := self.spreads_ms[marker]) > CLOCK_MS:
                return f"the lines of {marker} are {spread_ms / 1000:,.0f} s apart"
        start, stop = self.times_ms["run_start"], self.times_ms["run_stop"]
        early = self.times_ms.get("init_start", start) - start
        if early > CLOCK_MS:
            return f"run_start is {early / 1000:,.0f} s earlier than init_start"
        if not self.progress_ms:
            return None
        late, early = start - self.progress_ms[0], self.progress_ms[1] - stop
        if late > CLOCK_MS:
            return f"run_start is {late / 1000:,.0f} s later than the first block or evaluation"
        if early > CLOCK_MS:
            return f"run_stop is {early / 1000:,.0f} s earlier than the last block or evaluation"
        return None

    def _minutes(self, first: str, last: str) -> float | None:
        if first not in self.times_ms or last not in self.times_ms:
            return None
        elapsed_ms = self.times_ms[last] - self.times_ms[first]
        return elapsed_ms / 60_000 if elapsed_ms > 0 else None


def trials_of(lines: Iterable[MlRecord | None]) -> list[LoggedTrial]:
    """Return the trials in one file, in file order; None stands for an incomplete result line.

    A file without any result line gives one empty trial: a run that logged nothing.
    """
    trials = [LoggedTrial()]
    for line in lines:
        if line is None:
            trials[-1].num_incomplete_lines += 1
            continue
        if _starts_new_trial(trials[-1], line):
            # Launch scripts may state benchmark and batch once, before the first trial.
            trials.append(
                LoggedTrial(texts=dict(trials[-1].texts), global_batch=trials[-1].global_batch)
            )
        _add_line(trials[-1], line)
    return [trial for trial in trials if trial.has_started] or trials[:1]


def _starts_new_trial(trial: LoggedTrial, line: MlRecord) -> bool:
    """Return whether a line starts a new trial, and is not another rank's repeat of a start."""
    if line.key not in ("init_start", "run_start"):
        return False
    started_ms = trial.times_ms.get("run_start")
    late = line.key == "init_start" and started_ms is not None and line.time_ms > started_ms
    return trial.has_stopped or bool(trial.evaluations) or late


def _add_line(trial: LoggedTrial, line: MlRecord) -> None:
    if line.key in MARKERS:
        if isfinite(line.time_ms):
            first_ms = trial.times_ms.setdefault(line.key, line.time_ms)
            spread_ms = abs(line.time_ms - first_ms)
            if line.key == "run_stop" and line.key not in trial.spreads_ms:
                status = line.metadata.get("status")
                trial.stop_status = str(status)[:40] if status is not None else None
            trial.spreads_ms[line.key] = max(trial.spreads_ms.get(line.key, 0.0), spread_ms)
    elif line.key in TEXTS:
        if isinstance(line.value, str) and line.value:
            trial.texts[line.key] = line.value[:200]
    elif line.key == "seed":
        if _is_number(line.value) and float(line.value).is_integer():
            trial.seeds.append(int(line.value))
    elif not trial.has_stopped:
        _add_progress(trial, line)


def _add_progress(trial: LoggedTrial, line: MlRecord) -> None:
    if line.key in PROGRESS and isfinite(line.time_ms):
        times_ms = *trial.progress_ms, line.time_ms
        trial.progress_ms = [min(times_ms), max(times_ms)]
    if line.key == "global_batch_size":
        trial.global_batch = positive_int(line.value) or trial.global_batch
    elif line.key == "eval_accuracy":
        if _is_number(line.value):
            trial.evaluations.append(
                (positive_int(line.metadata.get("samples_count")), float(line.value))
            )
    elif line.key == "tracked_stats" and isinstance(line.value, Mapping):
        is_single_step = "reduced_train_loss" in line.value
        times = trial.step_times_s if is_single_step else trial.block_times_s
        for name, series in (("throughput", trial.rates), ("train_step_time", times)):
            figure = line.value.get(name)
            if _is_number(figure) and MIN_STATISTIC <= figure < MAX_COUNT:
                series.append(float(figure))


def positive_int(value: object) -> int | None:
    """Return a positive whole number (36 or 36.0) as int, and None for anything else."""
    if _is_number(value) and 0 < value < MAX_COUNT and float(value).is_integer():
        return int(value)
    return None


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number in float range; infinity and booleans are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 1e300


RESULT_FILES = re.compile(r"(?P<series>result)_(?P<number>\d{1,6})\.txt(\.gz)?")
"""File names in a submission: one run per file."""
LAUNCHER_LOGS = re.compile(r"(?P<series>.*)_(?P<number>\d{1,6})\.log(\.gz)?", re.DOTALL)
"""File names from a launch script, `<datestamp>_<i>.log`: one run per file.

Some of these runs may never have started.
"""
OTHER_LOGS = re.compile(r".*\.(log|txt|out)(\.gz)?", re.DOTALL)
"""Any other log name; one file may hold several runs."""
MAX_FILES = 1000

_RULESET = re.compile(rb"(?:--ruleset[ =]|MLPERF_RULESET=)[\"']?([1-9]\d?\.\d\.\d)\b")


@dataclass
class RunLog:
    """One log file: its trials, and what it reports about the machine."""

    path: Path
    trials: list[LoggedTrial] = field(default_factory=list[LoggedTrial])
    num_devices: int | None = None
    device: str | None = None
    ruleset: str | None = None
    """MLPerf ruleset that its launch script reports, such as `6.0.0`."""
    devices_warning: str | None = None
    """Conflicting evidence about the number of devices, in one sentence."""
    read_error: str | None = None
    """Reason why the file could not be read to its end."""
    unreadable: str | None = None

    @property
    def number(self) -> int | None:
        """Number of the run, if its file name has one."""
        match = self._match()
        return int(match["number"]) if match else None

    @property
    def series(self) -> str | None:
        """Prefix before the run number, shared by the runs of one launch."""
        match = self._match()
        return match["series"] if match else None

    def _match(self) -> re.Match[str] | None:
        return RESULT_FILES.fullmatch(self.path.name) or LAUNCHER_LOGS.fullmatch(self.path.name)


def run_logs(place: Path) -> list[RunLog]:
    """Return the logs of all runs at `place`, a folder or one file, ordered by run number.

    Raises UserError when there is no log, or no MLPerf log.
    """
    if not place.exists():
        raise UserError(str(place), "does not exist")
    if not place.is_dir():
        return [log for log in [read_log(place)] if _is_mlperf_log(log) or _raise_no_logs(place)]
    for pattern in (RESULT_FILES, LAUNCHER_LOGS):
        logs = [read_log(path) for path in _files(place, pattern)]
        series = {log.series for log in logs if _is_mlperf_log(log)}
        if series:
            selection = [log for log in logs if log.series in series]
            return sorted(selection, key=lambda log: (log.number or 0, log.path.name))
    logs = [log for log in map(read_log, _files(place, OTHER_LOGS)) if _is_mlperf_log(log)]
    if not logs:
        _raise_no_logs(place)
    return logs


def read_log(path: Path) -> RunLog:
    """Return the trials of one file; a file that cannot be read also gives a RunLog."""
    log, file, system = RunLog(path), LogFile(path), System()
    if not path.is_file():
        log.unreadable = "not a regular file"
        return log
    try:
        with open_regular(path) as stream:
            if stream.read(2) in UTF16_MARKS:
                log.unreadable = "UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`"
                return log
        log.trials = trials_of(_lines(file, system, log))
    except OSError as error:
        log.unreadable = error.strerror or str(error)
    log.read_error = file.read_error
    platforms = (trial.texts.get("submission_platform") for trial in log.trials)
    platform = next(filter(None, platforms), None)
    if devices := system.devices(platform, _system_description(path.parent)):
        log.num_devices, log.devices_warning = devices.num_devices, devices.doubt
    log.device = system.accelerator
    return log


def described_devices(place: Path) -> int | None:
    """Return the number of accelerators in a submission's system description, None without one."""
    description = _system_description(place)
    try:
        nodes, devices = description["number_of_nodes"], description["accelerators_per_node"]
        return int(nodes) * int(devices) or None
    except (ValueError, TypeError, KeyError):
        return None


def described_accelerator(place: Path) -> str | None:
    """Return the accelerator's name from the system description, None without one."""
    name = _system_description(place).get("accelerator_model_name")
    return name if isinstance(name, str) and name else None


def _system_description(place: Path) -> dict[str, Any]:
    """Return `<org>/systems/<system>.json` of `<org>/results/<system>/<benchmark>`, else {}."""
    folder = place.resolve()
    if len(folder.parents) < 3:
        return {}
    path = folder.parents[2] / "systems" / f"{folder.parent.name}.json"
    try:
        description = parse_json(read_text(path))
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) else {}


def _lines(file: LogFile, system: System, log: RunLog) -> Iterator[MlRecord | None]:
    for block in file:
        system.read(block)
        if log.ruleset is None and (match := _RULESET.search(block)):
            log.ruleset = match[1].decode("ascii")
        yield from records([block])


def _is_mlperf_log(log: RunLog) -> bool:
    return any(trial.has_started or trial.texts for trial in log.trials)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        paths = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except OSError as error:
        raise UserError(str(folder), f"cannot be read: {error.strerror}") from error
    if len(paths) > MAX_FILES:
        raise UserError(
            str(folder),
            f"contains {len(paths):,} logs, more than {MAX_FILES:,}",
            remedy="give the folder of one set of runs",
        )
    return paths


def _raise_no_logs(place: Path) -> bool:
    """Raise UserError for a place without MLPerf logs; suggest subfolders that have some."""
    below: list[str] = []
    if place.is_dir():
        folders = {path.parent for path in place.glob("*/result_*.txt*")}
        folders |= {path.parent for path in place.glob("*/*/result_*.txt*")}
        below = sorted(map(str, folders))
    remedy = f"give one of its subfolders: {', '.join(below[:5])}" if below else None
    raise UserError(
        str(place),
        "contains no log of an MLPerf run",
        allowed="result_*.txt, *_<number>.log or other .log, .txt and .out files with :::MLLOG "
        "lines, plain or .gz",
        remedy=remedy,
    )
