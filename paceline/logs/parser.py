"""Parser that turns a log of any known framework into figures, without launching anything."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.core.errors import UserError
from paceline.core.result import Metric, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.stats import summarize
from paceline.core.steps import Steps
from paceline.core.text import as_text
from paceline.core.window import (
    MIN_STEADY,
    NoStepError,
    Window,
    choose_window,
    steady_window,
)
from paceline.engines import log_format, log_formats
from paceline.engines.log_reading.column import final_rows
from paceline.engines.log_reading.generic import NAME as GENERIC
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.engines.log_reading.profilers import watch_profilers
from paceline.engines.log_reading.records import watch_not_a_number
from paceline.files.log_file import FIRST_BYTES, LogFile, utf16
from paceline.files.temporary import temporary_folder
from paceline.logs.completion import completed_steps, missing_end, steps_from_throughput
from paceline.logs.dates import log_date
from paceline.logs.facts import UserSettings, all_facts, path_sources
from paceline.logs.figures import (
    LogFigures,
    figures_of,
    figures_without_batch,
    printed_rates,
    rates_of,
    reported_figures,
    single_figure,
)
from paceline.logs.nearest import refusal_of
from paceline.logs.parsed_log import LogStatus, ParsedLog, step_times
from paceline.logs.path_facts import NO_PATH, PathFacts, path_facts

LOOK_ON_BLOCKS = 12
"""Blocks read beyond the first step line, in which a more specific log format may still appear."""
MAX_SHAPES = 20_000
"""Maximum number of different lines, apart from digits, that detection remembers."""
UNDIVIDED_BLOCKS = 16
"""Blocks whose lines are not compared, after a block with mostly different ones."""
DIGITS = b"0123456789"
LINE_ENDS = bytes.maketrans(b"\r", b"\n")

STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class Parsing:
    """A parsed log: the printed document, and the steps behind it."""

    document: ParsedLog
    steps: Steps
    log: LogContent
    window: Window | None = None


def log_files(paths: list[Path]) -> list[Path]:
    """Return every file that `paths` name; the files of a folder are sorted by path.

    Folders are searched recursively. Raises UserError for a path that does not exist.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists() and not path.is_symlink() and path != STANDARD_INPUT:
            raise UserError(str(path), "does not exist")
        files += sorted(_files_under(path), key=str) if path.is_dir() else [path]
    return files


@contextmanager
def standard_input(paths: list[Path]) -> Iterator[Path]:
    """Yield a temporary file that holds standard input, if `paths` include `-`."""
    if STANDARD_INPUT not in paths:
        yield STANDARD_INPUT
        return
    with temporary_folder() as folder:
        copy = Path(folder) / "standard-input"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


def parse_log(
    path: Path,
    user: UserSettings,
    *,
    display_path: Path | None = None,
    one_of_many: bool = False,
    other_ranks: Sequence[Path] = (),
) -> Parsing:
    """Parse the log at `path` and combine it with the user's settings.

    Any content of the file results in a status, not in an error. `display_path` is the name that
    the user knows the log by, if it is not `path`. `other_ranks` are logs of other ranks of the
    same run. Their settings and memory are used.

    Raises UserError for unknown settings, and for a window that selects no step. The latter is a
    warning if the log is `one_of_many`.
    """
    shown_path = display_path or path
    try:
        fault = _unreadable(path)
        if fault:
            return _without_steps(shown_path, user, "unreadable", fault)
        file = LogFile(path)
        name = user.engine_name or detect(file)
        file = LogFile(path, log_format(name).begins if name else None)
        log = _content(file, name or GENERIC, other_ranks)
        if log.refusal:
            return _unknown(shown_path, user, file, log)
        parsing = _read(file, log, shown_path, user, name or GENERIC, one_of_many)
        document = parsing.document.model_copy(update={"date": log_date(path)})
        return replace(parsing, document=document)
    except OSError as error:
        return _without_steps(shown_path, user, "unreadable", error.strerror or str(error))


