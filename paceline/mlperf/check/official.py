"""Starts the official compliance checker on copies: it never sees a file of the user's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.files.log_file import LogFile

PROGRAM = Path(__file__).with_name("official_checker.py")
PACKAGE = "mlperf-logging"
LONGEST_CHECK_S = 300.0


@dataclass(frozen=True)
class CheckerVerdict:
    """What the official checker says of one log, in its own words."""

    messages: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    """Result lines that it could not parse, and why."""
    broken: str | None = None
    """Why there is no whole answer."""


def checker_version() -> str:
    """Version of the official package; raises SystemFaultError when it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise SystemFaultError(
            "mlperf check", f"the official package {PACKAGE} is not installed",
            remedy="install it with `pip install 'paceline[mlperf]'`",
        ) from error  # fmt: skip


def checker_rulesets() -> list[str]:
    """Rounds of MLPerf Training whose rules the installed package has, oldest first."""
    found = util.find_spec("mlperf_logging")
    places = found.submodule_search_locations if found else None
    folders = [path for place in places or () for path in Path(place).glob("*/training_?.?.?")]
    names = {path.name.removeprefix("training_") for path in folders if path.is_dir()}
    names = {name for name in names if all(part.isdigit() for part in name.split("."))}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def copied(log: Path, copy: Path) -> str | None:
    """Writes `log`, unpacked, to `copy`; says why when it could not be read to its end."""
    file = LogFile(log)
    with copy.open("wb") as target:
        target.writelines(file)
    return file.broken_off


def check_copy(copy: Path, ruleset: str, own: Mapping[str, object] | None = None) -> CheckerVerdict:
    """The verdict on `copy`, from a process that runs in its folder and knows nothing else.

    `own` changes what it is checked by: see the program.
    """
    command = [sys.executable, "-P", str(PROGRAM), ruleset, copy.name, json.dumps(own or {})]
    try:
        done = subprocess.run(
            command, cwd=copy.parent, capture_output=True, text=True, timeout=LONGEST_CHECK_S
        )
    except subprocess.TimeoutExpired:
        return CheckerVerdict(broken=f"the checker took longer than {LONGEST_CHECK_S:g} s")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return CheckerVerdict(broken=last_words(done.stderr))
    broken = None
    if "refused" in answer:
        broken = (
            f"{answer['refused']!r} is no name of a benchmark or division: the checker was not run"
        )
    elif not answer["finished"]:
        broken = last_words(done.stderr)
    return CheckerVerdict(
        messages=tuple(answer["messages"]),
        warnings=tuple(answer["warnings"]),
        unread=tuple((text, why) for text, why in answer["unread"]),
        broken=broken,
    )


def last_words(errors: str) -> str:
    """How a checker ended that gave no answer."""
    last = errors.strip().splitlines()[-1:] or ["without a word"]
    return f"the checker broke off: {last[0][:300]}"
