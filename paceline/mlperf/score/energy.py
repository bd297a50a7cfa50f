"""The energy of MLPerf runs, from the telemetry that lies beside their logs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from paceline.core.telemetry import (
    Energy,
    Telemetry,
    TelemetryStart,
    energy_between,
    read_telemetry,
)
from paceline.files.run_folder import write_text
from paceline.machines.probe.telemetry import FOLDER
from paceline.mlperf.score.score import ScoredRun
from paceline.mlperf.trial_log import Trial

NOTHING_CAME = "no telemetry came from it"
_ENDING = re.compile(r"\.(txt|log|out)(\.gz)?$")


def energy_of(log: Path, trial: Trial) -> Energy | None:
    """Energy from run_start to run_stop of a trial, None where no telemetry lies beside its log.

    `telemetry/<log without its ending>.jsonl`, or `-<host>.jsonl` for each of several hosts.
    """
    files = _files(log)
    start, stop = trial.times_ms.get("run_start"), trial.times_ms.get("run_stop")
    if not files or start is None or stop is None or stop <= start:
        return None
    read = [read_telemetry(_text(path).splitlines()) for path in files]
    hosts = [host for host in read if host is not None]
    return energy_between(_whole(hosts, len(files)), start / 1000, stop / 1000)


def mean_energy_j(runs: Sequence[ScoredRun]) -> float | None:
    """Mean of the counted runs, None unless each of them has its energy, of the same parts."""
    counted = [run.energy for run in runs if run.part == "counted"]
    known = [one for one in counted if one is not None and one.energy_j is not None]
    alike = len({tuple(sorted(one.parts_j)) for one in known}) == 1
    return (
        fmean(one.energy_j or 0.0 for one in known)
        if known and alike and len(known) == len(counted)
        else None
    )


def copied_telemetry(run: Path, folder: Path, name: str, hosts: Iterable[str] = ()) -> None:
    """Puts the telemetry of a run's folder beside the log `name` of a series.

    Of those of the run's `hosts` that left none, a file says so: the sum of the others is too small.
    """
    found: set[str] = set()
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        target = folder / FOLDER / f"{name}-{path.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        told = read_telemetry(_text(path).splitlines())
        found |= {told.start.host} if told else set()
    for number, host in enumerate(sorted({*hosts} - found)):
        why = {"gpu": NOTHING_CAME, "cpu": NOTHING_CAME}
        start = TelemetryStart(host=host, interval_s=0, sources={}, unknown=why)
        target = folder / FOLDER / f"{name}-missing-{number:05d}.jsonl"
        target.parent.mkdir(exist_ok=True)
        write_text(target, start.model_dump_json() + "\n")


def _files(log: Path) -> list[Path]:
    stem = _ENDING.sub("", log.name)
    found = (log.parent / FOLDER).glob("*.jsonl")
    return sorted(path for path in found if path.stem == stem or path.name.startswith(f"{stem}-"))


def _whole(hosts: list[Telemetry], num_files: int) -> list[Telemetry]:
    """None at all where a host's file says nothing: a sum without it would be too small."""
    return hosts if len(hosts) == num_files else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
