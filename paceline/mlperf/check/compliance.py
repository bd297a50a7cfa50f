"""Check MLPerf logs with the official compliance checker.

Its messages are mapped to lines of the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import UserError, did_you_mean
from paceline.core.units import pluralize
from paceline.logs.parser import as_text
from paceline.mlperf.check.findings import Check, CheckedFile, CheckFinding, FileStatus
from paceline.mlperf.check.official_checker import (
    ResultLines,
    check_copy,
    checker_rulesets,
    checker_version,
    copy_unpacked,
    finding,
    incomplete_records,
)
from paceline.mlperf.result_logs import RunLog, run_logs
from paceline.mlperf.rules import (
    DEFAULT_RULESET,
    NOT_A_RESULT,
    SIBLINGS,
    UNOFFICIAL,
    RulesetOrigin,
    settled_ruleset,
)


def check(place: Path, ruleset: str | None = None) -> Check:
    """Return the official checker's findings on every log at `place`; only copies are checked.

    Raises SystemFaultError without the official package. Raises UserError for an unknown ruleset
    and for a place without MLPerf logs.
    """
    version = checker_version()
    if ruleset is not None:
        chosen_ruleset(place, ruleset, checker_rulesets())
    with tempfile.TemporaryDirectory(prefix="paceline-mlperf-") as folder:
        logs = run_logs(place)
        chosen, origin = chosen_ruleset(place, ruleset, checker_rulesets(), logs)
        files = [checked_log(log, chosen, Path(folder)) for log in logs]
    statuses = {file.status for file in files}
    failed, whole = "failed" in statuses, statuses == {"passed"}
    return Check(
        place=as_text(str(place)),
        ruleset=chosen,
        ruleset_from=origin,
        checker=f"mlperf-logging {version}",
        label=_label(logs, chosen),
        status="failed" if failed else "passed" if whole else "broken",
        files=tuple(files),
    )


def _label(logs: Iterable[RunLog], ruleset: str) -> str:
    """Return the label of a check: whether the logs are of tiny variants, and the rules applied."""
    names = {trial.benchmark or "" for log in logs for trial in log.trials}
    small = [SIBLINGS[name] for name in sorted(names & SIBLINGS.keys())]
    if ruleset == TINY_RULESET:
        return TINY_LABEL if small else f"{UNOFFICIAL}; {OTHER_VALUES}"
    return small[0].label if small else UNOFFICIAL


def chosen_ruleset(
    place: Path, option: str | None, rulesets: list[str], logs: Sequence[RunLog] = ()
) -> tuple[str, RulesetOrigin]:
    """Return the requested ruleset, else the one that logs, path and benchmark imply.

    Raises UserError for one that is not in `rulesets`.
    """
    if option is not None:
        if option not in (*rulesets, TINY_RULESET):
            raise UserError(
                f"--ruleset {option}",
                "is not known to the official checker",
                allowed=", ".join((*rulesets, TINY_RULESET)),
                remedy=did_you_mean(option, rulesets) or None,
            )
        return option, "option"
    names = [trial.benchmark for log in logs for trial in log.trials if trial.benchmark]
    stated = [log.ruleset for log in logs if log.ruleset]
    settled = settled_ruleset(place, stated, rulesets, checker_rulesets(next(iter(names), None)))
    return settled.name, settled.origin


def _rules_for(log: RunLog, ruleset: str) -> tuple[str, Mapping[str, object]]:
    """Return the round, and the changes to its rules for tiny variants.

    The official rules of the benchmark that a tiny variant imitates are checked as well, so that
    every deviating key is reported.
    """
    if ruleset == TINY_RULESET:
        return BASE_RULESET, replaced_rules()
    small = SIBLINGS.get(next((trial.benchmark or "" for trial in log.trials), ""))
    return ruleset, {"also": small.sibling_of} if small else {}


def checked_log(log: RunLog, ruleset: str, folder: Path) -> CheckedFile:
    """Return the official checker's findings on one log; `folder` holds the temporary copy."""
    name = as_text(log.path.name)
    if log.unreadable:
        return CheckedFile(file=name, status="unreadable", reason=log.unreadable)
    copy = folder / "log.txt"
    broken_off = copy_unpacked(log.path, copy)
    lines = ResultLines.of(copy.read_bytes())
    verdict = check_copy(copy, *_rules_for(log, ruleset))
    findings = [
        CheckFinding(line=lines.number_of(text.strip()), message=f"cannot be parsed: {why}")
        for text, why in verdict.unread
    ]
    findings += [finding(message, lines) for message in verdict.messages]
    findings += incomplete_records(lines) if verdict.broken else []
    findings.sort(key=lambda f: (f.line is None, f.line or 0))
    if len(log.trials) > 1:
        several = (
            f"the log holds {pluralize(len(log.trials), 'trial')}; the rules want each in a file "
            "of its own"
        )
        findings.append(CheckFinding(message=several))
    status: FileStatus = "failed" if findings else "broken" if verdict.broken else "passed"
    return CheckedFile(
        file=name,
        status=status,
        reason=verdict.broken or broken_off,
        findings=tuple(findings),
        warnings=tuple(finding(message, lines) for message in verdict.warnings),
    )


TINY_RULESET = "tiny"
OTHER_VALUES = "checked by rules with other values"
TINY_LABEL = f"{NOT_A_RESULT}: {OTHER_VALUES}"
BASE_RULESET = DEFAULT_RULESET
"""Round whose rules are copied."""

_NAMES = ", ".join(f"'{name}'" for name in sorted(SIBLINGS))
VALUE, BEST = "CHECK", "ATLEAST_ONE_CHECK"
"""Kinds of checks: on every line with a key, and on at least one of them."""


def _reaches(benchmark: str) -> str:
    return f"(v['value'] <= {SIBLINGS[benchmark].target:g}) and v['value'] > 0.0"


REPLACED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "closed_common": {"submission_benchmark": (VALUE, f"v['value'] in [{_NAMES}]")},
    "closed_llama31_8b": {
        "max_sequence_length": (VALUE, "v['value'] == 128"),
        "eval_samples": (VALUE, "v['value'] == 32"),
        "max_steps": (VALUE, "v['value'] == 400"),
        "eval_accuracy": (BEST, _reaches("llama31_8b_tiny")),
    },
    "closed_llama2_70b_lora": {
        "lora_rank": (VALUE, "v['value'] == 4"),
        "eval_accuracy": (BEST, _reaches("llama2_70b_lora_tiny")),
    },
    "closed_flux1": {
        "evaluation_frequency": (VALUE, "v['value'] == 24"),
        "eval_accuracy": (BEST, _reaches("flux1_tiny")),
    },
}
"""Replaced checks: file of the official rules -> key -> kind of check and its replacement."""


def replaced_rules() -> dict[str, object]:
    """Return the changes that the checker's program needs to make its copy of the rules."""
    files = {f"closed_{small.sibling_of}": f"closed_{name}" for name, small in SIBLINGS.items()}
    return {"replaced": REPLACED, "names": files}
