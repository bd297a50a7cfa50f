"""Two commands run in turns until a sequential test decides which one is better."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from paceline.compare.few_runs import FewRunsRule, published_prior
from paceline.compare.judgement import percent_change, verdict_label, verdict_tone
from paceline.compare.metric_comparison import compare_values
from paceline.compare.sequential.interim_analysis import (
    ERROR,
    Design,
    PairsAnalysis,
    analysis_points,
    analyze_at,
)
from paceline.compare.significance import MARGIN
from paceline.core.errors import UserError
from paceline.core.interrupts import deferred_interrupts
from paceline.core.secrets import redact
from paceline.core.units import percent, pluralize, significant
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.catalog import variation_class
from paceline.files.documents import parse_json, text_blocks, write_text, write_value
from paceline.files.run_folder import new_folder
from paceline.report.document import Column, Document, Table, Verdict

FOLDER = "ab"
RESULT_FILE = "ab.json"
MAX_READ_CHARS = 1 << 24
"""Number of characters at the end of a command's output in which its figures are looked for."""
BLOCK_BYTES = 1 << 22
SECONDS = "seconds"
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a command that is stopped."""
LETTERS = "AB"

CommandVerdict = Literal[
    "same",
    "faster",
    "slower",
    "likely faster",
    "likely slower",
    "better",
    "worse",
    "likely better",
    "likely worse",
    "undecided",
    "invalid",
]


@dataclass(frozen=True)
class OutputFigure:
    """A figure of a command: its wall time, or the last value in its output.

    `source` is `seconds`, `json:PATH` with keys and list positions separated by dots, or a regular
    expression whose first group is the number.
    """

    source: str

    def __post_init__(self) -> None:
        if self.is_json or self.source == SECONDS:
            return
        try:
            groups = re.compile(self.source).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(self.source, f"is not a regular expression: {error}") from error
        if groups < 1:
            raise UserError(
                self.source,
                "has no group for the number",
                allowed="seconds, json:PATH, or a regular expression such as 'loss: ([0-9.]+)'",
            )

    @property
    def is_json(self) -> bool:
        """True for a value of a JSON document."""
        return self.source.startswith("json:")

    def read(self, output: str, elapsed_s: float) -> float | None:
        """Return the figure of a command that took `elapsed_s` seconds; None if it has none."""
        if self.source == SECONDS:
            return elapsed_s
        if self.is_json:
            keys = self.source.removeprefix("json:").split(".")
            values = (_json_value(line, keys) for line in [output, *reversed(output.splitlines())])
            return next((value for value in values if value is not None), None)
        matches = re.findall(self.source, output, re.MULTILINE)
        last = matches[-1] if matches else ""
        return _number(last if isinstance(last, str) else last[0])


def _json_value(text: str, keys: list[str]) -> float | None:
    try:
        value = parse_json(text, nan=True)
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return _number(value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(str(value).replace(",", ""))
    except ValueError:
        return None


@dataclass(frozen=True)
class PairsRequest:
    """Two commands, the metric that decides, and the values that must match."""

    commands: tuple[str, str]
    metric: OutputFigure
    must_match: tuple[OutputFigure, ...] = ()
    tolerance: float = 0.01
    """Largest relative difference of the values that must match."""
    higher_is_better: bool = False
    max_pairs: int = 16
    margin: float = MARGIN
    shell: bool = False


class CommandResult(Value):
    """One execution of a command."""

    side: Literal["A", "B"]
    pair: PositiveInt
    exit_code: int
    elapsed_s: float
    value: float | None
    must_match: tuple[float | None, ...] = ()
    output: str
    """File with the command's standard output and standard error."""


class CommandComparison(Value):
    """Comparison of two commands by `paceline ab`: B with A."""

    schema_version: int = 1
    verdict: CommandVerdict
    sentence: str
    commands: tuple[str, str]
    metric: str
    higher_is_better: bool
    ratio: float | None = None
    """Geometric mean of B's values divided by A's."""
    low: float | None = None
    """Lower end of the 95% interval of the ratio, valid over all interim analyses."""
    high: float | None = None
    pairs: NonNegativeInt = 0
    max_pairs: PositiveInt
    error: float = ERROR
    """Maximum share of comparisons of equal commands that find a difference."""
    margin: float
    must_match: tuple[str, ...] = ()
    tolerance: float
    runs: tuple[CommandResult, ...] = ()
    folder: str


