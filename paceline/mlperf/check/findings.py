"""Findings of the official checkers, by file."""

from __future__ import annotations

from typing import Literal

from paceline.core.value import Value
from paceline.mlperf.rules import UNOFFICIAL, RulesetOrigin

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
