"""Findings of the official checkers, by file, with their text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from paceline.core.text import one_line
from paceline.core.value import Value
from paceline.mlperf.rules import RULESET_ORIGINS, UNOFFICIAL, RulesetOrigin

FileStatus = Literal["passed", "failed", "error", "unreadable"]
CheckStatus = Literal["passed", "failed", "error"]


class CheckFinding(Value):
    """One violation of the rules."""

    key: str | None = None
    """Key of the result line, if the finding is about one."""
    line: int | None = None
    """Line in the unpacked log, counted from 1; None if no line is at fault."""
    message: str
    """Message of the official checker, verbatim, or of Paceline for its own findings."""


class CheckedFile(Value):
    """One log checked by the official rules."""

    file: str
    status: FileStatus
    """Outcome for this file; `error` means that the checker gave no complete answer."""
    reason: str | None = None
    """Reason if the file could not be read or fully checked."""
    findings: tuple[CheckFinding, ...] = ()
    warnings: tuple[CheckFinding, ...] = ()


class Check(Value):
    """Output of `paceline mlperf check`."""

    place: str
    kind: Literal["logs", "description", "submission"] = "logs"
    ruleset: str
    ruleset_from: RulesetOrigin
    checker: str
    """Name and version of the official checker."""
    official: Literal[False] = False
    label: str = UNOFFICIAL
    status: CheckStatus
    """Outcome for all files.

    `error` means that some file has no complete answer and none of the others failed. A submission
    passes with one log that breaks the rules: this run is the one dropped from the score.
    """
    files: tuple[CheckedFile, ...]


NOUNS = {"logs": "logs", "description": "descriptions", "submission": "files and folders"}
"""Noun for what each kind of check counts."""


def check_rows(check: Check) -> list[dict[str, Any]]:
    """Return one row per finding and warning; a log without any gets one row."""
    rows: list[dict[str, Any]] = []
    for file in check.files:
        head = {"file": file.file, "status": file.status}
        levels = [("finding", finding) for finding in file.findings]
        levels += [("warning", warning) for warning in file.warnings]
        rows += [
            {**head, "level": level, **finding.model_dump(mode="json")} for level, finding in levels
        ]
        if not levels:
            rows.append({**head, "message": file.reason})
    return rows


def check_lines(check: Check) -> Iterator[str]:
    """Yield the verdict on every log with its findings, as terminal lines."""
    passed = sum(file.status == "passed" for file in check.files)
    verdict = f"submission {check.status}: " if check.kind == "submission" else ""
    yield one_line(
        f"{verdict}{passed} of {len(check.files)} {NOUNS[check.kind]} pass {check.ruleset} "
        f"({RULESET_ORIGINS[check.ruleset_from]}), {check.checker} · {check.place}"
    )
    for file in check.files:
        yield from (one_line(line) for line in _file_lines(file))
    yield check.label


def _file_lines(file: CheckedFile) -> Iterator[str]:
    yield f"  {file.file}: {file.status}{f': {file.reason}' if file.reason else ''}"
    yield from (f"    {_place(finding)}{finding.message}" for finding in file.findings)
    yield from (f"    {_place(warning)}warning: {warning.message}" for warning in file.warnings)


def _place(finding: CheckFinding) -> str:
    return f"line {finding.line:,}: " if finding.line else ""
