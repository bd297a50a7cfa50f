"""Inputs of a comparison: stored runs, logs, folders, archives, step times and result files.

Nothing is stored: a log becomes the same run as after `paceline runs import`, in memory.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.compare.over_time.environment import environment_items
from paceline.compare.sides import ComparedRun, ComparisonSide
from paceline.core.errors import UserError, did_you_mean
from paceline.core.problem import invalid_input
from paceline.core.result import Result
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.stats import printed_step_s
from paceline.core.steps import FLOATS
from paceline.core.text import as_text
from paceline.core.units import pluralize
from paceline.files.archive import is_archive, unpack
from paceline.files.csv_table import csv_lines
from paceline.files.documents import parse_json, read_text
from paceline.files.run_folder import (
    RUN_FILE,
    find_runs,
    is_stored_name,
    read_record,
    run_folders,
)
from paceline.files.temporary import temporary_folder
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import log_files, parse_log
from paceline.report.run_description import window_mask
from paceline.runs.bundles.verification import is_bundle, open_bundle, refuse_damage
from paceline.runs.log_import import file_digest, log_record, parse_run
from paceline.runs.logged_run import RUN_STATUS, report_of_log
from paceline.runs.outcome import evaluate

NO_SETTINGS = UserSettings()
TIME_COLUMNS = {"step_time_s": 1.0, "step_time_ms": 1e-3, "time_s": 1.0, "time_ms": 1e-3}
"""Columns of a CSV file that hold step times, with the unit in seconds."""

_RANK = re.compile(r"rank[-_.]?\d+|(?<=/)\d+(?=/std(?:out|err)\b)", re.IGNORECASE)
"""Number of a rank in the path of its log; the second form is torchrun's."""


def find_side(root: Path, name: str, settings: UserSettings = NO_SETTINGS) -> ComparisonSide:
    """Return the runs that one argument of a comparison names, or a comma-separated list.

    Each part is a log or a folder of logs, an archive, a CSV file with step times, a result file, a
    pattern of file names, or a stored run by name, group or tag. `settings` add to what logs state.
    Raises UserError when a part names no run.
    """
    # Path.is_file raises if a list of runs is longer than the limit for file names.
    is_path = os.path.exists(name)  # noqa: PTH110
    parts = [name] if is_path else [part.strip() for part in name.split(",") if part.strip()]
    members = [member for part in parts or [name] for member in _runs(root, part, settings)]
    if not members:
        raise UserError(f"side {name!r}", "matches no run")
    unique = tuple({member.identity: member for member in members}.values())
    # File names that are not valid UTF-8 cannot be printed.
    is_stored = len(unique) == 1 and bool(unique[0].place)
    return ComparisonSide(unique[0].name if is_stored else as_text(name), unique)


def _runs(root: Path, part: str, settings: UserSettings) -> Iterable[ComparedRun]:
    path = Path(part)
    if os.path.isfile(path / RUN_FILE):  # noqa: PTH113
        return [_stored_run(path.resolve())]
    if os.path.isfile(path):  # noqa: PTH113
        return _runs_of_file(path, settings)
    if os.path.isdir(path) and part.strip() and not is_stored_name(root, part):  # noqa: PTH112
        return _runs_in_folder(path, settings)
    if files := sorted(glob.glob(part)) if glob.has_magic(part) else []:  # noqa: PTH207
        return [member for file in files for member in _runs(root, file, settings)]
    try:
        folders = find_runs(root, part)
    except UserError as error:
        if error.allowed or (root.exists() and not root.is_dir()):
            raise
        siblings = path.parent if path.parent.is_dir() else Path()
        close = did_you_mean(path.name, (file.name for file in siblings.iterdir()))
        raise UserError(
            f"run {part!r}",
            f"is not in {root}, and it is not a file or folder either",
            remedy=close
            or "give a training log, a folder of logs, or a run of `paceline runs list`",
        ) from error
    return map(_stored_run, folders)


