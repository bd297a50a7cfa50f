"""Run the official checkers on a whole submission, a system description, or logs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.text import as_text
from paceline.core.units import pluralize
from paceline.files.documents import parse_json, read_text
from paceline.files.log_file import LogFile
from paceline.files.temporary import temporary_folder
from paceline.mlperf.check import compliance
from paceline.mlperf.check.compliance import TINY_RULESET, check_log, resolve_ruleset
from paceline.mlperf.check.findings import (
    Check,
    CheckedFile,
    CheckFinding,
    CheckStatus,
)
from paceline.mlperf.check.official_checker import (
    CheckerMessage,
    PackageVerdict,
    check_package_copy,
    checker_rulesets,
    checker_version,
)
from paceline.mlperf.result_logs import RESULT_FILES, read_log
from paceline.mlperf.submission.description_check import (
    check_description,
    read_description,
    with_verdict,
)

SCALING = "scaling.json"
PARAMETERS = "package_checker_params"
KNOWN_FILES = (SCALING, PARAMETERS, "power")
"""Files allowed next to the logs."""


def check(place: Path, ruleset: str | None = None) -> Check:
    """Return the findings on a submission, a system description (.json), or logs.

    Only copies are checked. Raises SystemFaultError without the official package. Raises UserError
    for an unknown ruleset and for a place with nothing to check.
    """
    submission = is_submission(place)
    if not submission and place.suffix != ".json":
        return compliance.check(place, ruleset)
    version, rulesets = checker_version(), checker_rulesets()
    name, origin = resolve_ruleset(place, ruleset, rulesets)
    if name == TINY_RULESET:
        raise UserError(f"--ruleset {name}", "is only for logs", allowed=", ".join(rulesets))
    status: CheckStatus
    with temporary_folder() as scratch:
        if submission:
            status, files = _check_submission(place, name, Path(scratch))
        else:
            description = check_description(place, place.name, name, Path(scratch))
            files = [description]
            status = "error" if description.status == "unreadable" else description.status
    return Check(
        place=as_text(str(place)),
        kind="submission" if submission else "description",
        ruleset=name,
        ruleset_from=origin,
        checker=f"mlperf-logging {version}",
        status=status,
        files=tuple(files),
    )


def is_submission(place: Path) -> bool:
    """Return whether a folder has the layout of an organization's submission."""
    return (place / "systems").is_dir() and (place / "results").is_dir()


def copy_submission(place: Path, copy: Path) -> None:
    """Copy the files that the official checker reads of a submission to `copy`, logs unpacked."""
    for path in _description_files(place):
        copy_file(path, copy / "systems" / path.name)
    for folder in sorted(path for path in (place / "results").glob("*") if path.is_dir()):
        _copy_parameters(folder, copy / "results" / folder.name)
    for folder in result_folders(place):
        target = copy / folder.relative_to(place)
        target.mkdir(parents=True)
        _copy_parameters(folder, target)
        for log in _logs_in(folder):
            with (target / log.name.removesuffix(".gz")).open("wb") as file:
                file.writelines(LogFile(log))


def result_folders(place: Path) -> list[Path]:
    """Return the folders of a submission that hold the logs of one system and benchmark."""
    return sorted(path for path in (place / "results").glob("*/*") if path.is_dir())


