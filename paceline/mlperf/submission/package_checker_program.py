"""Run the official package checker on a copied submission, as a separate program.

The program is started by its path and never imported, for the reason in check/checker_program.py.
It writes scaling.json into the copy. One JSON object goes to standard output, even when the checker
is interrupted by an error.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from mlperf_logging.compliance_checker import mlp_parser
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


class CheckerMessages(logging.Handler):
    """Logging handler that keeps the checker's messages: level, folder, text."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str, str]] = []
        self.place = ""

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


def main(what: str, ruleset: str, place: str) -> None:
    """Print the checker's answer on the folder or the description `place`."""
    answer: dict[str, Any] = {"finished": False}
    records = CheckerMessages()
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(records)
    warnings.simplefilter("ignore")
    printed, sys.stdout = sys.stdout, sys.stderr
    try:
        if what == "system":
            answer["passed"] = system_desc_checker.check_system_desc(place, "training", ruleset)[0]
        else:
            unsafe = next(unsafe_names(Path(place), ruleset), None)
            if unsafe is not None:
                answer["refused"] = unsafe[:200]
                return
            systems = package_checker.check_systems(place, "training", ruleset)
            results = package_checker.check_training_result_files(
                place, "training", ruleset, False, False, False, False, False
            )
            answer["passed"] = systems and results
        answer["finished"] = True
    finally:
        answer["messages"] = records.messages
        json.dump(answer, printed)


def unsafe_names(folder: Path, ruleset: str) -> Any:
    """Yield values that would make the checker read a file other than its own rules."""
    for log in sorted(folder.glob("results/*/*/result_*.txt")):
        lines, _ = mlp_parser.parse_file(str(log), ruleset=ruleset)
        values = [str(line.value["value"]) for line in lines if line.key in NAMING_KEYS]
        yield from (value for value in values if not re.fullmatch(r"\w{1,60}", value))


if __name__ == "__main__":
    main(*sys.argv[1:4])