def detect(file: LogFile) -> str | None:
    """Return the most specific log format whose step lines the file contains, or None.

    A log has few kinds of lines, so marks are searched in lines that differ by more than digits.
    The effort for a block then hardly depends on the number of formats.
    """
    candidates = log_formats()
    marks = {name: [_without_digits(m) for m in kind.marks] for name, kind in candidates.items()}
    present, possible = set[str](), set[str]()
    shapes = set[bytes]()
    blocks_left, undivided_blocks = LOOK_ON_BLOCKS, 0
    for block in file:
        text = _without_digits(block)
        if undivided_blocks:
            undivided_blocks -= 1
        else:
            new = set(text.split(b"\n")) - shapes
            shapes = new if len(shapes) + len(new) > MAX_SHAPES else shapes | new
            different = b"\n".join(new)
            undivided_blocks = UNDIVIDED_BLOCKS if 2 * len(different) > len(text) else 0
            text = different
        possible |= {name for name, each in marks.items() if any(mark in text for mark in each)}
        present |= {name for name in possible if _shows(block, candidates[name])}
        blocks_left -= bool(present)
        if not blocks_left:
            break
    return next((name for name in candidates if name in present), None)


def _without_digits(text: bytes) -> bytes:
    return text.translate(LINE_ENDS, DIGITS)


def _shows(block: bytes, kind: LogFormat) -> bool:
    return any(mark in block for mark in kind.marks) and kind.step_line.search(block) is not None


def _content(file: LogFile, name: str, other_ranks: Sequence[Path]) -> LogContent:
    """Return the content of a log, with the settings and memory of other ranks' logs."""
    kind, log = log_format(name), LogContent()
    blocks = watch_not_a_number(watch_profilers(file, log), log, kind.step_line)
    kind.read(blocks, log)
    for path in other_ranks:
        rank = LogContent()
        kind.read(LogFile(path, kind.begins), rank)
        log.add_rank(rank)
    return log


def _read(
    file: LogFile,
    log: LogContent,
    shown_path: Path,
    user: UserSettings,
    name: str,
    one_of_many: bool,
) -> Parsing:
    kind = log_format(name)
    place = NO_PATH if shown_path == STANDARD_INPUT else path_facts(shown_path)
    facts, notes, steps = _of_one_attempt(user, name, log, place)
    figure = single_figure(log, facts, kind, steps, user.window)
    if figure is not None:
        steps_of_window, window, printed = figure.steps, figure.window, True
    else:
        window, missed = _window(shown_path, steps_from_throughput(steps), user, log, one_of_many)
        notes, printed = [*notes, *missed], False
        steps_of_window = _without_overridden(steps.select(window.rows), user)
    notes += _contradictions(user, window.record)
    facts = _with_batch(facts, user, window.record)
    uneven = window.record.state == "uneven"
    if figure:
        rates = figure.rates
    else:
        rates = {**printed_rates(log, facts), **rates_of(facts, steps_of_window, uneven)}
    status, reason = _status(steps, log, file, bool(rates) or figure is not None)
    document = ParsedLog(
        file=as_text(str(shown_path)),
        engine=name,
        status=status,
        reason=reason,
        n_steps=len(steps),
        window=window.record if window.record.n or printed else None,
        settings=facts,
        sources=path_sources(user, facts, log, place),
        num_bytes=file.num_bytes,
        warnings=(
            *notes,
            *_warnings(file, log, window.record, steps if printed else None),
            *([] if file.read_error else missing_end(kind, log, steps)),
        ),
    )
    if steps_of_window.known("step_time_s"):
        figures = figures_of(facts, steps, steps_of_window, log, printed, uneven)
        times = step_times(figures.times, printed)
        document = _with_figures(document.model_copy(update={"step_time_s": times}), figures)
        document = _with_printed_rates(document, rates, log)
    elif rates:
        per_sample = figures_without_batch(facts, steps_of_window, log, rates, printed, uneven)
        log_figures = reported_figures(steps_of_window, log)
        document = document.model_copy(update={"metrics": rates, "reported": log_figures})
        document = _with_figures(document, per_sample) if per_sample else _with_rates(document)
    return Parsing(_with_convention(document, kind), steps, log, window)


def _of_one_attempt(
    user: UserSettings, name: str, log: LogContent, place: PathFacts
) -> tuple[RunSettings, list[str], Steps]:
    """Return settings, notes on them, and steps.

    If the log holds several attempts, the settings are those of the attempt that the window is in.
    """
    facts, notes = all_facts(user, name, log, place)
    steps = completed_steps(log.steps(), facts, log)
    timed_steps = steps_from_throughput(steps)
    if not log.has_attempts or not timed_steps.known("step_time_s"):
        return facts, notes, steps
    try:
        window = choose_window(timed_steps, user.window or "auto", log.resolution_s)
    except NoStepError:
        return facts, notes, steps
    log.facts = log.facts_of(int(np.arange(len(steps))[window.rows][-1]))
    facts, notes = all_facts(user, name, log, place)
    return facts, notes, completed_steps(log.steps(), facts, log)


