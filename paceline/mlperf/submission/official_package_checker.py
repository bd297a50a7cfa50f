"""Run the official package and system description checkers on copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.mlperf.check.official_checker import program_answer

PROGRAM = Path(__file__).with_name("package_checker_program.py")
CHECK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class CheckerMessage:
    """One message of the checker, verbatim; `place` is the folder of logs that it refers to."""

    level: Literal["warning", "error"]
    place: str
    text: str


@dataclass(frozen=True)
class PackageVerdict:
    """Answer of the official checker on a package or a description."""

    passed: bool
    messages: tuple[CheckerMessage, ...] = ()
    checker_error: str | None = None
    """Reason for an incomplete answer."""

    @property
    def errors(self) -> tuple[CheckerMessage, ...]:
        """Messages of level error."""
        return tuple(message for message in self.messages if message.level == "error")


def check_package_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """Return the verdict on a copied submission (systems/, results/).

    The checker writes scaling.json into the copy.
    """
    return _verdict("package", ruleset, copy)


def check_description_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """Return the verdict on a copied system description."""
    return _verdict("system", ruleset, copy)


def _verdict(what: str, ruleset: str, copy: Path) -> PackageVerdict:
    arguments = [what, ruleset, copy.name]
    answer, checker_error = program_answer(PROGRAM, arguments, copy.parent, CHECK_TIMEOUT_S)
    messages = (CheckerMessage(*fields) for fields in answer.get("messages", ()))
    return PackageVerdict(bool(answer.get("passed")), tuple(messages), checker_error)