def copy_file(path: Path, target: Path) -> None:
    """Copy a file, creating the target's folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _check_submission(
    place: Path, ruleset: str, scratch: Path
) -> tuple[CheckStatus, list[CheckedFile]]:
    copy = scratch / "copy"
    try:
        copy_submission(place, copy)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be read: {error.strerror}") from error
    descriptions = [
        read_description(path, f"systems/{path.name}") for path in _description_files(place)
    ]
    missing = list(_without_description(place, descriptions))
    if missing or not result_folders(place):
        # The official checker crashes with a stack trace if a description is missing.
        empty = [] if missing else [_failed("results", "contains no folder <system>/<benchmark>")]
        return "failed", [*descriptions, *missing, *empty]
    verdict = check_package_copy(copy, ruleset)
    of_systems = tuple(message for message in verdict.errors if not message.place)
    if of_systems and all(file.status == "passed" for file in descriptions):
        of_descriptions = PackageVerdict(False, of_systems)
        descriptions = [with_verdict(file, of_descriptions) for file in descriptions]
    files = [*descriptions]
    for folder in result_folders(place):
        parts = folder.relative_to(place).parts
        messages = [m for m in verdict.messages if Path(m.place).parts[1:] == parts]
        files.append(_check_folder(place, folder, copy, messages, verdict.checker_error))
        files += _check_logs(folder, place, messages, ruleset, scratch)
    if verdict.checker_error:
        failed = any(file.status == "failed" for file in files)
        return "failed" if failed else "error", files
    descriptions_pass = all(file.status == "passed" for file in descriptions)
    return "passed" if verdict.passed and descriptions_pass else "failed", files


def _check_folder(
    place: Path,
    folder: Path,
    copy: Path,
    messages: Sequence[CheckerMessage],
    checker_error: str | None,
) -> CheckedFile:
    """Return the result for the logs of one benchmark together."""
    errors = tuple(CheckFinding(message=m.text) for m in messages if m.level == "error")
    warnings = [m.text for m in messages if m.level == "warning"]
    warnings += _warnings(folder, copy / folder.relative_to(place))
    return CheckedFile(
        file=as_text(str(folder.relative_to(place))),
        status="failed" if errors else "error" if checker_error else "passed",
        reason=checker_error,
        findings=errors,
        warnings=tuple(CheckFinding(message=warning) for warning in warnings),
    )


def _check_logs(
    folder: Path, place: Path, messages: Sequence[CheckerMessage], ruleset: str, scratch: Path
) -> Iterator[CheckedFile]:
    """Yield each log with its findings; logs are read again only if one breaks a rule."""
    breaks = any("not comply" in message.text for message in messages)
    for path in _logs_in(folder):
        name = as_text(str(path.relative_to(place)))
        if breaks:
            yield check_log(read_log(path), ruleset, scratch).model_copy(update={"file": name})
        else:
            yield CheckedFile(file=name, status="passed")


def _warnings(folder: Path, copy: Path) -> Iterator[str]:
    """Yield warnings that the official checker does not give, or gives on its own files only."""
    others = [
        path.name
        for path in sorted(folder.iterdir())
        if not RESULT_FILES.fullmatch(path.name) and path.name not in KNOWN_FILES
    ]
    if others:
        names = as_text(", ".join(others[:5]))
        yield f"files that do not belong to a run: {names}"
    packed = [path.name for path in _logs_in(folder) if path.suffix == ".gz"]
    if packed:
        logs = pluralize(len(packed), "log", "are")
        yield f"{logs} compressed (.gz); a submission needs plain files"
    file_factor, factor = _scaling_factor(folder / SCALING), _scaling_factor(copy / SCALING)
    if file_factor != factor and abs((file_factor or 1.0) - (factor or 1.0)) > 1e-9:
        yield (
            f"{SCALING} has the factor {file_factor or 'none'}, the convergence test gives "
            f"{factor or 'none'}"
        )


def _without_description(place: Path, descriptions: list[CheckedFile]) -> Iterator[CheckedFile]:
    unread = {file.file for file in descriptions if any(f.key is None for f in file.findings)}
    for system in sorted({folder.parent.name for folder in result_folders(place)}):
        path = f"systems/{system}.json"
        if not (place / path).is_file():
            yield _failed(f"results/{system}", f"has no description {path}")
        elif path in unread:
            yield _failed(f"results/{system}", f"was not checked: {path} cannot be read")


def _failed(name: str, message: str) -> CheckedFile:
    findings = (CheckFinding(message=message),)
    return CheckedFile(file=as_text(name), status="failed", findings=findings)


def _scaling_factor(path: Path) -> float | None:
    try:
        return float(parse_json(read_text(path))["scaling_factor"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _description_files(place: Path) -> list[Path]:
    return sorted((place / "systems").glob("*.json"))


def _logs_in(folder: Path) -> list[Path]:
    """Return the logs in a folder, ordered by run number."""
    matches = [
        (match, path) for path in folder.iterdir() if (match := RESULT_FILES.fullmatch(path.name))
    ]
    by_number = sorted(matches, key=lambda pair: (int(pair[0]["number"]), pair[1].name))
    return [path for _, path in by_number]


def _copy_parameters(folder: Path, target: Path) -> None:
    if (folder / PARAMETERS).is_file():
        copy_file(folder / PARAMETERS, target / PARAMETERS)
