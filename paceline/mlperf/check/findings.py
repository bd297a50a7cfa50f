"""What the official checkers object to: findings, the files that have them, the whole answer."""

from __future__ import annotations

from typing import Literal

from paceline.core.value import Value
from paceline.mlperf.rules import UNOFFICIAL, RulesetOrigin

FileStatus = Literal["passed", "failed", "broken", "unreadable"]
CheckStatus = Literal["passed", "failed", "broken"]


class CheckFinding(Value):
    """One thing that the rules object to."""

    key: str | None = None
    line: int | None = None
    """In the log as it is read, unpacked, from 1; None where no line is at fault."""
    message: str
    """In the official checker's own words, but for what Paceline itself finds."""


class CheckedFile(Value):
    """One log under the official rules."""

    file: str
    status: FileStatus
    """`broken`: the checker gave no whole answer."""
    reason: str | None = None
    findings: tuple[CheckFinding, ...] = ()
    warnings: tuple[CheckFinding, ...] = ()


class Check(Value):
    """What `paceline mlperf check` answers."""

    place: str
    kind: Literal["logs", "description", "submission"] = "logs"
    ruleset: str
    ruleset_from: RulesetOrigin
    checker: str
    official: Literal[False] = False
    label: str = UNOFFICIAL
    status: CheckStatus
    """`broken`: some file has no whole answer, and none of the others failed.

    A submission passes with one log that breaks the rules: it is the run that is dropped.
    """
    files: tuple[CheckedFile, ...]