def _with_convention(document: ParsedLog, kind: LogFormat) -> ParsedLog:
    """Return `document` with the FLOPs convention of the log's printed FLOP/s.

    It is the convention of current versions of the framework.
    """
    if kind.convention is None or "tflops_per_device" not in document.reported:
        return document
    convention = f"{kind.convention} in current versions of {kind.title}"
    conventions = {**document.conventions, "printed_flops": convention}
    return document.model_copy(update={"conventions": conventions})


def _without_overridden(window: Steps, user: UserSettings) -> Steps:
    """Return the steps of a window without the columns that the user's settings override."""
    overridden_columns = [
        name for name, size in user.sizes.items() if size and name in window.columns
    ]
    if not overridden_columns:
        return window
    return replace(
        window, columns={n: c for n, c in window.columns.items() if n not in overridden_columns}
    )


def _contradictions(user: UserSettings, window: WindowRecord) -> list[str]:
    """Return a sentence for each of the user's sizes that the step lines contradict."""
    printed = window.model_dump(include=set(user.sizes))
    return [
        f"{name.replace('_', ' ')} {size} was given, but the step lines report {printed[name]}"
        for name, size in user.sizes.items()
        if size and printed[name] and size != printed[name]
    ]


def _with_batch(facts: RunSettings, user: UserSettings, window: WindowRecord) -> RunSettings:
    """Return `facts` with the batch and sequence length of the window.

    A log may ramp both up.
    """
    lines = window.model_dump(include=set(user.sizes))
    sizes = {name: size or lines[name] for name, size in user.sizes.items()}
    return facts.model_copy(update={name: size for name, size in sizes.items() if size})


def _with_figures(document: ParsedLog, figures: LogFigures) -> ParsedLog:
    return _with_rates(
        document.model_copy(
            update={
                "reported": figures.reported_figures,
                "disagreements": figures.disagreements,
                "metrics": figures.metrics,
                "conventions": figures.conventions,
                "warnings": (*document.warnings, *figures.warnings),
            }
        )
    )


def _with_printed_rates(
    document: ParsedLog, rates: dict[str, Metric], log: LogContent
) -> ParsedLog:
    """Return `document` with printed rates where the steps yield none.

    If the log states a micro-batch and the number of devices is unknown, a printed rate may be per
    device, so none is added.
    """
    if "micro_batch" in log.facts and document.settings.num_devices is None:
        return document
    computed_names = {name for name, metric in document.metrics.items() if metric.value is not None}
    printed = {name: rate for name, rate in rates.items() if name not in computed_names}
    return _with_rates(document.model_copy(update={"metrics": {**document.metrics, **printed}}))


def _with_rates(document: ParsedLog) -> ParsedLog:
    """Return `document` with tokens/s and samples/s from its metrics."""
    metrics = document.metrics
    names = ("tokens_per_s", "samples_per_s")
    return document.model_copy(
        update={name: metrics[name].value for name in names if name in metrics}
    )


def _window(
    shown_path: Path, steps: Steps, user: UserSettings, log: LogContent, one_of_many: bool
) -> tuple[Window, list[str]]:
    """Return the window, and a warning if the rule selects no step."""
    rule = user.window or "auto"
    if not steps.known("step_time_s"):
        return choose_window(steps, "auto", log.resolution_s), []
    try:
        return choose_window(steps, rule, log.resolution_s), []
    except NoStepError as error:
        numbers = steps.index[np.isfinite(steps["step_time_s"])]
        allowed = f"the log has steps {numbers[0]}-{numbers[-1]}"
        if not one_of_many:
            raise UserError(f"{shown_path}: --window {rule}", f"{error}; {allowed}") from error
        nothing = steady_window(steps.select(slice(0, 0)))
        return nothing, [f"--window {rule} {error}; {allowed}"]


