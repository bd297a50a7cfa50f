"""Run the official checkers on copied files, as a separate program.

The program is started by its path and never imported: the checkers keep state in their modules, and
a rule that raises leaves some of it behind. One JSON object goes to standard output, even when a
checker is interrupted by an error.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from mlperf_logging.package_checker import package_checker
from mlperf_logging.system_desc_checker import system_desc_checker

NAMING_KEYS = ("submission_benchmark", "submission_division")
"""Keys whose values become names of rule files, whose contents are executed."""
MODULES = (
    "package_checker",
    "seed_checker",
    "rcp_checker",
    "system_desc_checker",
    "power_checker",
)
"""Modules with messages about the package; messages of others are about single log lines."""


class UnsafeNameError(Exception):
    """A value that would make the checker read a file other than its own rules."""


def main(what: str, ruleset: str, place: str, changes: str = "{}") -> None:
    """Print the answer on `place`: a log, a package or a system description.

    `changes` is JSON. With `replacements` and `names` a log is checked by a modified copy of the
    rules (`write_rules`). `also` is a benchmark whose rules a log is also checked by.
    """
    answer: dict[str, Any] = {"finished": False, "messages": []}
    printed, sys.stdout = sys.stdout, sys.stderr
    try:
        if what == "log":
            check_log(ruleset, place, json.loads(changes), answer)
        else:
            check_package(what, ruleset, place, answer)
        answer["finished"] = True
    except UnsafeNameError as error:
        answer["refused"] = str(error)[:200]
    finally:
        json.dump(answer, printed)


def refuse_unsafe_names(lines: Iterable[Any]) -> None:
    """Raise UnsafeNameError for a value that cannot be the name of a benchmark or division."""
    for line in lines:
        value = str(line.value["value"]) if line.key in NAMING_KEYS else "safe"
        # The rules of "common" include themselves without end.
        if not re.fullmatch(r"\w{1,60}", value) or value == "common":
            raise UnsafeNameError(value)


def check_log(ruleset: str, copy: str, changes: dict[str, Any], answer: dict[str, Any]) -> None:
    """Check one log by the rules of a round, or by a modified copy of them."""
    if "replacements" not in changes:
        run_checks(ruleset, copy, changes.get("also"), answer)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        write_rules(ruleset, Path(folder), changes["replacements"], changes["names"])
        # The checker looks for its rules next to its own file.
        mlp_compliance.__file__ = str(Path(folder) / "mlp_compliance.py")
        run_checks(ruleset, copy, None, answer)


def write_rules(
    ruleset: str,
    folder: Path,
    replacements: dict[str, dict[str, tuple[str, str]]],
    names: dict[str, str],
) -> None:
    """Write the rules of a round with the value checks in `replacements` (file, key, field).

    `names` maps files to new names. Raises LookupError if a check to replace is missing.
    """
    source = Path(mlp_compliance.__file__).parent / f"training_{ruleset}"
    target = folder / source.name
    target.mkdir()
    for path in source.glob("*.yaml"):
        text, checks = path.read_text(), dict(replacements.get(path.stem, {}))
        if checks:
            entries = yaml.load(text, Loader=yaml.BaseLoader)
            for entry in entries:
                rule = entry.get("KEY", {})
                field, check = checks.get(rule.get("NAME"), ("", ""))
                if field in rule:
                    rule[field] = check
                    del checks[rule["NAME"]]
            if checks:
                raise LookupError(f"{path.name} has no such checks: {checks}")
            text = yaml.safe_dump(entries, sort_keys=False)
        (target / f"{names.get(path.stem, path.stem)}.yaml").write_text(text)


def run_checks(ruleset: str, copy: str, also: str | None, answer: dict[str, Any]) -> None:
    """Add the checker's messages by the rules that it finds."""
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        lines, answer["unparsable"] = mlp_parser.parse_file(copy, ruleset=ruleset)
        refuse_unsafe_names(lines)
        # For a benchmark or division without rules the checker reports it, then fails to open them.
        with suppress(FileNotFoundError):
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        if also is not None:
            check_as(also, lines, checker, ruleset)
    finally:
        answer["messages"] = [*checker.overwritable.values(), *checker.not_overwritable]
        answer["warnings"] = list(checker.warnings.values())


def check_as(
    benchmark: str, lines: list[Any], checker: mlp_compliance.ComplianceChecker, ruleset: str
) -> None:
    """Check the lines by the rules of another benchmark and collect further messages."""
    mlp_compliance.enqueued_configs.clear()
    before = dict(checker.overwritable)
    for line in lines:
        if line.key == "submission_benchmark":
            line.value["value"] = benchmark
    # A round without the benchmark reports that it does not know it.
    with suppress(FileNotFoundError):
        checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
    checker.overwritable.update(before)


class CheckerMessages(logging.Handler):
    """Logging handler that keeps the checker's messages: level, folder, text."""

    def __init__(self, messages: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.messages, self.place = messages, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message; one of the checker's own messages cannot be formatted."""
        try:
            text = record.getMessage()
        except TypeError:
            text = str(record.msg)
        if match := re.search(r"Running compliance checks in dir (.*)", text):
            self.place = match[1]
        if record.module in MODULES and record.levelno >= logging.WARNING:
            self.messages.append((record.levelname.lower(), self.place, text.strip()))


def check_package(what: str, ruleset: str, place: str, answer: dict[str, Any]) -> None:
    """Check a submission, into which scaling.json is written, or a system description."""
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(CheckerMessages(answer["messages"]))
    warnings.simplefilter("ignore")
    if what == "system":
        answer["passed"] = system_desc_checker.check_system_desc(place, "training", ruleset)[0]
        return
    refuse_unsafe_names(lines_of_package(Path(place), ruleset))
    systems = package_checker.check_systems(place, "training", ruleset)
    results = package_checker.check_training_result_files(
        place, "training", ruleset, False, False, False, False, False
    )
    answer["passed"] = systems and results


def lines_of_package(folder: Path, ruleset: str) -> Iterator[Any]:
    """Yield the result lines of all logs of a submission."""
    for log in sorted(folder.glob("results/*/*/result_*.txt")):
        yield from mlp_parser.parse_file(str(log), ruleset=ruleset)[0]


if __name__ == "__main__":
    main(*sys.argv[1:5])
