"""A run of a foreign program: its steps and its end are what its log says.

Where its ranks write event lines too (`paceline.steplog`), those go before the log.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np

from paceline.compare.published import compare_with_references
from paceline.compare.single_run import single_run_verdict
from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS
from paceline.core.result import Result, Status
from paceline.core.run import RunSettings, RunSpec
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.units import all_done, counted
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
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import LogStatus
from paceline.logs.parser import Parsing, detect, parse_log
from paceline.machines import JobEnd
from paceline.machines.slurm.foreign import submitted_logs
from paceline.report.logs import disagreement_text
from paceline.runs.ending import (
    TAIL_BYTES,
    EndEvidence,
    Ending,
    file_text,
    judge,
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
"""Logs of the other statuses tell of no run."""


def evaluate_log(folder: Path, record: RunRecord) -> RunReport:
    """The report of an imported run, read anew from its raw log.

    Raises UserError when the log is missing from the folder.
    """
    path = folder / (record.log or "")
    if not path.is_file():
        raise UserError(str(path), "is missing", remedy="import the log again")
    given = UserSettings(engine=record.settings.engine, window=record.window, facts=record.settings)
    parsing = parse_log(path, given)
    return RunReport(
        result=log_result(folder.name, record, parsing),
        steps=_attempt(parsing),
        spec=None,
        facts=record.settings,
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
    log, facts = parsing.document, record.settings
    status = RUN_STATUS.get(log.status, "failed")
    window = log.window
    trusted = window if window and window.supports_verdict else None
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
        steps_requested=_whole(stated.get("total_steps")) or 0,
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


NATIVE = "native"
BAD = ("oom", "nan", "truncated")
LAST_BYTES = 1 << 16
"""Of a rank's log, where it says what ended it."""
LONGEST_LINE = 300
NO_STEPS = (
    "no log of the run holds a step line of a known log format, and no rank wrote event lines; "
    "`paceline.steplog` tells the steps of any loop"
)
MOST_LOGS = 64
"""Ranks whose logs are looked into: the first ones and the last, where frameworks print."""
OF_LAYOUT = (*AXIS_FIELDS, "zero_stage")
SETTINGS = ("global_batch", "seq_len", "num_devices", *OF_LAYOUT)
"""What a log may state otherwise than it was asked for."""


@dataclass(frozen=True)
class _Said:
    """What the log says of the end."""

    status: LogStatus | None
    num_steps: int
    whole: bool
    """Whether it comes to the end of what was asked for."""
    reason: str | None = None
    early: str = ""
    """A sentence where the program says that it is done before the steps asked for are."""


def tells_by_log(folder: Path, spec: RunSpec) -> bool:
    """Whether the run's steps are in its log alone."""
    return spec.engine != NATIVE and not any((folder / STEPS_FOLDER).glob("rank-*.jsonl"))


def log_files(folder: Path) -> list[Path]:
    """The logs of a run's processes, those first in which frameworks print their steps."""
    files = submitted_logs(folder) or sorted((folder / LOGS_FOLDER).glob("rank-*.log"))
    ordered = [*files[:1], *files[-1:], *files[1:-1]][:MOST_LOGS]
    return list(dict.fromkeys(ordered))


def measured_log(folder: Path, engine_name: str) -> Path | None:
    """The first log that holds a step of the engine's log format, or of any; None without one."""
    known = log_formats()
    for path in log_files(folder):
        if path.stat().st_size and (name := detect(LogFile(path))) is not None:
            if name == engine_name or engine_name not in known:
                return path
            if _has_steps(path, engine_name):
                return path
    return None


def _has_steps(path: Path, engine_name: str) -> bool:
    kind = log_formats()[engine_name]
    return any(kind.step_line.search(block) for block in LogFile(path, kind.begins))


def parsed(folder: Path, record: RunRecord) -> Parsing | None:
    """The run's log as its log format reads it; None where no log has a step."""
    engine_name = record.spec.engine if record.spec else None
    path = measured_log(folder, engine_name or "")
    if path is None:
        return None
    if record.spec and record.spec.bare and record.facts is None:
        known = record.settings
        started = UserSettings(device=known.device, num_devices=known.num_devices)
        return parse_log(path, started, called=Path(path.name))
    format_name = engine_name if engine_name in log_formats() else None
    # Its ranks count no tokens: those of packed samples follow from the batch, as in any log.
    facts = record.settings.model_copy(update={"origin": "imported"})
    user = UserSettings(engine=format_name, window=record.window, facts=facts)
    return parse_log(path, user, beside=[other for other in log_files(folder) if other != path])


def with_told_facts(record: RunRecord, folder: Path) -> RunRecord:
    """The record of a bare command that has ended, with what its log and its ranks told of it."""
    if record.spec is None or not record.spec.bare:
        return record
    known, parsing = record.settings, parsed(folder, record)
    if parsing is not None:
        told = parsing.document.facts.model_dump(exclude_none=True, exclude={"origin"})
        known = RunSettings.model_validate({**known.model_dump(), **told})
    ranks = [log.start.world_size for log in read_ranks(folder).values() if log.start]
    if ranks and known.num_devices is None:
        known = known.model_copy(update={"num_devices": max(ranks)})
    return record.model_copy(update={"facts": known})