def _stored_run(folder: Path) -> ComparedRun:
    return member_of_run(evaluate(folder), read_record(folder).log_sha256 or "")


def _runs_of_file(path: Path, settings: UserSettings) -> Iterable[ComparedRun]:
    if path.name.endswith(".json"):
        return _runs_of_result(path)
    if path.suffix == ".csv":
        return _runs_of_csv(path, settings)
    if not is_archive(path):
        return [_run_of_log(path, settings)]
    return _bundled_run(path) if is_bundle(path) else _archived_runs(path, settings)


def report_of_file(path: Path, settings: UserSettings, display_name: str = "") -> RunReport:
    """Return the run that `paceline runs import` would store; raise UserError if there is none."""
    display_name = display_name or as_text(str(path))
    parsing = parse_run(path, settings, display_path=Path(display_name))
    digest = file_digest(path)
    record = log_record(display_name, parsing.document, path.name, digest, settings)
    return report_of_log(display_name, record, parsing)


def _run_of_log(path: Path, settings: UserSettings, display_name: str = "") -> ComparedRun:
    return member_of_run(report_of_file(path, settings, display_name), file_digest(path))


def _runs_in_folder(folder: Path, settings: UserSettings) -> list[ComparedRun]:
    """Return the stored runs in a folder, or a run per training log; other files are ignored."""
    if run_paths := run_folders(folder):
        return [_stored_run(path) for path in run_paths]
    return _runs_of_logs(folder, settings, as_text(str(folder)))


def _runs_of_logs(folder: Path, settings: UserSettings, title: str) -> list[ComparedRun]:
    """Return a run per training log below a folder; logs of ranks of one run count once."""
    by_run: dict[str, ComparedRun] = {}
    files = log_files([folder])
    for file in files:
        inner = as_text(file.relative_to(folder).as_posix())
        run = _RANK.sub("rank", f"/{inner}")
        document = parse_log(file, settings, one_of_many=True).document
        if run not in by_run and document.status in RUN_STATUS:
            by_run[run] = _run_of_log(file, settings, f"{title}/{inner}")
    if not by_run:
        raise UserError(
            title,
            f"contains no training log among {pluralize(len(files), 'file')}",
            remedy="`paceline parse` shows what each file contains",
        )
    return list(by_run.values())


def _archived_runs(path: Path, settings: UserSettings) -> list[ComparedRun]:
    with temporary_folder() as name:
        unpack(path, Path(name), skip_links=True)
        return _runs_of_logs(Path(name), settings, as_text(str(path)))


def _bundled_run(path: Path) -> list[ComparedRun]:
    with open_bundle(path) as contents:
        refuse_damage(contents, path)
        run = member_of_run(evaluate(contents.folder), contents.bundle.sha256)
    # The folder is gone now, and so is its history.
    return [replace(run, place="")]


def _runs_of_csv(path: Path, settings: UserSettings) -> list[ComparedRun]:
    """Return the runs of a CSV file with a step per line: a run per value of the column `file`.

    The steps are read as those of a run folder. Raises UserError without a column of step times.
    """
    return [_run_of_steps(path, name, lines, settings) for name, lines in _csv_runs(path).items()]


def _run_of_steps(
    path: Path, name: str, lines: Iterable[str], settings: UserSettings
) -> ComparedRun:
    with temporary_folder() as folder:
        steps = Path(folder) / "steps.jsonl"
        steps.write_text("".join(lines), encoding="utf-8")
        return _run_of_log(steps, settings, f"{as_text(str(path))}{name and ':'}{name}")


