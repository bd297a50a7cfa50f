"""A whole submission, or the description of a system, under the official checkers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import UserError
from paceline.files.log_file import LogFile
from paceline.logs.parser import as_text
from paceline.mlperf.check import check as mlperf_checking
from paceline.mlperf.check.check import checked, chosen_ruleset
from paceline.mlperf.check.findings import Check, CheckedFile, FileStatus, Finding
from paceline.mlperf.check.official import checker_rulesets, checker_version
from paceline.mlperf.check.tiny_rules import TINY_RULESET
from paceline.mlperf.result_logs import RESULTS, read_log
from paceline.mlperf.submission.description import faults
from paceline.mlperf.submission.findings import package_findings
from paceline.mlperf.submission.official import (
    Message,
    PackageVerdict,
    check_description_copy,
    check_package_copy,
)

SCALING = "scaling.json"
PARAMETERS = "package_checker_params"
KNOWN_FILES = (SCALING, PARAMETERS, "power")
"""What may lie beside the logs."""

Status = Literal["passed", "failed", "broken"]


def check(place: Path, ruleset: str | None = None) -> Check:
    """The official checkers' findings on a submission, a system description (.json), or on logs.

    Copies are checked, nothing else. Raises SystemFaultError without the official package, UserError
    for an unknown ruleset and for a place with nothing to check.
    """
    submission = is_submission(place)
    if not submission and place.suffix != ".json":
        return mlperf_checking.check(place, ruleset)
    version, known = checker_version(), checker_rulesets()
    chosen, origin = chosen_ruleset(place, ruleset, known)
    if chosen == TINY_RULESET:
        raise UserError(f"--ruleset {chosen}", "is for logs", allowed=", ".join(known))
    with tempfile.TemporaryDirectory(prefix="paceline-mlperf-") as scratch:
        if submission:
            status, files = _submission(place, chosen, Path(scratch))
        else:
            read = checked_description(place, place.name, chosen, Path(scratch))
            files, status = [read], _whole(read.status)
    return Check(
        place=as_text(str(place)),
        kind="submission" if submission else "description",
        ruleset=chosen,
        ruleset_from=origin,
        checker=f"mlperf-logging {version}",
        status=status,
        files=tuple(files),
    )


def _whole(status: FileStatus) -> Status:
    """What the status of the only file means for all of them."""
    return "broken" if status == "unreadable" else status


def is_submission(place: Path) -> bool:
    """Whether a folder is laid out as an organisation's submission."""
    return (place / "systems").is_dir() and (place / "results").is_dir()


def checked_description(path: Path, name: str, ruleset: str, scratch: Path) -> CheckedFile:
    """One system description: what is wrong with it, and the official checker's own verdict."""
    read = _described(path, name)
    if read.status == "failed":
        return read
    copy = scratch / "description.json"
    shutil.copyfile(path, copy)
    verdict = check_description_copy(copy, ruleset)
    return read if verdict.passed else _objected(read, verdict)


def copied_submission(place: Path, copy: Path) -> None:
    """Writes what the official checker reads of the submission at `place` to `copy`, logs unpacked."""
    for path in sorted((place / "systems").glob("*.json")):
        _copied_file(path, copy / "systems" / path.name)
    for folder in sorted(path for path in (place / "results").glob("*") if path.is_dir()):
        _copied_parameters(folder, copy / "results" / folder.name)
    for folder in result_folders(place):
        target = copy / folder.relative_to(place)
        target.mkdir(parents=True)
        _copied_parameters(folder, target)
        for log in _logs_in(folder):
            with (target / log.name.removesuffix(".gz")).open("wb") as opened:
                opened.writelines(LogFile(log))


def result_folders(place: Path) -> list[Path]:
    """The folders of a submission that hold the logs of one system and benchmark."""
    return sorted(path for path in (place / "results").glob("*/*") if path.is_dir())


def _submission(place: Path, ruleset: str, scratch: Path) -> tuple[Status, list[CheckedFile]]:
    copy = scratch / "copy"
    try:
        copied_submission(place, copy)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be read: {error.strerror}") from error
    descriptions = [
        _described(path, f"systems/{path.name}")
        for path in sorted((place / "systems").glob("*.json"))
    ]
    missing = list(_without_description(place, descriptions))
    if missing or not result_folders(place):
        # The official checker ends with a stack trace where a description is not there.
        empty = [] if missing else [_fault_of("results", "holds no folder <system>/<benchmark>")]
        return "failed", [*descriptions, *missing, *empty]
    verdict = check_package_copy(copy, ruleset)
    of_systems = [m for m in verdict.messages if m.level == "error" and not m.place]
    if of_systems and all(file.status == "passed" for file in descriptions):
        said = PackageVerdict(False, tuple(of_systems))
        descriptions = [_objected(file, said) for file in descriptions]
    files = [*descriptions]
    for folder in result_folders(place):
        said = [
            m
            for m in verdict.messages
            if Path(m.place).parts[1:] == folder.relative_to(place).parts
        ]
        files += [_checked_folder(place, folder, copy, said, verdict), *_checked_logs(folder, place, said, ruleset, scratch)]  # fmt: skip
    if verdict.broken:
        failed = any(file.status == "failed" for file in files)
        return "failed" if failed else "broken", files
    described = all(file.status == "passed" for file in descriptions)
    return "passed" if verdict.passed and described else "failed", files