def ending_of(
    folder: Path, record: RunRecord, code: int, oom_killed: bool, job_end: JobEnd | None
) -> Ending:
    """How a run ended whose processes have; of a foreign program by steps and end marker first.

    Some programs end with an error after all their work is done, so the exit code comes last.
    """
    spec = record.spec
    assert spec is not None
    evidence = read_evidence(folder, spec.world_size, code, oom_killed, job_end)
    if spec.engine == NATIVE:
        return judge(evidence)
    if evidence.ranks:
        return _of_ranks(_as_started(evidence, folder, spec), spec)
    said = _said(parsed(folder, record), spec)
    ended_badly = bool(code) or oom_killed or job_end is not None
    if said.whole and said.status not in BAD and not (said.early and ended_badly):
        late = f"{all_done(said.num_steps)}, yet the program ended with code {code}"
        warning = said.early or (late if code else "")
        return Ending("ok", None, (warning,) if warning else ())
    if said.status == "oom" or said.status == "nan":
        return Ending(said.status, said.reason)
    if code and (line := _out_of_memory(folder)):
        return Ending("oom", line)
    if code or oom_killed or job_end:
        ending = judge(evidence)
        return ending if ending.reason else Ending(ending.status, said.reason)
    asked = last_step(spec)
    return Ending("ok", None) if asked is None else _early_end(folder, said, asked)


def _out_of_memory(folder: Path) -> str | None:
    """The line with which a rank says that memory ran out: often not the one that tells steps."""
    tails = (file_text(path, LAST_BYTES).encode() for path in log_files(folder))
    line = next(filter(None, map(out_of_memory_line, tails)), None)
    return line[:LONGEST_LINE] if line else None


def _as_started(evidence: EndEvidence, folder: Path, spec: RunSpec) -> EndEvidence:
    """The evidence with the ranks that there are, where a program starts them itself on its node.

    Which of them failed first is then what torch's launcher tells in the program's own log.
    """
    if spec.engine_settings.get("per") == "device" or not spec.command:
        return evidence
    texts = (file_text(path, TAIL_BYTES) for path in log_files(folder))
    exits = {rank: code for text in texts for rank, code in launcher_exits(text).items()}
    return replace(evidence, world_size=max(evidence.ranks) + 1, exits=exits or evidence.exits)


def _of_ranks(evidence: EndEvidence, spec: RunSpec) -> Ending:
    """By event lines, which not every rank of a foreign program needs to write, nor to its end.

    A program that says by its exit code that it gave up did so, unless all its steps are done; an
    abort (a negative code) behind its last line is none of its own words.
    """
    asked = spec.steps_requested
    done = max((len(log.steps) for log in evidence.ranks.values()), default=0)
    code = next((code for code in evidence.exits.values() if code > 0), None)
    well = all(end.status == "ok" for end in evidence.ends.values())
    if well and not (evidence.exit_code or evidence.oom_killed or evidence.job_end):
        return Ending("ok", None)
    if well and code and (asked is None or done < asked):
        error = last_error(evidence.tail)
        return Ending("failed", f"ended with exit code {code}" + (f": {error}" if error else ""))
    return judge(evidence)


def _early_end(folder: Path, said: _Said, asked: int) -> Ending:
    """A program that ended by itself, and well as it says, before its steps were done."""
    error = last_error(log_tail(folder))
    what = f"the program ended after {said.num_steps:,} of {counted(asked, 'step')}"
    return Ending("failed", f"{what}: {error}" if error else what)


def _said(parsing: Parsing | None, spec: RunSpec) -> _Said:
    if parsing is None:
        return _Said(None, 0, False)
    log, document = parsing.log, parsing.document
    steps = parsing.steps
    last, asked = _steps_done(steps), last_step(spec)
    next_line = last + _steps_a_line(steps)
    done = (asked is not None and next_line > asked) or "run_time_s" in log.figures
    whole = (done or log.ended is not None) and log.torn is None
    early = ""
    # Of a single line nobody knows for how many steps it stands.
    if asked is not None and next_line <= asked and len(steps) > 1 and not ends_at_target(spec):
        early = f"the program came to its end after {last:,} of {counted(asked, 'step')}"
    return _Said(document.status, last, whole, document.reason, early)


def _steps_done(steps: Steps) -> int:
    """How many steps the log tells of; some programs count from 0."""
    return int(steps.index.max()) + int(steps.index.min() == 0) if len(steps) else 0


def _steps_a_line(steps: Steps) -> int:
    """Steps from the last but one line to the last: some programs print one for several."""
    numbers = np.unique(steps.index)
    return int(numbers[-1] - numbers[-2]) if len(numbers) > 1 else 1


def logged_report(folder: Path, record: RunRecord, status: Status, reason: str | None) -> RunReport:
    """The report of a run whose steps are in its log alone."""
    spec = record.spec
    assert spec is not None
    parsing = parsed(folder, record)
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
    own = {
        "status": status,
        "reason": reason,
        "log_tail": record.log_tail if status not in ("ok", "queued", "running") else (),
        "steps_requested": spec.steps_requested or 0,
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
            **own,
        )
    result = log_result(folder.name, record, parsing)
    window = result.window if result.window and result.window.supports_verdict else None
    comparisons = compare_with_references(record.settings, spec.references, result.metrics)
    return result.model_copy(
        update={
            **own,
            "references": comparisons,
            "verdict": single_run_verdict(status, reason, window, comparisons),
            "warnings": (*record.warnings, *_differences(spec, parsing), *result.warnings),
        }
    )


def _differences(spec: RunSpec, parsing: Parsing) -> Iterator[str]:
    """Settings that the log states otherwise than the run asked for."""
    if spec.bare:
        return
    layout = spec.layout
    asked = {
        "global_batch": spec.training.global_batch,
        "seq_len": spec.training.seq_len,
        "num_devices": spec.world_size,
        **{name: getattr(layout, name) for name in OF_LAYOUT},
    }
    stated = parsing.log.facts
    for name in SETTINGS:
        if name in stated and stated[name] != asked[name]:
            yield (
                f"{name.replace('_', ' ')} {asked[name]} was asked for; the log says "
                f"{stated[name]}: the program did not do what was planned"
            )
