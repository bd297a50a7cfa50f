"""Run the official compliance checker on one copied log, as a separate program.

The program is started by its path and never imported: the checker keeps state in its modules, and a
rule that raises leaves some of it behind. One JSON object goes to standard output, even when the
checker is interrupted by an error.
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
"""Keys whose values become names of rule files, whose contents are executed."""


def main(ruleset: str, copy: str, changes: str = "{}") -> None:
    """Print the checker's answer on the log `copy`.

    `changes` is JSON. With `replacements` and `names` the log is checked by a modified copy of the
    rules (`write_rules`). `also` is a benchmark whose rules the log is also checked by.
    """
    rule_changes = json.loads(changes)
    if "replacements" not in rule_changes:
        run_checks(ruleset, copy, rule_changes.get("also"))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        write_rules(ruleset, Path(folder), rule_changes["replacements"], rule_changes["names"])
        # The checker looks for its rules next to its own file.
        mlp_compliance.__file__ = str(Path(folder) / "mlp_compliance.py")
        run_checks(ruleset, copy, None)


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


def run_checks(ruleset: str, copy: str, also: str | None) -> None:
    """Print the checker's answer by the rules that it finds."""
    answer: dict[str, Any] = {"finished": False, "messages": [], "warnings": [], "unparsable": []}
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        lines, answer["unparsable"] = mlp_parser.parse_file(copy, ruleset=ruleset)
        unsafe = [line.value["value"] for line in lines if line.key in NAMING_KEYS]
        unsafe = [str(value) for value in unsafe if not re.fullmatch(r"\w{1,60}", str(value))]
        if unsafe:
            answer["refused"] = unsafe[0][:200]
            return
        # For a benchmark or division without rules the checker reports it, then fails to open them.
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
    """Check the lines by the rules of another benchmark and collect further messages."""
    mlp_compliance.enqueued_configs.clear()
    before = dict(checker.overwritable)
    for line in lines:
        if line.key == "submission_benchmark":
            line.value["value"] = benchmark
    checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
    checker.overwritable.update(before)


if __name__ == "__main__":
    main(*sys.argv[1:4])
