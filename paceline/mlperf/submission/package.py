"""Build a submission's folder from runs, a system description and the code.

The package is built from copies, checked, and then moved into place.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.units import pluralize
from paceline.core.value import Value
from paceline.engines.log_reading.mllog import records
from paceline.files.documents import parse_json, read_text
from paceline.files.log_file import LogFile
from paceline.logs.parser import as_text
from paceline.mlperf.check.findings import Check
from paceline.mlperf.check.official_checker import ResultLines
from paceline.mlperf.result_logs import PLACEHOLDER
from paceline.mlperf.rules import UNOFFICIAL, RefusedError, is_tiny, not_a_result
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.score import Score
from paceline.mlperf.submission.description_check import DIVISIONS, faults, is_placeholder
from paceline.mlperf.submission.package_check import SCALING, check, copy_file

LEFT_OUT = (".git", "__pycache__", ".venv", ".pytest_cache", "*.pyc")
"""Patterns of files in the code folder that are not copied."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")


class PackagedRuns(Value):
    """Runs of one benchmark, as packaged."""

    benchmark: str
    source: str
    files: dict[str, str]
    """Map of the name in the package to the name in the source."""
    score_minutes: float | None
    scaling_factor: float | None


class Package(Value):
    """Output of `paceline mlperf package`."""

    folder: str | None
    """Folder of the package; None if the official checker rejects it, and nothing is written."""
    organisation: str
    division: str
    system: str
    results: tuple[PackagedRuns, ...]
    warnings: tuple[str, ...]
    check: Check
    official: Literal[False] = False
    label: str = UNOFFICIAL


@dataclass(frozen=True)
class PackageRequest:
    """Input and options of a package."""

    places: tuple[Path, ...]
    organisation: str
    division: str
    system: Path
    code: Mapping[str, Path]
    """Code folder by benchmark; the one under "" is for all others."""
    out: Path
    ruleset: str | None = None
    placeholders: bool = False
    """True to accept placeholders in logs."""


def package(request: PackageRequest) -> Package:
    """Build and check the submission; it is moved into place only if the official checker passes.

    Files are copied, never moved or changed, and nothing is overwritten. Raises UserError for
    unsuitable input and RefusedError for what the rules reject.
    """
    _check_names(request)
    target = request.out / request.organisation
    if target.exists() or target.is_symlink():
        raise UserError(
            str(target), "exists, and nothing is overwritten", remedy="give another --output"
        )
    _check_description(request)
    scores = [_submittable_score(place, request) for place in request.places]
    _check_distinct(scores)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=request.out, prefix=".paceline-") as scratch:
            made = Path(scratch) / request.organisation
            results = [
                _copy_runs(made, place, score, request)
                for place, score in zip(request.places, scores, strict=True)
            ]
            copy_file(request.system, made / "systems" / request.system.name)
            checked = check(made, request.ruleset or scores[0].ruleset)
            if checked.status == "passed":
                made.rename(target)
    except OSError as error:
        place = str(error.filename or request.out)
        raise SystemFaultError(place, f"cannot be written: {error.strerror}") from error
    return Package(
        folder=str(target) if checked.status == "passed" else None,
        organisation=request.organisation,
        division=request.division,
        system=request.system.stem,
        results=tuple(results),
        warnings=tuple(text for score in scores for text in _doubts(score, request)),
        check=checked.model_copy(update={"place": as_text(str(target))}),
    )


def _check_names(request: PackageRequest) -> None:
    """Raise UserError for names that cannot be folders, and RefusedError for placeholders."""
    organisation, division = request.organisation, request.division
    if is_placeholder(organisation):
        raise RefusedError(f"--org {organisation}", "is a placeholder, not an organisation")
    for option, name in (("--org", organisation), ("--system", request.system.stem)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{option} {name}",
                "cannot be the name of a folder in a submission",
                allowed="letters, digits, _ . + -",
            )
    if division not in DIVISIONS:
        raise UserError(f"--division {division}", "is unknown", allowed=", ".join(DIVISIONS))
    for place in (*request.places, *request.code.values()):
        if not place.is_dir():
            raise UserError(str(place), "is no folder")
    for code in request.code.values():
        if request.out.resolve().is_relative_to(code.resolve()):
            raise UserError(
                f"--output {request.out}", f"lies in the code {code} that is copied into it"
            )