def _csv_runs(path: Path) -> dict[str, list[str]]:
    """Return the steps of each run as lines of steps.jsonl."""
    lines = csv_lines(path)
    _, header = next(lines, (0, []))
    times = [name for name in header if name in TIME_COLUMNS]
    if len(times) != 1:
        raise UserError(
            str(path),
            f"has {pluralize(len(times), 'column')} with step times",
            allowed=", ".join(TIME_COLUMNS),
            remedy="rename one column of the first line",
        )
    runs: dict[str, list[str]] = {}
    for number, (line, cells) in enumerate(lines, 1):
        row = dict(zip(header, cells, strict=False))
        # The reader of step lines expects the number first.
        values: dict[str, float] = {
            "step": int(_csv_number(path, line, "step", row.get("step") or str(number)))
        }
        values |= {
            "step_time_s" if name in times else name: _csv_number(path, line, name, text)
            for name, text in row.items()
            if text and (name in times or name in FLOATS)
        }
        runs.setdefault(row.get("file", ""), []).append(json.dumps(values) + "\n")
    return runs


def _csv_number(path: Path, line: int, name: str, text: str) -> float:
    try:
        return float(text) * TIME_COLUMNS.get(name, 1.0)
    except ValueError as error:
        raise UserError(f"{path}:{line}", f"{name}: {text!r} is not a number") from error


def member_of_run(report: RunReport, digest: str = "") -> ComparedRun:
    """Return the settings and metrics of a run that a comparison needs; see ComparedRun.digest."""
    result = report.result
    times = report.steps["step_time_s"][window_mask(report)]
    is_local = report.spec is not None and report.spec.cluster.runs_here
    controller = report.inventory.get("host") if is_local else None
    return ComparedRun(
        name=result.run,
        place=report.folder,
        digest=digest,
        status=result.status,
        facts=_settled_facts(report.facts, result),
        metrics=result.metrics,
        reason=result.reason,
        window=result.window,
        printed_step_s=printed_step_s(times),
        created=result.created,
        environment=environment_items(report.inventory, result.versions, fabric=result.fabric),
        hosts=_hosts(result) or ((str(controller),) if controller else ()),
    )


def _hosts(result: Result) -> tuple[str, ...]:
    return tuple(sorted({rank.host for rank in result.ranks if rank.host}))


def _settled_facts(facts: RunSettings, result: Result | ParsedLog) -> RunSettings:
    """Return the settings with the window's batch and sequence length, which a ramp-up varies."""
    window = result.window
    if window is None:
        return facts
    batch, seq_len = window.global_batch, window.seq_len
    return facts.model_copy(
        update={"global_batch": batch or facts.global_batch, "seq_len": seq_len or facts.seq_len}
    )


def _runs_of_result(path: Path) -> list[ComparedRun]:
    """Return the runs of a JSON file: a result.json, or the output of `paceline parse --json`."""
    if path.name == "result.json" and (path.parent / RUN_FILE).is_file():
        return [_stored_run(path.parent)]
    try:
        document = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(path), f"cannot be read as JSON: {error}") from error
    entries: list[Any] = document if isinstance(document, list) else [document]
    try:
        return [_run_of_entry(entry) for entry in entries]
    except ValidationError as error:
        raise UserError(
            str(path),
            f"is not a run's result: {invalid_input(str(path), error).what}",
            allowed="result.json, or the output of `paceline parse --json`",
        ) from error


def _run_of_entry(entry: Any) -> ComparedRun:
    if isinstance(entry, dict) and "file" in entry:
        log = ParsedLog.model_validate(entry)
        status = RUN_STATUS.get(log.status, "failed")
        facts = _settled_facts(log.settings, log)
        return ComparedRun(
            log.file,
            status,
            facts,
            log.metrics,
            log.reason or log.status,
            log.window,
            created=log.date,
        )
    result = Result.model_validate(entry)
    facts = _settled_facts(RunSettings(origin="imported"), result)
    return ComparedRun(
        result.run,
        result.status,
        facts,
        result.metrics,
        result.reason,
        result.window,
        created=result.created,
        environment=environment_items({}, result.versions, fabric=result.fabric),
        hosts=_hosts(result),
    )