def _status(
    steps: Steps, log: LogContent, file: LogFile, has_rate: bool
) -> tuple[LogStatus, str | None]:
    """Return the status and its reason; the most severe status takes precedence."""
    if log.out_of_memory:
        return "oom", log.out_of_memory[:300]
    bad = np.isinf(steps["loss"]) | (np.isinf(steps["grad_norm"]) & np.isfinite(steps["loss"]))
    bad &= final_rows(steps.index)  # A restart repeats the steps after a NaN.
    if bad.any():
        return "nan", f"loss or gradient norm is NaN or infinite at step {steps.index[bad][0]:,}"
    if log.not_a_number:
        return "nan", log.not_a_number[:300]
    if file.read_error or log.incomplete_reason:
        return "truncated", file.read_error or log.incomplete_reason
    if steps.known("step_time_s") or has_rate:
        return "ok", None
    if len(steps):
        return "not-a-training-log", "it has step lines without a time or a throughput"
    if log.end_line:
        return "not-a-training-log", "it is complete but reports no step time and no throughput"
    return "truncated", "it ends before the first step time"


def _warnings(
    file: LogFile, log: LogContent, record: WindowRecord, steps: Steps | None
) -> Iterator[str]:
    """Yield warnings; `steps` are those of a log that also prints one figure for the run."""
    yield from log.remarks
    yield from _cut_lines(file)
    if steps is not None:
        yield f"one figure for the whole run, as the source prints it: {_spread(steps, log)}"
    elif record.n < MIN_STEADY:
        yield f"few-steps: {record.n} steady step lines, fewer than {MIN_STEADY}"
    yield from record.remarks


def _spread(steps: Steps, log: LogContent) -> str:
    """Return the spread of the step lines, which the figure for the run does not have."""
    timed_steps = steps_from_throughput(steps)
    if not timed_steps.known("step_time_s"):
        return "no spread is known"
    window = choose_window(timed_steps, "auto", log.resolution_s)
    times = timed_steps["step_time_s"][window.rows]
    spread = summarize(times[np.isfinite(times)]).relative_spread
    return f"its {window.record.n:,} steady step lines have a spread of {spread:.1%}"


def _cut_lines(file: LogFile) -> Iterator[str]:
    if file.cut_lines:
        yield f"lines longer than 1 MiB, which were truncated: {file.cut_lines:,}"


_MEMORY_ERROR = re.compile(
    r"OutOfMemoryError: |out of memory|bad_alloc|allocate memory|oom[-_]kill(?::| event)", re.I
)
"""Messages of running out of memory; a text without steps may be a program that names them."""


def _unknown(shown_path: Path, user: UserSettings, file: LogFile, log: LogContent) -> Parsing:
    if file.num_bytes == 0 and file.read_error is None:
        return _without_steps(shown_path, user, "empty", "the file is empty")
    if file.read_error:
        return _without_steps(shown_path, user, "truncated", file.read_error)
    if log.out_of_memory and _MEMORY_ERROR.search(log.out_of_memory):
        return _without_steps(shown_path, user, "oom", log.out_of_memory[:300], file.num_bytes)
    if log.not_a_number:
        return _without_steps(shown_path, user, "nan", log.not_a_number[:300], file.num_bytes)
    reason = log.refusal or "no step line of a known log format"
    if user.engine_name is None:
        reason = refusal_of(reason, LogFile(file.path))
    parsing = _without_steps(shown_path, user, "not-a-training-log", reason, file.num_bytes)
    warnings = {"warnings": tuple(_cut_lines(file))}
    return replace(parsing, document=parsing.document.model_copy(update=warnings))


def _without_steps(
    shown_path: Path, user: UserSettings, status: LogStatus, reason: str, num_bytes: int = 0
) -> Parsing:
    facts, _ = all_facts(user, user.engine_name, LogContent())
    document = ParsedLog(
        file=as_text(str(shown_path)),
        engine=user.engine_name,
        status=status,
        reason=reason,
        settings=facts,
        num_bytes=num_bytes,
    )
    return Parsing(document, Steps.of([]), LogContent())


def _unreadable(path: Path) -> str | None:
    """Return why the file cannot be read as text, or None.

    Raises OSError as open() does.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        return "the folder cannot be searched"
    if not stat.S_ISREG(mode):
        return "it is not a regular file; to read a pipe, use - as the path"
    with path.open("rb") as file:
        encoding = utf16(file.read(FIRST_BYTES))
    if encoding:
        return f"it is UTF-16 text; convert it with `iconv -f {encoding} -t UTF-8`"
    return None


def _files_under(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, and the folders that cannot be searched.

    Links to folders are not followed.
    """
    unreadable: list[Path] = []
    for inner, _, names in os.walk(
        folder, onerror=lambda error: unreadable.append(Path(error.filename))
    ):
        yield from (Path(inner, name) for name in names)
    yield from unreadable
