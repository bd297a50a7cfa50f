"""From an imported log's run folder to its result, the same as for a run that was started here."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePath

from paceline.compare.published import compare_with_references
from paceline.compare.single_run import single_run_verdict
from paceline.core.errors import UserError
from paceline.core.result import Result, Status
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.window import stretch_around
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import RunRecord, run_files
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import LogStatus
from paceline.logs.parser import Parsing, parse_log
from paceline.report.logs import disagreement_text

TOO_FEW = "fewer than 5 steady step lines"

RUN_STATUS: dict[LogStatus, Status] = {
    "ok": "ok",
    "nan": "nan",
    "oom": "oom",
    "truncated": "incomplete",
}
"""Logs of the other statuses tell of no run."""


def evaluate_log(folder: Path, record: RunRecord) -> RunReport:
    """The report of an imported run, read anew from its raw log.

    Raises UserError when the log is missing from the folder.
    """
    path = folder / (record.log or "")
    if not path.is_file():
        raise UserError(str(path), "is missing", remedy="import the log again")
    given = UserSettings(engine=record.known.engine, window=record.window, facts=record.known)
    parsing = parse_log(path, given)
    return RunReport(
        result=log_result(folder.name, record, parsing),
        steps=_attempt(parsing),
        spec=None,
        facts=record.known,
        command=shlex.join(record.command),
        job_script="",
        folder=str(folder),
        files=run_files(folder),
    )


def _attempt(parsing: Parsing) -> Steps:
    """The steps of the attempt that the window lies in; a report never mixes two."""
    if parsing.window is None or not len(parsing.steps):
        return parsing.steps
    return parsing.steps.select(stretch_around(parsing.steps, parsing.window.rows))


def log_result(name: str, record: RunRecord, parsing: Parsing) -> Result:
    """A parsed log as the Result of the run that wrote it."""
    log, facts = parsing.document, record.known
    status = RUN_STATUS.get(log.status, "failed")
    window = log.window
    trusted = window if window and window.judgeable else None
    comparisons = compare_with_references(facts, _references(facts), log.metrics)
    stated = parsing.log.facts
    return Result(
        run=name,
        recipe=facts.recipe or _title(record, stated),
        status=status,
        reason=log.reason,
        created=record.created,
        metrics=log.metrics,
        headline=facts.headline,
        window=window,
        conventions=log.conventions,
        verdict=single_run_verdict(status, log.reason or TOO_FEW, trusted, comparisons),
        references=comparisons,
        versions={"paceline": record.paceline_version, **_framework(facts, stated)},
        num_parameters=_whole(stated.get("num_parameters")),
        steps_done=log.n_steps,
        steps_asked=_whole(stated.get("total_steps")) or 0,
        warnings=(*map(disagreement_text, log.disagreements), *log.warnings),
    )


def _title(record: RunRecord, stated: dict[str, int | float | str]) -> str:
    """What a run of no recipe is called: the model's name in its log, else the log's own name."""
    return str(stated.get("model") or PurePath(record.log or record.name).name)


def _framework(facts: RunSettings, stated: dict[str, int | float | str]) -> dict[str, str]:
    version = stated.get("framework_version")
    return {facts.engine or "framework": str(version)} if version is not None else {}


def _references(facts: RunSettings) -> tuple[str, ...]:
    """What the recipe of an imported run is held against; nothing when it is no recipe of ours."""
    if facts.recipe is None:
        return ()
    try:
        return load_recipe(facts.recipe).references
    except UserError:
        return ()


def _whole(value: int | float | str | None) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 0 else None
