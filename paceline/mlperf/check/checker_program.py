"""The official compliance checker on one copied log: a program of its own, started with its path.

It is never imported: the checker keeps state in its modules, and a rule that breaks off leaves some
of it behind. One JSON object goes to standard output, also when the checker breaks off.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser

NAMING_KEYS = ("submission_benchmark", "submission_division")
"""Their values become names of rule files, and what a rule file says is executed."""


def main(ruleset: str, copy: str, changes: str = "{}") -> None:
    """Print what the checker has to say of the log `copy`.

    `changes` is JSON: `replaced` and `names` make another copy of the rules (`write_rules`); `also`
    is a benchmark under whose rules the log is checked as well.
    """
    changed = json.loads(changes)
    if "replaced" not in changed:
        judge(ruleset, copy, changed.get("also"))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        write_rules(ruleset, Path(folder), changed["replaced"], changed["names"])
        # The checker seeks its rules beside its own file.
        mlp_compliance.__file__ = str(Path(folder) / "mlp_compliance.py")
        judge(ruleset, copy, None)


def write_rules(
    ruleset: str,
    folder: Path,
    replaced: dict[str, dict[str, tuple[str, str]]],
    names: dict[str, str],
) -> None:
    """The rules of a round, the value checks named in `replaced` (file, key, field) exchanged.

    `names` are files that get another name. Raises LookupError where a check to replace is not
    there.
    """
    source = Path(mlp_compliance.__file__).parent / f"training_{ruleset}"
    target = folder / source.name
    target.mkdir()
    for path in source.glob("*.yaml"):
        text, exchanges = path.read_text(), dict(replaced.get(path.stem, {}))
        if exchanges:
            entries = yaml.load(text, Loader=yaml.BaseLoader)
            for entry in entries:
                rule = entry.get("KEY", {})
                field, check = exchanges.get(rule.get("NAME"), ("", ""))
                if field in rule:
                    rule[field] = check
                    del exchanges[rule["NAME"]]
            if exchanges:
                raise LookupError(f"{path.name} has no such checks: {exchanges}")
            text = yaml.safe_dump(entries, sort_keys=False)
        (target / f"{names.get(path.stem, path.stem)}.yaml").write_text(text)


def judge(ruleset: str, copy: str, also: str | None) -> None:
    """Print the checker's answer, by the rules that it finds."""
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
        if also is not None:
            check_as(also, lines, checker, ruleset)
        answer["finished"] = True
    finally:
        answer["messages"] = [*checker.overwritable.values(), *checker.not_overwritable]
        answer["warnings"] = list(checker.warnings.values())
        json.dump(answer, sys.stdout)


def check_as(
    benchmark: str, lines: list[Any], checker: mlp_compliance.ComplianceChecker, ruleset: str
) -> None:
    """Check the lines as if they were a benchmark's, for what else its rules object to."""
    mlp_compliance.enqueued_configs.clear()
    before = dict(checker.overwritable)
    for line in lines:
        if line.key == "submission_benchmark":
            line.value["value"] = benchmark
    checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
    checker.overwritable.update(before)


if __name__ == "__main__":
    main(*sys.argv[1:4])