def _described(path: Path, name: str) -> CheckedFile:
    """What is wrong with a system description by our own reading."""
    text, known, broken = _read_description(path)
    found = (broken,) if broken is not None else tuple(faults(text, known))
    return CheckedFile(file=as_text(name), status="failed" if found else "passed", findings=found)


def _objected(read: CheckedFile, verdict: PackageVerdict) -> CheckedFile:
    """A description that only the official checker objects to, in its words, or has no answer for."""
    said = [m.text for m in verdict.messages]
    found = tuple(Finding(key=None, line=None, message=text, official=text) for text in said)
    objects = any(m.level == "error" for m in verdict.messages)
    status: FileStatus = "broken" if verdict.broken and not objects else "failed"
    return read.model_copy(update={"status": status, "reason": verdict.broken, "findings": found})


def _checked_folder(
    place: Path, folder: Path, copy: Path, said: list[Message], verdict: PackageVerdict
) -> CheckedFile:
    """What is said of the logs of one benchmark together."""
    errors = tuple(package_findings(tuple(m for m in said if m.level == "error")))
    warnings = [*package_findings(tuple(m for m in said if m.level == "warning"))]
    warnings += _warnings(folder, copy / folder.relative_to(place))
    return CheckedFile(
        file=as_text(str(folder.relative_to(place))),
        status="failed" if errors else "broken" if verdict.broken else "passed",
        reason=verdict.broken,
        findings=errors,
        warnings=tuple(warnings),
    )


def _checked_logs(
    folder: Path, place: Path, said: list[Message], ruleset: str, scratch: Path
) -> Iterator[CheckedFile]:
    """Each log with its findings; a folder none of whose logs breaks a rule is not read again."""
    breaks = any("not comply" in message.text for message in said)
    for path in _logs_in(folder):
        name = as_text(str(path.relative_to(place)))
        if breaks:
            yield checked(read_log(path), ruleset, scratch).model_copy(update={"file": name})
        else:
            yield CheckedFile(file=name, status="passed")


def _warnings(folder: Path, copy: Path) -> Iterator[Finding]:
    """What the official checker does not say, or says of its own files."""
    others = [
        path.name
        for path in sorted(folder.iterdir())
        if not RESULTS.fullmatch(path.name) and path.name not in KNOWN_FILES
    ]
    if others:
        yield _warning(f"files that belong to no run: {as_text(', '.join(others[:5]))}")
    packed = [path.name for path in _logs_in(folder) if path.suffix == ".gz"]
    if packed:
        yield _warning(f"{len(packed)} logs are packed (.gz): a submission has them plain")
    stated, due = _factor(folder / SCALING), _factor(copy / SCALING)
    if stated != due and abs((stated or 1.0) - (due or 1.0)) > 1e-9:
        yield _warning(
            f"{SCALING} states {stated or 'nothing'}, the convergence test asks for {due or 'none'}"
        )


def _without_description(place: Path, known: list[CheckedFile]) -> Iterator[CheckedFile]:
    unread = {one.file for one in known if any(f.key is None for f in one.findings)}
    for system in sorted({folder.parent.name for folder in result_folders(place)}):
        path = f"systems/{system}.json"
        if not (place / path).is_file():
            yield _fault_of(f"results/{system}", f"has no description {path}")
        elif path in unread:
            yield _fault_of(f"results/{system}", f"was not checked: {path} cannot be read")


def _read_description(path: Path) -> tuple[str, dict[str, Any], Finding | None]:
    """The text, its fields, and why it has none."""
    try:
        text = path.read_text(encoding="utf-8")
        known = json.loads(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        return "", {}, _unreadable("it is no UTF-8 text", None)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        return "", {}, _unreadable(f"it is no JSON: {error}", line)
    if not isinstance(known, dict):
        return text, {}, _unreadable("it is no JSON object", 1)
    return text, known, None


def _unreadable(why: str, line: int | None) -> Finding:
    return Finding(key=None, line=line, message=why, official="")


def _fault_of(name: str, what: str) -> CheckedFile:
    finding = Finding(key=None, line=None, message=what, official="")
    return CheckedFile(file=as_text(name), status="failed", findings=(finding,))


def _warning(what: str) -> Finding:
    return Finding(key=None, line=None, message=what, official="")


def _factor(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["scaling_factor"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _logs_in(folder: Path) -> list[Path]:
    named = [(RESULTS.fullmatch(path.name), path) for path in folder.iterdir()]
    return [path for found, path in sorted(named, key=_number) if found]


def _number(named: tuple[Any, Path]) -> tuple[int, str]:
    found, path = named
    return (int(found["number"]) if found else -1, path.name)


def _copied_parameters(folder: Path, target: Path) -> None:
    if (folder / PARAMETERS).is_file():
        _copied_file(folder / PARAMETERS, target / PARAMETERS)


def _copied_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
