"""Evaluation of a run of another program from its log: its steps and how it ended.

Event lines that its ranks write (`paceline.steplog`) take precedence over the log.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np

from paceline.compare.judge import single_run_verdict
from paceline.compare.published import compare_with_references
from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS
from paceline.core.result import Result, Status
from paceline.core.run import RunSettings, RunSpec
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.text import shorten
from paceline.core.units import all_steps_done, pluralize
from paceline.core.window import stretch_around
from paceline.engines import ends_at_target, last_step, log_formats
from paceline.engines.log_reading.records import out_of_memory_line
from paceline.files.documents import read_json
from paceline.files.log_file import LogFile
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import (
    INVENTORY_FILE,
    LOGS_FOLDER,
    SCRIPT_FILE,
    STEPS_FOLDER,
    RunRecord,
    run_files,
)
from paceline.logs.completion import NO_END_MARKER
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import LogStatus
from paceline.logs.parser import Parsing, detect, parse_log
from paceline.machines import JobEnd
from paceline.machines.slurm.foreign import submitted_logs
from paceline.report.logs import disagreement_text
from paceline.runs.ending import (
    MAX_ERROR,
    TAIL_BYTES,
    EndEvidence,
    Ending,
    file_text,
    find_ending,
    last_error,
    launcher_exits,
    log_tail,
    read_evidence,
    read_ranks,
)

TOO_FEW = "fewer than 5 steady step lines"

RUN_STATUS: dict[LogStatus, Status] = {
    "ok": "ok",
    "nan": "nan",
    "oom": "oom",
    "truncated": "incomplete",
}
"""Run status for each log status; logs with other statuses have no run."""


def evaluate_log(folder: Path, record: RunRecord) -> RunReport:
    """Return the report of an imported run, read again from its raw log.

    Raises UserError when the log is missing from the folder.
    """
    path = folder / (record.log or "")
    if not path.is_file():
        raise UserError(str(path), "is missing", remedy="import the log again")
    if path.resolve() != folder.resolve() / (record.log or ""):
        raise UserError(str(path), "is not in the run folder", remedy="import the log again")
    user_settings = UserSettings(
        engine=record.settings.engine, window=record.window, facts=record.settings
    )
    report = report_of_log(folder.name, record, parse_log(path, user_settings))
    return replace(report, folder=str(folder), files=run_files(folder))


def report_of_log(name: str, record: RunRecord, parsing: Parsing) -> RunReport:
    """Return the report of the run that wrote a parsed log, without a folder."""
    return RunReport(
        result=log_result(name, record, parsing),
        steps=_attempt(parsing),
        spec=None,
        facts=record.settings,
        command=shlex.join(record.command),
        job_script="",
    )


def _attempt(parsing: Parsing) -> Steps:
    """Return the steps of the attempt that contains the window; a report never mixes two."""
    if parsing.window is None or not len(parsing.steps):
        return parsing.steps
    return parsing.steps.select(stretch_around(parsing.steps, parsing.window.rows))


def log_result(name: str, record: RunRecord, parsing: Parsing) -> Result:
    """Return the result of the run that wrote a parsed log."""
    log, facts = parsing.document, record.settings
    status = RUN_STATUS.get(log.status, "failed")
    window = log.window
    steady = window if window and window.supports_verdict else None
    comparisons = compare_with_references(facts, _references(facts), log.metrics)
    log_settings = parsing.log.facts
    return Result(
        run=name,
        recipe=facts.recipe or _title(record, log_settings),
        status=status,
        reason=log.reason,
        created=log.date if facts.origin == "imported" else record.created,
        metrics=log.metrics,
        headline=facts.headline,
        window=window,
        conventions=log.conventions,
        verdict=single_run_verdict(status, log.reason or TOO_FEW, steady, comparisons),
        references=comparisons,
        versions={"paceline": record.paceline_version, **_framework(facts, log_settings)},
        num_parameters=_as_count(log_settings.get("num_parameters")),
        steps_done=log.n_steps,
        steps_requested=_as_count(log_settings.get("total_steps")) or 0,
        warnings=(*map(disagreement_text, log.disagreements), *log.warnings),
    )


def _title(record: RunRecord, log_settings: dict[str, int | float | str]) -> str:
    """Return the name of a run without a recipe: the model's name in its log, or the log's name."""
    return str(log_settings.get("model") or PurePath(record.log or record.name).name)


def _framework(facts: RunSettings, log_settings: dict[str, int | float | str]) -> dict[str, str]:
    version = log_settings.get("framework_version")
    return {facts.engine or "framework": str(version)} if version is not None else {}


def _references(facts: RunSettings) -> tuple[str, ...]:
    """Return the references of an imported run's recipe; empty if the recipe is unknown."""
    if facts.recipe is None:
        return ()
    try:
        return load_recipe(facts.recipe).references
    except UserError:
        return ()


