"""Starts the official compliance checker on copies: it never sees a file of the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.files.log_file import LogFile

PROGRAM = Path(__file__).with_name("checker_program.py")
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
            "mlperf check",
            f"the official package {PACKAGE} is not installed",
            remedy="install it with `pip install 'paceline[mlperf]'`",
        ) from error


def checker_rulesets(benchmark: str | None = None) -> list[str]:
    """Rounds of MLPerf Training whose rules the installed package has, oldest first.

    With a `benchmark` those alone that have it in the closed division; none for an unknown one.
    """
    package = util.find_spec("mlperf_logging")
    places = package.submodule_search_locations if package else None
    folders = [path for place in places or () for path in Path(place).glob("*/training_?.?.?")]
    folders = [path for path in folders if path.is_dir()]
    if benchmark is not None:
        rules_file = f"closed_{benchmark}.yaml"
        folders = [path for path in folders if rules_file in {p.name for p in path.iterdir()}]
    names = {path.name.removeprefix("training_") for path in folders}
    names = {name for name in names if all(part.isdigit() for part in name.split("."))}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def copy_unpacked(log: Path, copy: Path) -> str | None:
    """Writes `log`, unpacked, to `copy`; says why when it could not be read to its end."""
    file = LogFile(log)
    with copy.open("wb") as target:
        target.writelines(file)
    return file.broken_off


def check_copy(
    copy: Path, ruleset: str, changes: Mapping[str, object] | None = None
) -> CheckerVerdict:
    """The verdict on `copy`, from a process that runs in its folder and knows nothing else.

    `changes` are those of what it is checked by: see the program.
    """
    arguments = [ruleset, copy.name, json.dumps(changes or {})]
    answer, broken = program_answer(PROGRAM, arguments, copy.parent, LONGEST_CHECK_S)
    return CheckerVerdict(
        messages=tuple(answer.get("messages", ())),
        warnings=tuple(answer.get("warnings", ())),
        unread=tuple((text, why) for text, why in answer.get("unread", ())),
        broken=broken,
    )


def program_answer(
    program: Path, arguments: Sequence[str], folder: Path, limit_s: float
) -> tuple[dict[str, Any], str | None]:
    """The JSON that a checker's program prints, and why there is no whole answer.

    It runs in `folder`, for at most `limit_s`.
    """
    command = [sys.executable, "-P", str(program), *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit_s,
            # Some messages list a set of keys: with a fixed seed always in the same order.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired:
        return {}, f"the checker took longer than {limit_s:g} s"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {}, _last_words(done.stderr)
    if "refused" in answer:
        name = answer["refused"]
        return answer, f"{name!r} is no name of a benchmark or division: the checker was not run"
    return answer, None if answer["finished"] else _last_words(done.stderr)


def _last_words(errors: str) -> str:
    """How a checker ended that gave no answer."""
    last = errors.strip().splitlines()[-1:] or ["without a word"]
    return f"the checker broke off: {last[0][:300]}"
