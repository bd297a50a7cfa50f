"""Build a submission's folder from runs, a system description and the code.

The package is built from copies, checked, and then moved into place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.text import as_text
from paceline.core.units import pluralize
from paceline.core.value import Value
from paceline.engines.log_reading.mllog import records
from paceline.files.documents import parse_json, read_text
from paceline.files.log_file import LogFile
from paceline.files.temporary import temporary_folder
from paceline.mlperf.check.findings import Check
from paceline.mlperf.check.official_checker import ResultLines
from paceline.mlperf.result_logs import PLACEHOLDER
from paceline.mlperf.rules import UNOFFICIAL, RuleViolationError, is_tiny, not_a_result
from paceline.mlperf.score.run_set import score
from paceline.mlperf.score.score import Score
from paceline.mlperf.submission.description_check import DIVISIONS, faults, is_placeholder
from paceline.mlperf.submission.package_check import SCALING, check, copy_file

EXCLUDED_FILES = (".git", "__pycache__", ".venv", ".pytest_cache", "*.pyc")
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
    organization: str
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
    organization: str
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
    unsuitable input and RuleViolationError for what the rules reject.
    """
    _check_names(request)
    target = request.out / request.organization
    if target.exists() or target.is_symlink():
        raise UserError(str(target), "already exists", remedy="choose another --output")
    _check_description(request)
    scores = [_submittable_score(place, request) for place in request.places]
    _check_distinct(scores)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        with temporary_folder(request.out) as scratch:
            folder = Path(scratch) / request.organization
            results = [
                _copy_runs(folder, place, score, request)
                for place, score in zip(request.places, scores, strict=True)
            ]
            copy_file(request.system, folder / "systems" / request.system.name)
            result = check(folder, request.ruleset or scores[0].ruleset)
            if result.status == "passed":
                folder.rename(target)
    except OSError as error:
        place = str(error.filename or request.out)
        raise SystemFaultError(place, f"cannot be written: {error.strerror}") from error
    return Package(
        folder=str(target) if result.status == "passed" else None,
        organization=request.organization,
        division=request.division,
        system=request.system.stem,
        results=tuple(results),
        warnings=tuple(text for score in scores for text in _warnings(score, request)),
        check=result.model_copy(update={"place": as_text(str(target))}),
    )


def _check_names(request: PackageRequest) -> None:
    """Raise UserError for names that cannot be folders, and RuleViolationError for placeholders."""
    organization, division = request.organization, request.division
    if is_placeholder(organization):
        raise RuleViolationError(f"--org {organization}", "is a placeholder, not an organization")
    for option, name in (("--org", organization), ("--system", request.system.stem)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{option} {name}",
                "is not a valid folder name in a submission",
                allowed="letters, digits, _ . + -",
            )
    if division not in DIVISIONS:
        raise UserError(f"--division {division}", "is unknown", allowed=", ".join(DIVISIONS))
    for place in (*request.places, *request.code.values()):
        if not place.is_dir():
            raise UserError(str(place), "is not a folder")
    for code in request.code.values():
        if request.out.resolve().is_relative_to(code.resolve()):
            raise UserError(
                f"--output {request.out}", f"is inside the code folder {code}, which is copied"
            )