def _as_count(value: int | float | str | None) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 0 else None


NATIVE = "native"
FAILED_STATUSES = ("oom", "nan", "truncated")
LAST_BYTES = 1 << 16
"""Bytes at the end of a rank's log that are searched for its error."""
NO_STEPS = (
    "no log of the run has a step line of a known log format, and no rank wrote event lines; "
    "`paceline.steplog` records the steps of any training loop"
)
MAX_LOGS = 64
"""Maximum number of rank logs to search: the first ones and the last, where frameworks print."""
LAYOUT_SETTINGS = (*AXIS_FIELDS, "zero_stage")
SETTINGS = ("global_batch", "seq_len", "num_devices", *LAYOUT_SETTINGS)
"""Settings that a log may report differently from the request."""


@dataclass(frozen=True)
class _LogEnd:
    """Outcome of a run according to its log."""

    status: LogStatus | None
    num_steps: int
    is_complete: bool
    """True if all requested steps are done."""
    reason: str | None = None
    early_end: str = ""
    """Warning if the program reports success before all requested steps are done."""


def has_only_log(folder: Path, spec: RunSpec) -> bool:
    """Return True if the run's steps are only in its log."""
    return spec.engine != NATIVE and not any((folder / STEPS_FOLDER).glob("rank-*.jsonl"))


def log_files(folder: Path) -> list[Path]:
    """Return the logs of a run's processes, those in which frameworks print steps first."""
    files = submitted_logs(folder) or sorted((folder / LOGS_FOLDER).glob("rank-*.log"))
    candidates = [*files[:1], *files[-1:], *files[1:-1]][:MAX_LOGS]
    return list(dict.fromkeys(candidates))


def measured_log(folder: Path, engine_name: str) -> Path | None:
    """Return the first log with steps in the engine's log format, or in any; None without one."""
    formats = log_formats()
    for path in log_files(folder):
        if path.stat().st_size and (name := detect(LogFile(path))) is not None:
            if name == engine_name or engine_name not in formats:
                return path
            if _has_steps(path, engine_name):
                return path
    return None


def _has_steps(path: Path, engine_name: str) -> bool:
    kind = log_formats()[engine_name]
    return any(kind.step_line.search(block) for block in LogFile(path, kind.begins))


def parse_run_log(folder: Path, record: RunRecord) -> Parsing | None:
    """Parse the run's log; None if no log has a step."""
    engine_name = record.spec.engine if record.spec else None
    path = measured_log(folder, engine_name or "")
    if path is None:
        return None
    if record.spec and record.spec.bare and record.log_settings is None:
        settings = record.settings
        user_settings = UserSettings(device=settings.device, num_devices=settings.num_devices)
        return parse_log(path, user_settings, display_path=Path(path.name))
    format_name = engine_name if engine_name in log_formats() else None
    # Its ranks do not count tokens; tokens of packed samples follow from the batch.
    facts = record.settings.model_copy(update={"origin": "imported"})
    user = UserSettings(engine=format_name, window=record.window, facts=facts, planned=True)
    return parse_log(
        path, user, other_ranks=[other for other in log_files(folder) if other != path]
    )


def with_reported_settings(record: RunRecord, folder: Path) -> RunRecord:
    """Return the record of an ended bare command with the settings in its log and events."""
    if record.spec is None or not record.spec.bare:
        return record
    settings, parsing = record.settings, parse_run_log(folder, record)
    if parsing is not None:
        log_settings = parsing.document.settings.model_dump(exclude_none=True, exclude={"origin"})
        settings = RunSettings.model_validate({**settings.model_dump(), **log_settings})
    ranks = [log.start.world_size for log in read_ranks(folder).values() if log.start]
    if ranks and settings.num_devices is None:
        settings = settings.model_copy(update={"num_devices": max(ranks)})
    return record.model_copy(update={"log_settings": settings})


