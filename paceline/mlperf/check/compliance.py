"""Check MLPerf logs with the official compliance checker.

Its messages are mapped to lines of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import unknown_name
from paceline.core.text import as_text
from paceline.core.units import pluralize
from paceline.files.log_file import LogFile
from paceline.files.temporary import temporary_folder
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
    NOT_A_RESULT,
    TINY_VARIANTS,
    UNOFFICIAL,
    RulesetOrigin,
    select_ruleset,
)


def check(place: Path, ruleset: str | None = None) -> Check:
    """Return the official checker's findings on every log at `place`; only copies are checked.

    Raises SystemFaultError without the official package. Raises UserError for an unknown ruleset
    and for a place without MLPerf logs.
    """
    version = checker_version()
    if ruleset is not None:
        resolve_ruleset(place, ruleset, checker_rulesets())
    with temporary_folder() as folder:
        logs = run_logs(place)
        name, origin = resolve_ruleset(place, ruleset, checker_rulesets(), logs)
        files = [check_log(log, name, Path(folder)) for log in logs]
    statuses = {file.status for file in files}
    outcome = "passed" if statuses == {"passed"} else "error"
    return Check(
        place=as_text(str(place)),
        ruleset=name,
        ruleset_from=origin,
        checker=f"mlperf-logging {version}",
        label=_label(logs, name),
        status="failed" if "failed" in statuses else outcome,
        files=tuple(files),
    )


def _label(logs: Iterable[RunLog], ruleset: str) -> str:
    """Return the label of a check: whether the logs are of tiny variants, and the rules applied."""
    names = {trial.benchmark or "" for log in logs for trial in log.trials}
    variants = [TINY_VARIANTS[name] for name in sorted(names & TINY_VARIANTS.keys())]
    if ruleset == TINY_RULESET:
        return TINY_LABEL if variants else f"{UNOFFICIAL}; {MODIFIED_RULES}"
    return variants[0].label if variants else UNOFFICIAL


def resolve_ruleset(
    place: Path, option: str | None, rulesets: list[str], logs: Sequence[RunLog] = ()
) -> tuple[str, RulesetOrigin]:
    """Return the requested ruleset, else the one that logs, path and benchmark imply.

    Raises UserError for one that is not in `rulesets`.
    """
    if option is not None:
        if option not in (*rulesets, TINY_RULESET):
            raise unknown_name(
                f"--ruleset {option}",
                "is not known to the official checker",
                option,
                (*rulesets, TINY_RULESET),
                aliases=rulesets,
            )
        return option, "option"
    names = [trial.benchmark for log in logs for trial in log.trials if trial.benchmark]
    name = next(iter(names), None)
    variant = TINY_VARIANTS.get(name or "")
    official = variant.tiny_variant_of if variant else name
    from_logs = [log.ruleset for log in logs if log.ruleset]
    selection = select_ruleset(place, from_logs, rulesets, checker_rulesets(official))
    return selection.name, selection.origin


def _rules_for(log: RunLog, ruleset: str) -> tuple[str, Mapping[str, object]]:
    """Return the round, and the changes to its rules for tiny variants.

    The official rules of the benchmark that a tiny variant imitates are checked as well, so that
    every deviating key is reported.
    """
    if ruleset == TINY_RULESET:
        return BASE_RULESET, replaced_rules()
    variant = TINY_VARIANTS.get(next((trial.benchmark or "" for trial in log.trials), ""))
    return ruleset, {"also": variant.tiny_variant_of} if variant else {}


def check_log(log: RunLog, ruleset: str, folder: Path) -> CheckedFile:
    """Return the official checker's findings on one log; `folder` holds the temporary copy."""
    name = as_text(log.path.name)
    if log.unreadable:
        return CheckedFile(file=name, status="unreadable", reason=log.unreadable)
    copy = folder / "log.txt"
    read_error = copy_unpacked(log.path, copy)
    lines = ResultLines.of(LogFile(copy))
    verdict = check_copy(copy, *_rules_for(log, ruleset))
    findings = [
        CheckFinding(line=lines.number_of(text.strip()), message=f"cannot be parsed: {why}")
        for text, why in verdict.unparsable
    ]
    findings += [finding(message, lines) for message in verdict.messages]
    findings += incomplete_records(lines) if verdict.checker_error else []
    findings.sort(key=lambda f: (f.line is None, f.line or 0))
    if len(log.trials) > 1:
        num_trials = pluralize(len(log.trials), "trial")
        message = f"the log contains {num_trials}; the rules require one file per trial"
        findings.append(CheckFinding(message=message))
    status: FileStatus = "failed" if findings else "error" if verdict.checker_error else "passed"
    return CheckedFile(
        file=name,
        status=status,
        reason=verdict.checker_error or read_error,
        findings=tuple(findings),
        warnings=tuple(finding(message, lines) for message in verdict.warnings),
    )


TINY_RULESET = "tiny"
MODIFIED_RULES = "checked with modified rules"
TINY_LABEL = f"{NOT_A_RESULT}: {MODIFIED_RULES}"
BASE_RULESET = "6.0.0"
"""Round whose rules are copied: the first with the benchmarks of all tiny variants."""

_NAMES = ", ".join(f"'{name}'" for name in sorted(TINY_VARIANTS))
VALUE, BEST = "CHECK", "ATLEAST_ONE_CHECK"
"""Kinds of checks: on every line with a key, and on at least one of them."""


def _reaches(benchmark: str) -> str:
    return f"(v['value'] <= {TINY_VARIANTS[benchmark].target:g}) and v['value'] > 0.0"


REPLACED_CHECKS: Mapping[str, Mapping[str, tuple[str, str]]] = {
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
    "closed_gpt_oss_20b": {
        "max_sequence_length": (VALUE, "v['value'] == 128"),
        "eval_samples": (VALUE, "v['value'] == 32"),
        "max_steps": (VALUE, "v['value'] == 240"),
        "eval_accuracy": (BEST, _reaches("gpt_oss_20b_tiny")),
    },
}
"""Replaced checks: file of the official rules -> key -> kind of check and its replacement."""


def replaced_rules() -> dict[str, object]:
    """Return the changes that the checker's program needs to make its copy of the rules."""
    files = {
        f"closed_{small.tiny_variant_of}": f"closed_{name}" for name, small in TINY_VARIANTS.items()
    }
    return {"replacements": REPLACED_CHECKS, "names": files}
