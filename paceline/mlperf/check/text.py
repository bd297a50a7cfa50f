"""Checks of MLPerf logs and submissions as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.text import one_line
from paceline.mlperf.check.findings import Check, CheckedFile, CheckFinding
from paceline.mlperf.rules import RULESET_ORIGINS

NOUNS = {"logs": "logs", "description": "descriptions", "submission": "files and folders"}
"""What a check of each kind counts."""


def check_rows(check: Check) -> list[dict[str, Any]]:
    """Each finding and warning as a row; a log without any is one row."""
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
    """The verdict on every log with its findings, for a terminal."""
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