def find_run_ending(
    folder: Path, record: RunRecord, code: int, oom_killed: bool, job_end: JobEnd | None
) -> Ending:
    """Return how a run ended whose processes have ended.

    For other programs, steps and end marker come first and the exit code last: some programs end
    with an error after their last step.
    """
    spec = record.spec
    assert spec is not None
    evidence = read_evidence(folder, spec.world_size, code, oom_killed, job_end)
    if spec.engine == NATIVE:
        return find_ending(evidence)
    if evidence.ranks:
        return _ending_of_ranks(_with_started_ranks(evidence, folder, spec), spec)
    log_end = _find_log_end(parse_run_log(folder, record), spec)
    ended_badly = bool(code) or oom_killed or job_end is not None
    if (
        log_end.is_complete
        and log_end.status not in FAILED_STATUSES
        and not (log_end.early_end and ended_badly)
    ):
        late = f"{all_steps_done(log_end.num_steps)}, yet the program ended with code {code}"
        warning = log_end.early_end or (late if code else "")
        return Ending("ok", None, (warning,) if warning else ())
    if log_end.status == "oom" or log_end.status == "nan":
        return Ending(log_end.status, log_end.reason)
    if code and (line := _out_of_memory(folder)):
        return Ending("oom", line)
    if code or oom_killed or job_end:
        ending = find_ending(evidence)
        return ending if ending.reason else Ending(ending.status, log_end.reason)
    requested_steps = last_step(spec)
    return (
        Ending("ok", None)
        if requested_steps is None
        else _early_ending(folder, log_end, requested_steps)
    )


def _out_of_memory(folder: Path) -> str | None:
    """Return the out-of-memory line of any rank; often another rank prints the steps."""
    tails = (file_text(path, LAST_BYTES).encode() for path in log_files(folder))
    line = next(filter(None, map(out_of_memory_line, tails)), None)
    return shorten(line, MAX_ERROR) if line else None


def _with_started_ranks(evidence: EndEvidence, folder: Path, spec: RunSpec) -> EndEvidence:
    """Return the evidence with the ranks that the program started by itself on its node.

    The first failure among them is reported by torchrun in the program's own log.
    """
    if spec.engine_settings.get("per") == "device" or not spec.command:
        return evidence
    texts = (file_text(path, TAIL_BYTES) for path in log_files(folder))
    exits = {rank: code for text in texts for rank, code in launcher_exits(text).items()}
    return replace(evidence, world_size=max(evidence.ranks) + 1, exits=exits or evidence.exits)


def _ending_of_ranks(evidence: EndEvidence, spec: RunSpec) -> Ending:
    """Return how a run ended by its event lines, which may be incomplete for other programs.

    A positive exit code means failure unless all steps are done. A signal (a negative code) after
    the last line is judged like that of any rank.
    """
    requested_steps = spec.steps_requested
    num_steps = max((len(log.steps) for log in evidence.ranks.values()), default=0)
    code = next((code for code in evidence.exits.values() if code > 0), None)
    all_ok = all(end.status == "ok" for end in evidence.ends.values())
    if all_ok and not (evidence.exit_code or evidence.oom_killed or evidence.job_end):
        return Ending("ok", None)
    if all_ok and code and (requested_steps is None or num_steps < requested_steps):
        error = last_error(evidence.tail)
        return Ending("failed", f"ended with exit code {code}" + (f": {error}" if error else ""))
    return find_ending(evidence)


def _early_ending(folder: Path, log_end: _LogEnd, requested_steps: int) -> Ending:
    """Return the ending of a program that exited with 0 before all its steps were done."""
    error = last_error(log_tail(folder))
    what = f"the program ended after {log_end.num_steps:,} of {pluralize(requested_steps, 'step')}"
    return Ending("failed", f"{what}: {error}" if error else what)


def _find_log_end(parsing: Parsing | None, spec: RunSpec) -> _LogEnd:
    if parsing is None:
        return _LogEnd(None, 0, False)
    log, document = parsing.log, parsing.document
    steps = parsing.steps
    last, requested_steps = _steps_done(steps), last_step(spec)
    next_line = last + _steps_a_line(steps)
    is_done = (
        requested_steps is not None and next_line > requested_steps
    ) or "run_time_s" in log.figures
    whole = (is_done or log.end_line is not None) and log.incomplete_reason is None
    early = ""
    # It is unknown how many steps a single line covers.
    if (
        requested_steps is not None
        and next_line <= requested_steps
        and len(steps) > 1
        and not ends_at_target(spec)
    ):
        early = f"the program finished after {last:,} of {pluralize(requested_steps, 'step')}"
    return _LogEnd(document.status, last, whole, document.reason, early)


