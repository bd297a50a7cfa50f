"""The logs of MLPerf runs in a folder: a submission's results, or what a launch script left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.engines.log_reading.mllog import MlRecord, records
from paceline.engines.log_reading.mlperf_system import System
from paceline.files.documents import parse_json, read_text
from paceline.files.log_file import UTF16_MARKS, LogFile
from paceline.mlperf.logged_trial import LoggedTrial, trials_of

RESULTS = re.compile(r"(?P<series>result)_(?P<number>\d{1,6})\.txt(\.gz)?")
"""A submission: one run a file."""
TRIALS = re.compile(r"(?P<series>.*)_(?P<number>\d{1,6})\.log(\.gz)?", re.DOTALL)
"""A launch script's folder: `<datestamp>_<i>.log`, one run a file; some may not have begun."""
OTHERS = re.compile(r".*\.(log|txt|out)(\.gz)?", re.DOTALL)
"""Any other name: one file may hold several runs."""
MOST_FILES = 1000

_RULESET = re.compile(rb"(?:--ruleset[ =]|MLPERF_RULESET=)[\"']?([1-9]\d?\.\d\.\d)\b")


@dataclass
class RunLog:
    """One file: its trials, and what is known of the machine."""

    path: Path
    trials: list[LoggedTrial] = field(default_factory=list[LoggedTrial])
    num_devices: int | None = None
    device: str | None = None
    ruleset: str | None = None
    """The rules that its launch script names, `6.0.0`."""
    doubt: str | None = None
    """Who says otherwise about the devices, in one sentence."""
    broken_off: str | None = None
    """Why the file could not be read to its end."""
    unreadable: str | None = None

    @property
    def number(self) -> int | None:
        """The run's number in a name that has one."""
        match = self._match()
        return int(match["number"]) if match else None

    @property
    def series(self) -> str | None:
        """What runs of one launch have before their number."""
        match = self._match()
        return match["series"] if match else None

    def _match(self) -> re.Match[str] | None:
        return RESULTS.fullmatch(self.path.name) or TRIALS.fullmatch(self.path.name)


def run_logs(place: Path) -> list[RunLog]:
    """The logs of all runs at `place`, a folder or one file, in the order of their numbers.

    Raises UserError when there is nothing, or nothing of MLPerf.
    """
    if not place.exists():
        raise UserError(str(place), "does not exist")
    if not place.is_dir():
        return [log for log in [read_log(place)] if _of_mlperf(log) or _complain(place)]
    for pattern in (RESULTS, TRIALS):
        logs = [read_log(path) for path in _files(place, pattern)]
        series = {log.series for log in logs if _of_mlperf(log)}
        if series:
            chosen = [log for log in logs if log.series in series]
            return sorted(chosen, key=lambda log: (log.number or 0, log.path.name))
    logs = [log for log in map(read_log, _files(place, OTHERS)) if _of_mlperf(log)]
    if not logs:
        _complain(place)
    return logs


def read_log(path: Path) -> RunLog:
    """One file's trials; whatever it holds, the answer is a RunLog."""
    log, file, system = RunLog(path), LogFile(path), System()
    if not path.is_file():
        log.unreadable = "it is no regular file"
        return log
    try:
        with path.open("rb") as opened:
            if opened.read(2) in UTF16_MARKS:
                log.unreadable = "it is UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`"
                return log
        log.trials = trials_of(_lines(file, system, log))
    except OSError as error:
        log.unreadable = error.strerror or str(error)
    log.broken_off = file.broken_off
    platforms = (trial.texts.get("submission_platform") for trial in log.trials)
    platform = next(filter(None, platforms), None)
    if devices := system.devices(platform, _description_of(path.parent)):
        log.num_devices, log.doubt = devices.num_devices, devices.doubt
    log.device = system.accelerator
    return log


def described_devices(place: Path) -> int | None:
    """Accelerators of the system by its description in a submission, None where there is none."""
    description = _description_of(place)
    try:
        nodes, devices = description["number_of_nodes"], description["accelerators_per_node"]
        return int(nodes) * int(devices) or None
    except (ValueError, TypeError, KeyError):
        return None


def described_accelerator(place: Path) -> str | None:
    """The accelerator's name by that description, None where there is none."""
    name = _description_of(place).get("accelerator_model_name")
    return name if isinstance(name, str) and name else None


def _description_of(place: Path) -> dict[str, Any]:
    """`<org>/systems/<system>.json` of `<org>/results/<system>/<benchmark>`, else nothing."""
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


def _of_mlperf(log: RunLog) -> bool:
    return any(trial.begun or trial.texts for trial in log.trials)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        paths = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except OSError as error:
        raise UserError(str(folder), f"cannot be read: {error.strerror}") from error
    if len(paths) > MOST_FILES:
        raise UserError(
            str(folder),
            f"holds {len(paths):,} logs, more than {MOST_FILES:,}",
            remedy="give the folder of one set of runs",
        )
    return paths


def _complain(place: Path) -> bool:
    """Raises UserError: no MLPerf log at `place`; folders below that have some are named."""
    below: list[str] = []
    if place.is_dir():
        folders = {path.parent for path in place.glob("*/result_*.txt*")}
        folders |= {path.parent for path in place.glob("*/*/result_*.txt*")}
        below = sorted(map(str, folders))
    remedy = f"give one of the folders below it: {', '.join(below[:5])}" if below else None
    raise UserError(
        str(place),
        "holds no log of an MLPerf run",
        allowed="result_*.txt, *_<number>.log or other .log, .txt and .out files with :::MLLOG "
        "lines, plain or .gz",
        remedy=remedy,
    )