def compare_commands(
    request: PairsRequest, root: Path, watch: Callable[[str], None]
) -> CommandComparison:
    """Run both commands in turns until the test decides, and store outputs and result under `root`.

    An interrupt ends the running command and then propagates. Secrets are removed from what is
    stored. Raises UserError for a program that cannot be started, before anything runs if it does
    not exist.
    """
    argv = [_words(request, side) for side in (0, 1)]
    folder = new_folder(root / FOLDER, f"{datetime.now(UTC):%Y-%m-%d}").resolve()
    runs: list[CommandResult] = []
    points = analysis_points(request.max_pairs)
    analysis: PairsAnalysis | None = None
    fault: str | None = None
    for pair in range(1, request.max_pairs + 1):
        for side in (0, 1) if pair % 2 else (1, 0):
            run = _execute(request, side, argv[side], pair, folder)
            runs.append(run)
            value = "no value" if run.value is None else significant(run.value, 4)
            watch(f"pair {pair} {run.side}: {value} ({run.elapsed_s:.1f} s)")
            if fault := _fault(request, run):
                break
        fault = fault or _mismatch(request, runs[-2:])
        if fault:
            break
        if pair in points:
            design = Design(request.max_pairs, request.margin)
            analysis = analyze_at(*_values(runs, pair), design)
            watch(f"after {pluralize(pair, 'pair')}: {_interval(analysis)}")
            if analysis.conclusion != "continue":
                break
    result = _result(request, runs, analysis, fault, folder)
    write_value(folder / RESULT_FILE, result)
    return result


def _words(request: PairsRequest, side: int) -> list[str]:
    """Return the words of a command; raise UserError if its program does not exist."""
    command, where = request.commands[side], f"command {LETTERS[side]}"
    if request.shell and command.strip():
        return ["bash", "-c", command]
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(where, f"cannot be split into words: {error}") from error
    if not words:
        raise UserError(where, "is empty")
    if shutil.which(words[0]) is None:
        raise _not_started(where, words[0], "No such program")
    return words


def _not_started(where: str, program: str, reason: str | None) -> UserError:
    return UserError(
        where,
        f"cannot be started: {program}: {reason}",
        remedy="--shell runs the commands by `bash -c`",
    )


def _execute(
    request: PairsRequest, side: int, argv: list[str], pair: int, folder: Path
) -> CommandResult:
    path = folder / f"pair-{pair:03}-{LETTERS[side].lower()}.log"
    begun_s = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    with path.open("wb") as output:
        try:
            with deferred_interrupts():  # an interrupt inside Popen would leave an unknown process
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            code = process.wait()
        except OSError as error:
            where = f"command {LETTERS[side]}"
            raise _not_started(where, argv[0], error.strerror) from error
        except BaseException:  # an interrupt must also end the command's children
            if process is not None:
                _stop(process)
            raise
    elapsed_s = time.monotonic() - begun_s
    text = _without_secrets(path)
    return CommandResult(
        side="AB"[side],  # pyright: ignore[reportArgumentType]
        pair=pair,
        exit_code=code,
        elapsed_s=elapsed_s,
        value=request.metric.read(text, elapsed_s),
        must_match=tuple(figure.read(text, elapsed_s) for figure in request.must_match),
        output=str(path),
    )


def _without_secrets(path: Path) -> str:
    """Redact secrets in the output of a command; return its last MAX_READ_CHARS, unchanged."""
    end = ""

    def blocks(file: BinaryIO) -> Iterator[str]:
        nonlocal end
        for block in text_blocks(file, BLOCK_BYTES):
            text = block.decode("utf-8", "replace")
            end = (end + text)[-MAX_READ_CHARS:]
            yield text

    with path.open("rb") as file:
        write_text(path, blocks(file))
    return end


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children: SIGTERM first, SIGKILL after a grace period."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    except ProcessLookupError:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _fault(request: PairsRequest, run: CommandResult) -> str | None:
    if run.exit_code:
        return f"{run.side} ended with exit code {run.exit_code} in pair {run.pair}: {run.output}"
    if run.value is None or not 0 < run.value < float("inf"):
        problem = "no value" if run.value is None else f"the value {run.value:g}"
        return f"{run.side} has {problem} of {request.metric.source!r}: {run.output}"
    for figure, value in zip(request.must_match, run.must_match, strict=True):
        if value is None:
            return f"{run.side} has no value of {figure.source!r}: {run.output}"
    return None


def _mismatch(request: PairsRequest, pair: list[CommandResult]) -> str | None:
    """Return why a pair did not do the same work, or None."""
    by_side = {run.side: run for run in pair}
    if len(by_side) < 2:
        return None
    for at, figure in enumerate(request.must_match):
        a, b = (by_side[letter].must_match[at] or 0.0 for letter in ("A", "B"))
        # NaN differs from everything, itself included.
        if not abs(a - b) <= request.tolerance * max(abs(a), abs(b)):
            return (
                f"A and B do not match: {figure.source!r} is {a:g} and {b:g}, tolerance "
                f"{percent(request.tolerance, 2)}"
            )
    return None


