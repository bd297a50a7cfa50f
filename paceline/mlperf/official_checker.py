"""The official compliance checker on one copied log: a program of its own, started with its path.

It is never imported: the checker keeps state in its modules, and a rule that breaks off leaves some of
it behind. One JSON object goes to standard output, also when the checker breaks off.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import Any

from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

NAMING_KEYS = ("submission_benchmark", "submission_division")
"""Their values become names of rule files, and what a rule file says is executed."""


def main(ruleset: str, copy: str) -> None:
    """Print what the checker has to say of the log `copy`."""
    answer: dict[str, Any] = {"finished": False, "messages": [], "warnings": [], "unread": []}
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        lines, answer["unread"] = mlp_parser.parse_file(copy, ruleset=ruleset)
        unsafe = [line.value["value"] for line in lines if line.key in NAMING_KEYS]
        unsafe = [str(value) for value in unsafe if not re.fullmatch(r"\w{1,60}", str(value))]
        if unsafe:
            answer["refused"] = unsafe[0][:200]
            return
        # Where a benchmark or division has no rules it says so, then fails to open them.
        with suppress(FileNotFoundError):
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        answer["finished"] = True
    finally:
        answer["messages"] = [*checker.overwritable.values(), *checker.not_overwritable]
        answer["warnings"] = list(checker.warnings.values())
        json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:3])
