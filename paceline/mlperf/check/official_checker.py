"""Run the official checkers on copies; they never see a user's file.

Each message is mapped to the key and the line of the file that it is about.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import SystemFaultError
from paceline.files.documents import parse_json, read_lines
from paceline.files.log_file import LogFile
from paceline.files.programs import run_program
from paceline.mlperf.check.findings import CheckFinding

PROGRAM = Path(__file__).with_name("checker_program.py")
PACKAGE = "mlperf-logging"
CHECK_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class CheckerVerdict:
    """Messages of the official checker on one log, verbatim."""

    messages: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unparsable: tuple[tuple[str, str], ...] = ()
    """Result lines that it could not parse, each with the reason."""
    checker_error: str | None = None
    """Reason for an incomplete answer."""


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


def checker_version() -> str:
    """Return the version of the official package.

    Raises SystemFaultError if it is not installed.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise SystemFaultError(
            "mlperf check",
            f"the official package {PACKAGE} is not installed",
            remedy="install it with `pip install 'paceline[mlperf]'`",
        ) from error


def checker_rulesets(benchmark: str | None = None) -> list[str]:
    """Return the MLPerf Training rounds whose rules are installed, oldest first.

    With `benchmark`, only the rounds that have it in the closed division; none for an unknown one.
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
    """Write `log`, unpacked, to `copy`; return why it could not be read to its end."""
    file = LogFile(log)
    with copy.open("wb") as target:
        target.writelines(file)
    return file.read_error


def check_copy(
    copy: Path, ruleset: str, changes: Mapping[str, object] | None = None
) -> CheckerVerdict:
    """Return the verdict on `copy`, from a process that runs in the copy's folder.

    `changes` are the changes to the rules; see `checker_program.main`.
    """
    lines = read_lines(copy)
    if any(len(line) > MAX_CHECKED_CHARS and MARK in line for line in lines):
        why = (
            f"a result line has more than {MAX_CHECKED_CHARS:,} characters; the checker was not run"
        )
        return CheckerVerdict(checker_error=why)
    answer, checker_error = _answer("log", ruleset, copy, json.dumps(changes or {}))
    return CheckerVerdict(
        messages=tuple(answer.get("messages", ())),
        warnings=tuple(answer.get("warnings", ())),
        unparsable=tuple((text, why) for text, why in answer.get("unparsable", ())),
        checker_error=checker_error,
    )


def check_package_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """Return the verdict on a copied submission (systems/, results/).

    The checker writes scaling.json into the copy.
    """
    return _verdict("package", ruleset, copy)


def check_description_copy(copy: Path, ruleset: str) -> PackageVerdict:
    """Return the verdict on a copied system description."""
    return _verdict("system", ruleset, copy)


def _verdict(what: str, ruleset: str, copy: Path) -> PackageVerdict:
    answer, checker_error = _answer(what, ruleset, copy)
    messages = (CheckerMessage(*fields) for fields in answer.get("messages", ()))
    return PackageVerdict(bool(answer.get("passed")), tuple(messages), checker_error)


def _answer(
    what: str, ruleset: str, copy: Path, *changes: str
) -> tuple[dict[str, Any], str | None]:
    """Return the JSON that the checker's program prints, and the reason for an incomplete answer.

    The program runs in the folder of the copy.
    """
    command = [sys.executable, "-P", str(PROGRAM), what, ruleset, copy.name, *changes]
    try:
        # Some messages list a set of keys; a fixed hash seed keeps their order the same.
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        process = run_program(command, env=env, folder=copy.parent, limit_s=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {}, f"the checker took longer than {CHECK_TIMEOUT_S:g} s"
    try:
        answer = parse_json(process.stdout, nan=True)
    except ValueError:
        return {}, _last_error(process.stderr)
    if "refused" in answer:
        name = answer["refused"]
        return answer, f"{name!r} is not a valid benchmark or division; the checker was not run"
    return answer, None if answer["finished"] else _last_error(process.stderr)


def _last_error(errors: str) -> str:
    """Return the last line that a checker without an answer printed."""
    last = errors.strip().splitlines()[-1:] or ["no output"]
    return f"the checker crashed: {last[0][:300]}"


TOKEN = b":::MLLOG "
MARK = TOKEN.decode().rstrip()
FIELDS = ("time_ms", "key", "value", "metadata")
MAX_CHECKED_CHARS = 1 << 16
"""Maximum length of a result line for the checker, which takes hours for a megabyte."""
MAX_MESSAGE_CHARACTERS = 900
MAX_LINE_CHARACTERS = 300
"""Maximum length of a message line; a longer one would hide the failed test below it."""
_KEY = re.compile(r"(?:CHECK for|occurrence of) '([^']*)'|Failed checks for (\S+) :")
_LINE = re.compile(r" in line (\d+)(?=:\n)")
_CONTEXT = re.compile(r"^current (?:context|line)\[", re.MULTILINE)


@dataclass
class ResultLines:
    """Result lines of a log in the checker's numbering, with their lines in the file."""

    numbers: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, blocks: Iterable[bytes]) -> ResultLines:
        """Read the result lines of a log in blocks of whole lines.

        Line numbers count line feeds, as editors do.
        """
        lines, num_before = cls(), 0
        for block in blocks:
            for number, line in enumerate(block.split(b"\n"), num_before + 1):
                # The checker also ends lines at carriage returns, which progress bars print.
                for part in line.split(b"\r"):
                    if TOKEN in part:
                        lines.numbers.append(number)
                        text = part[part.rindex(TOKEN) :].decode("latin-1").strip()
                        lines.texts.append(text)
            num_before += block.count(b"\n")
        return lines

    def record(self, at: int) -> dict[str, Any]:
        """Return the record of result line `at`, empty if it has none."""
        try:
            record = parse_json(self.texts[at][len(TOKEN) :], nan=True)
        except (ValueError, IndexError):
            return {}
        return record if isinstance(record, dict) else {}

    def number_of(self, text: str) -> int | None:
        """Return the first line with this result text, None if there is none."""
        return self.numbers[self.texts.index(text)] if text in self.texts else None

    def of_key(self, key: str) -> list[int]:
        """Return the lines that log `key`."""
        pattern = f'"{key}"'
        return [
            self.numbers[at]
            for at, text in enumerate(self.texts)
            if pattern in text and self.record(at).get("key") == key
        ]