def _check_description(request: PackageRequest) -> None:
    """Raise RuleViolationError for a description with open, wrong or contradictory fields."""
    path = request.system
    try:
        text = read_text(path)
        description = parse_json(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(description, dict):
        raise UserError(str(path), "is not a system description: not a JSON object")
    for name in (path.stem, str(description.get("system_name"))):
        if is_tiny(name):
            raise RuleViolationError(
                str(path), f"its system {name[:60]!r} is that of tiny variants"
            )
    findings = faults(text, description)
    if findings:
        messages = "; ".join(finding.message for finding in findings[:5])
        more = f" and {len(findings) - 5} more" if len(findings) > 5 else ""
        raise RuleViolationError(
            f"{path}:{findings[0].line or 1}",
            f"{messages}{more}",
            remedy="complete it, then run `paceline mlperf check FILE`",
        )
    for field, expected in (("submitter", request.organization), ("division", request.division)):
        if description[field] != expected:
            raise RuleViolationError(
                str(path), f"its {field} is {description[field]!r}, not {expected!r}"
            )


def _submittable_score(place: Path, request: PackageRequest) -> Score:
    """Return the score of the runs; raises RuleViolationError if it cannot be submitted."""
    runs_score = score(place, request.ruleset)
    open_to_convergence = request.division == "open" and runs_score.status != "incomplete"
    if runs_score.status != "ok" and not open_to_convergence:
        raise RuleViolationError(str(place), f"has no score: {runs_score.reason}")
    if runs_score.benchmark not in request.code and "" not in request.code:
        raise UserError(
            "--code",
            f"gives no code for {runs_score.benchmark}",
            remedy="the rules require the code of every result",
        )
    for name in _files(runs_score):
        _check_log(place / name, request)
    return runs_score


def _check_log(log: Path, request: PackageRequest) -> None:
    """Raise RuleViolationError for a log that is not a result or belongs to another submission."""
    if not log.is_file():
        raise RuleViolationError(
            str(log),
            "contains several trials; a submission needs one file per trial",
            remedy="split the file",
        )
    if reason := not_a_result(records(LogFile(log))):
        raise RuleViolationError(str(log), f"is not an MLPerf result: {reason}")
    lines = ResultLines.of(LogFile(log))
    expected = {"submission_org": request.organization, "submission_division": request.division}
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        key, value = record.get("key"), str(record.get("value"))
        if key not in expected or value == expected[key]:
            continue
        if PLACEHOLDER not in value:
            raise RuleViolationError(
                f"{log}:{number}", f"{key} is {value[:60]!r}, not {expected[key]!r}"
            )
        if not request.placeholders:
            raise RuleViolationError(
                f"{log}:{number}",
                f"{key} is a placeholder: {value[:60]!r}",
                remedy="logs are never changed: run again with the name set, or accept them with "
                "--allow-placeholders and explain it in the review",
            )


def _check_distinct(scores: Sequence[Score]) -> None:
    names = [score.benchmark for score in scores]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            "DIR", f"two folders contain {twice}", remedy="give one folder per benchmark"
        )
    rulesets = sorted({score.ruleset for score in scores})
    if len(rulesets) > 1:
        raise UserError(
            "DIR",
            f"the folders have different rounds: {', '.join(rulesets)}",
            remedy="select one with --ruleset",
        )


def _copy_runs(root: Path, place: Path, runs_score: Score, request: PackageRequest) -> PackagedRuns:
    """Copy the runs of one benchmark and its code below `made`."""
    benchmark = runs_score.benchmark
    folder = root / "results" / request.system.stem / benchmark
    folder.mkdir(parents=True)
    names = {f"result_{number}.txt": name for number, name in enumerate(_files(runs_score))}
    for name, source in names.items():
        with (folder / name).open("wb") as file:
            file.writelines(LogFile(place / source))
    factor = runs_score.scaling_factor if request.division == "closed" else None
    if factor and factor > 1:
        (folder / SCALING).write_text(json.dumps({"scaling_factor": factor}), encoding="utf-8")
    code = request.code.get(benchmark) or request.code[""]
    implementation = root / "benchmarks" / benchmark / "implementations" / code.resolve().name
    _check_links(code)
    ignore = shutil.ignore_patterns(*EXCLUDED_FILES)
    shutil.copytree(code, implementation, ignore=ignore, ignore_dangling_symlinks=True)
    return PackagedRuns(
        benchmark=benchmark,
        source=as_text(str(place)),
        files=names,
        score_minutes=runs_score.score_minutes,
        scaling_factor=runs_score.scaling_factor,
    )


def _check_links(code: Path) -> None:
    """Raise UserError for a link to what is not copied, and for a pipe or device.

    A copy would publish the file that a link points to.
    """
    root = code.resolve()
    excluded = shutil.ignore_patterns(*EXCLUDED_FILES)
    for folder, folders, files in os.walk(root):
        to_skip = excluded(folder, [*folders, *files])
        folders[:] = [name for name in folders if name not in to_skip]
        for path in (Path(folder) / name for name in (*folders, *files) if name not in to_skip):
            target = path.resolve()
            inside = target.is_relative_to(root) and not excluded(
                folder, [*target.relative_to(root).parts]
            )
            if path.is_symlink() and target.exists() and not (inside and target.is_file()):
                what = "is a link to a folder, or to a file that is not copied"
            elif target.exists() and not (target.is_file() or target.is_dir()):
                what = "is neither a file nor a folder"
            else:
                continue
            raise UserError(
                str(code / path.relative_to(root)), what, remedy="remove it, or copy the file there"
            )


def _files(runs_score: Score) -> tuple[str, ...]:
    """Return the logs of the chosen window, by start time."""
    return next((window.files for window in runs_score.windows if window.chosen), ())


def _warnings(runs_score: Score, request: PackageRequest) -> Iterable[str]:
    """Yield what a reviewer would question but what does not prevent a submission."""
    yield from (f"{runs_score.benchmark}: {warning}" for warning in runs_score.warnings)
    description = parse_json(read_text(request.system))
    nodes, per_node = description["number_of_nodes"], description["accelerators_per_node"]
    num_described = int(nodes) * int(per_node)
    if runs_score.num_devices and num_described and runs_score.num_devices != num_described:
        yield (
            f"{runs_score.benchmark}: the logs report "
            f"{pluralize(runs_score.num_devices, 'accelerator')}, the description {num_described:,}"
        )