def _result(
    request: PairsRequest,
    runs: list[CommandResult],
    analysis: PairsAnalysis | None,
    fault: str | None,
    folder: Path,
) -> CommandComparison:
    num_pairs = analysis.num_pairs if analysis else 0
    verdict: CommandVerdict = "undecided"
    if fault:
        verdict, sentence = "invalid", f"Not judged: {fault}."
    else:
        verdict = _verdict(request, analysis, runs)
        sentence = _sentence(request, analysis, verdict)
    return CommandComparison(
        verdict=verdict,
        sentence=sentence,
        commands=(redact(request.commands[0], os.environ), redact(request.commands[1], os.environ)),
        metric=request.metric.source,
        higher_is_better=request.higher_is_better,
        ratio=analysis and analysis.ratio,
        low=analysis and analysis.low,
        high=analysis and analysis.high,
        pairs=num_pairs,
        max_pairs=request.max_pairs,
        margin=request.margin,
        must_match=tuple(figure.source for figure in request.must_match),
        tolerance=request.tolerance,
        runs=tuple(runs),
        folder=str(folder),
    )


def _verdict(
    request: PairsRequest, analysis: PairsAnalysis | None, runs: list[CommandResult]
) -> CommandVerdict:
    """Return the verdict of the sequential test, or a likely one by the rule of `compare`."""
    if analysis is None:
        return "undecided"
    change = analysis.change
    is_likely = change == "undecided"
    is_time = request.metric.source == SECONDS
    if is_likely:
        prior = published_prior(variation_class(None)) if is_time else None
        values = _values(runs, analysis.num_pairs)
        change = compare_values(*values, request.margin, rule=FewRunsRule(prior)).change
    if change in ("undecided", "same"):
        return "undecided" if is_likely else "same"
    improves = change.endswith("higher") == request.higher_is_better
    word = ("slower", "faster")[improves] if is_time else ("worse", "better")[improves]
    return f"likely {word}" if is_likely else word  # pyright: ignore[reportReturnType]


def _values(runs: list[CommandResult], num_pairs: int) -> tuple[list[float], list[float]]:
    """Return the values of A and of B in the first pairs."""
    a, b = (
        [run.value or 0.0 for run in runs if run.side == letter and run.pair <= num_pairs]
        for letter in LETTERS
    )
    return a, b


def _sentence(
    request: PairsRequest, analysis: PairsAnalysis | None, verdict: CommandVerdict
) -> str:
    if analysis is None:
        return "Not proven: no pair was measured."
    figures = f"{_interval(analysis)}, margin {percent(request.margin)}"
    match verdict:
        case "same":
            return f"B is the same as A: {figures}."
        case "undecided" | "likely slower" | "likely faster" | "likely worse" | "likely better":
            why = (
                "further pairs are unlikely to decide"
                if analysis.conclusion == "futile"
                else f"{pluralize(analysis.num_pairs, 'pair')} did not decide"
            )
            head = "" if verdict == "undecided" else f"B is {verdict} than A. "
            return f"{head}Not proven: {why}: {figures}."
        case _:
            return f"B is {verdict} than A: {figures}."


def _interval(analysis: PairsAnalysis) -> str:
    low, high = percent_change(analysis.low), percent_change(analysis.high)
    return f"{percent_change(analysis.ratio)} (95% interval {low} to {high})"


def commands_document(comparison: CommandComparison) -> Document:
    """Return the comparison of two commands as a document for every output format."""
    columns = [
        Column("pair", "pair", justify="right"),
        *(Column(letter, letter, lambda v: significant(v, 4), "right") for letter in LETTERS),
    ]
    pairs = sorted({run.pair for run in comparison.runs})
    rows = [
        {"pair": pair, **{run.side: run.value for run in comparison.runs if run.pair == pair}}
        for pair in pairs
    ]
    return Document(
        kind="comparison of commands",
        title=f"{comparison.metric} of B compared with A",
        verdict=Verdict(verdict_label(comparison.verdict), verdict_tone(comparison.verdict)),
        setup=(
            f"{pluralize(comparison.pairs, 'pair')} of up to {comparison.max_pairs}",
            f"false-positive rate up to {percent(comparison.error, 0)}",
        ),
        answer=(comparison.sentence,),
        sections=(Table(columns=columns, rows=rows),),
        notes=(comparison.folder,),
        data=comparison,
    )