def _check_description(request: PackageRequest) -> None:
    """Raise RefusedError for a description that has open or wrong fields or does not match."""
    path = request.system
    try:
        text = read_text(path)
        description = json.loads(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(str(path), f"is no JSON: {error}") from error
    if not isinstance(description, dict):
        raise UserError(str(path), "is no system description: no JSON object")
    for name in (path.stem, str(description.get("system_name"))):
        if is_tiny(name):
            raise RefusedError(str(path), f"its system {name[:60]!r} is that of small siblings")
    findings = faults(text, description)
    if findings:
        listed = "; ".join(finding.message for finding in findings[:5])
        more = f" and {len(findings) - 5} more" if len(findings) > 5 else ""
        raise RefusedError(
            f"{path}:{findings[0].line or 1}",
            f"{listed}{more}",
            remedy="fill it in, and see `paceline mlperf check FILE`",
        )
    for field, due in (("submitter", request.organisation), ("division", request.division)):
        if description[field] != due:
            raise RefusedError(str(path), f"its {field} is {description[field]!r}, not {due!r}")


def _submittable_score(place: Path, request: PackageRequest) -> Score:
    """Return the score of the runs at `place`; raises RefusedError if it cannot be submitted."""
    scored = score(place, request.ruleset)
    open_to_convergence = request.division == "open" and scored.status != "incomplete"
    if scored.status != "ok" and not open_to_convergence:
        raise RefusedError(str(place), f"has no score: {scored.reason}")
    if scored.benchmark not in request.code and "" not in request.code:
        raise UserError(
            "--code",
            f"names no code for {scored.benchmark}",
            remedy="the rules want the code that made a result",
        )
    for name in _files(scored):
        _check_log(place / name, request)
    return scored


def _check_log(log: Path, request: PackageRequest) -> None:
    """Raise RefusedError for a log that is not a result or belongs to another submission."""
    if not log.is_file():
        raise RefusedError(
            str(log),
            "a file holds several trials; a submission has one a file",
            remedy="put each trial into a file of its own",
        )
    if reason := not_a_result(records(LogFile(log))):
        raise RefusedError(str(log), f"is not an MLPerf result: {reason}")
    lines = ResultLines.of(b"".join(LogFile(log)))
    due = {"submission_org": request.organisation, "submission_division": request.division}
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        key, value = record.get("key"), str(record.get("value"))
        if key not in due or value == due[key]:
            continue
        if PLACEHOLDER not in value:
            raise RefusedError(f"{log}:{number}", f"{key} is {value[:60]!r}, not {due[key]!r}")
        if not request.placeholders:
            raise RefusedError(
                f"{log}:{number}",
                f"{key} was never filled in: {value[:60]!r}",
                remedy="logs are not changed: run with the name set, or take them as they are with "
                "--allow-placeholders and answer for it in the review",
            )


def _check_distinct(scores: Sequence[Score]) -> None:
    names = [score.benchmark for score in scores]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError("DIR", f"two folders hold {twice}", remedy="a system has one result each")
    rulesets = sorted({score.ruleset for score in scores})
    if len(rulesets) > 1:
        raise UserError(
            "DIR",
            f"the folders are of different rounds: {', '.join(rulesets)}",
            remedy="--ruleset names one",
        )


def _copy_runs(made: Path, place: Path, scored: Score, request: PackageRequest) -> PackagedRuns:
    """Copy the runs of one benchmark and its code below `made`."""
    benchmark = scored.benchmark
    folder = made / "results" / request.system.stem / benchmark
    folder.mkdir(parents=True)
    names = {f"result_{number}.txt": name for number, name in enumerate(_files(scored))}
    for name, source in names.items():
        with (folder / name).open("wb") as opened:
            opened.writelines(LogFile(place / source))
    factor = scored.scaling_factor if request.division == "closed" else None
    if factor and factor > 1:
        (folder / SCALING).write_text(json.dumps({"scaling_factor": factor}), encoding="utf-8")
    code = request.code.get(benchmark) or request.code[""]
    implementation = made / "benchmarks" / benchmark / "implementations" / code.resolve().name
    shutil.copytree(
        code,
        implementation,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
        ignore_dangling_symlinks=True,
    )
    return PackagedRuns(
        benchmark=benchmark,
        source=as_text(str(place)),
        files=names,
        score_minutes=scored.score_minutes,
        scaling_factor=scored.scaling_factor,
    )


def _files(scored: Score) -> tuple[str, ...]:
    """Return the logs of the chosen window, by start time."""
    return next((window.files for window in scored.windows if window.chosen), ())


def _doubts(scored: Score, request: PackageRequest) -> Iterable[str]:
    """Yield the points that a review would question but that do not prevent a submission."""
    yield from (f"{scored.benchmark}: {warning}" for warning in scored.warnings)
    description = parse_json(read_text(request.system))
    nodes, per_node = description["number_of_nodes"], description["accelerators_per_node"]
    described = int(nodes) * int(per_node)
    if scored.num_devices and described and scored.num_devices != described:
        yield (
            f"{scored.benchmark}: the logs speak of "
            f"{pluralize(scored.num_devices, 'accelerator')}, the description of {described:,}"
        )
