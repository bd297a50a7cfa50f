"""Starts the official package and system description checkers on copies."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.mlperf.check.official import last_words

PROGRAM = Path(__file__).with_name("official_checker.py")
LONGEST_CHECK_S = 600.0


@dataclass(frozen=True)
class Message:
    """One message of the checker in its own words; `place` is the folder of logs that it was at."""

    level: Literal["warning", "error"]
    place: str
    text: str


@dataclass(frozen=True)
class PackageVerdict:
    """What the official checker says of a package or a description."""

    passed: bool
    messages: tuple[Message, ...] = ()
    broken: str | None = None
    """Why there is no whole answer."""


def check_package_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """The verdict on a copied submission (systems/ and results/); scaling.json is written into it."""
    return _answer("package", ruleset, copy)


def check_description_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """The verdict on a copied system description."""
    return _answer("system", ruleset, copy)


def _answer(what: str, ruleset: str, copy: Path) -> PackageVerdict:
    command = [sys.executable, "-P", str(PROGRAM), what, ruleset, copy.name]
    try:
        done = subprocess.run(
            command, cwd=copy.parent, capture_output=True, text=True, timeout=LONGEST_CHECK_S
        )
    except subprocess.TimeoutExpired:
        return PackageVerdict(False, broken=f"the checker took longer than {LONGEST_CHECK_S:g} s")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return PackageVerdict(False, broken=last_words(done.stderr))
    broken = None
    if "refused" in answer:
        broken = (
            f"{answer['refused']!r} is no name of a benchmark or division: the checker was not run"
        )
    elif not answer["finished"]:
        broken = last_words(done.stderr)
    said = tuple(Message(level, place, text) for level, place, text in answer["messages"])
    return PackageVerdict(bool(answer.get("passed")), said, broken)
