"""The energy of MLPerf runs, from the telemetry that lies beside their logs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from paceline.core.telemetry import (
    Energy,
    TelemetryStart,
    energy_between,
    read_telemetry,
)
from paceline.files.documents import write_text
from paceline.machines.probe.telemetry import FOLDER
from paceline.mlperf.logged_trial import LoggedTrial
from paceline.mlperf.score.score import ScoredRun

NOTHING_CAME = "no telemetry came from it"
_ENDING = re.compile(r"\.(txt|log|out)(\.gz)?$")


def energy_of(log: Path, trial: LoggedTrial) -> Energy | None:
    """Energy from run_start to run_stop of a trial, None where no telemetry lies beside its log.

    `telemetry/<log without its ending>.jsonl`, or `-<host>.jsonl` for each of several hosts.
    """
    files = _files(log)
    start, stop = trial.times_ms.get("run_start"), trial.times_ms.get("run_stop")
    if not files or start is None or stop is None or stop <= start:
        return None
    read = [read_telemetry(_text(path).splitlines()) for path in files]
    hosts = [host for host in read if host is not None]
    # Where a host's file says nothing, a sum of the others would be too small.
    whole = hosts if len(hosts) == len(files) else []
    return energy_between(whole, start / 1000, stop / 1000)


def mean_energy_j(runs: Sequence[ScoredRun]) -> float | None:
    """Mean of the counted runs, None unless each of them has its energy, of the same parts."""
    counted = [run.energy for run in runs if run.part == "counted"]
    joules = [energy.energy_j for energy in counted if energy and energy.energy_j is not None]
    parts = {tuple(sorted(energy.parts_j)) for energy in counted if energy}
    return fmean(joules) if joules and len(joules) == len(counted) and len(parts) == 1 else None


def copy_telemetry(run: Path, folder: Path, name: str, hosts: Iterable[str] = ()) -> None:
    """Copy the telemetry of a run's folder beside the log `name` of a series.

    Of those of the run's `hosts` that left none, a file says so: the sum of the others is too
    small.
    """
    seen: set[str] = set()
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        target = folder / FOLDER / f"{name}-{path.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        telemetry = read_telemetry(_text(path).splitlines())
        seen |= {telemetry.start.host} if telemetry else set()
    for number, host in enumerate(sorted({*hosts} - seen)):
        why = {"gpu": NOTHING_CAME, "cpu": NOTHING_CAME}
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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