def _steps_done(steps: Steps) -> int:
    """Return the number of steps in the log; some programs count from 0."""
    return int(steps.index.max()) + int(steps.index.min() == 0) if len(steps) else 0


def _steps_a_line(steps: Steps) -> int:
    """Return the number of steps between the last two lines; some programs skip steps."""
    numbers = np.unique(steps.index)
    return int(numbers[-1] - numbers[-2]) if len(numbers) > 1 else 1


def report_from_log(
    folder: Path, record: RunRecord, status: Status, reason: str | None
) -> RunReport:
    """Return the report of a run whose steps are only in its log."""
    spec = record.spec
    assert spec is not None
    parsing = parse_run_log(folder, record)
    result = _result(folder, record, parsing, status, reason)
    return RunReport(
        result=result,
        steps=parsing.steps if parsing else Steps.of(()),
        spec=None if spec.bare else spec,
        facts=record.settings,
        command=shlex.join(record.command),
        job_script=file_text(folder / SCRIPT_FILE),
        inventory=read_json(folder / INVENTORY_FILE),
        folder=str(folder),
        files=run_files(folder),
    )


def _result(
    folder: Path,
    record: RunRecord,
    parsing: Parsing | None,
    status: Status,
    reason: str | None,
) -> Result:
    spec = record.spec
    assert spec is not None
    if parsing is None and status == "ok":
        status, reason = "incomplete", NO_STEPS
    run_fields = {
        "status": status,
        "reason": reason,
        "log_tail": record.log_tail if status not in ("ok", "queued", "running") else (),
        "steps_requested": last_step(spec) or 0,
        "recipe": spec.recipe,
    }
    if parsing is None:
        return Result(
            run=folder.name,
            created=record.created,
            metrics={},
            headline=record.settings.headline,
            window=None,
            conventions={},
            verdict=single_run_verdict(status, reason, None, ()),
            versions={"paceline": record.paceline_version},
            warnings=record.warnings,
            **run_fields,
        )
    result = log_result(folder.name, record, parsing)
    if last_step(spec) != spec.steps_requested:  # the program counts its warm-up as well
        result = result.model_copy(update={"steps_done": _steps_done(parsing.steps)})
    window = result.window if result.window and result.window.supports_verdict else None
    comparisons = compare_with_references(record.settings, spec.references, result.metrics)
    return result.model_copy(
        update={
            **run_fields,
            "references": comparisons,
            "verdict": single_run_verdict(status, reason, window, comparisons),
            "warnings": (
                *record.warnings,
                *_differences(spec, parsing),
                *_without_end_marker(result.warnings, status),
            ),
        }
    )


def _without_end_marker(warnings: Sequence[str], status: Status) -> Iterator[str]:
    """Yield warnings; the exit code of a good run shows its end better than its log."""
    yield from (each for each in warnings if status != "ok" or not each.startswith(NO_END_MARKER))


def _differences(spec: RunSpec, parsing: Parsing) -> Iterator[str]:
    """Yield warnings about settings that the log reports differently from the request."""
    if spec.bare:
        return
    layout = spec.layout
    # A run that ends within its ramp-up is started with the batch that it reaches.
    sizes = {"global_batch": spec.training.batches, "seq_len": [spec.training.seq_len]}
    planned_settings = {
        **sizes,
        "num_devices": [spec.world_size],
        **{name: [getattr(layout, name)] for name in LAYOUT_SETTINGS},
    }
    log_settings = parsing.log.facts
    for name in SETTINGS:
        if name in log_settings and log_settings[name] not in planned_settings[name]:
            yield (
                f"the log reports {name.replace('_', ' ')} {log_settings[name]}, but the plan "
                f"requested {planned_settings[name][-1]}"
            )
    window = parsing.document.window
    for name, planned_sizes in sizes.items():
        size = getattr(window, name, None)
        if size is not None and name not in log_settings and size not in planned_sizes:
            yield (
                f"the step lines report {name.replace('_', ' ')} {size}, but the plan requested "
                f"{planned_sizes[-1]}"
            )