def finding(message: str, lines: ResultLines) -> CheckFinding:
    """Return an official checker's message with the key and file line that it is about.

    The checker counts result lines from 0; this number becomes `line`, which counts the lines of
    the file. The dump of the checker's variables at the end is left out.
    """
    key, line, text = None, None, _CONTEXT.split(message)[0].strip()
    if match := _KEY.search(text):
        key = match[1] or match[2]
        line = next(iter(lines.of_key(key)), None)
    result_lines = [part.strip() for part in text.splitlines() if part.startswith(TOKEN.decode())]
    if result_lines and (line := lines.number_of(result_lines[0])) is not None:
        key = lines.record(lines.texts.index(result_lines[0])).get("key")
    if (match := _LINE.search(text)) and int(match[1]) < len(lines.numbers):
        line = lines.numbers[int(match[1])]
        text = text.replace(match[0], "", 1)
    short = "\n".join(part[:MAX_LINE_CHARACTERS] for part in text.splitlines())
    return CheckFinding(key=key, line=line, message=short[:MAX_MESSAGE_CHARACTERS])


def incomplete_records(lines: ResultLines) -> list[CheckFinding]:
    """Return the result lines that lack a field, at which the checker raises an error."""
    findings: list[CheckFinding] = []
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        missing = [name for name in FIELDS if record and name not in record]
        if missing:
            message = f"this result line lacks {' and '.join(missing)}"
            findings.append(CheckFinding(line=number, message=message))
    return findings
