"""The description of this system for a submission, and what is open in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.core.hardware import Cluster
from paceline.files import catalog
from paceline.machines.probe.host import host_parts
from paceline.machines.probe.inventory import inventory
from paceline.mlperf.check.findings import CheckedFile
from paceline.mlperf.check.official_checker import PACKAGE, checker_rulesets, checker_version
from paceline.mlperf.rules import DEFAULT_RULESET
from paceline.mlperf.submission.description_check import checked_description
from paceline.mlperf.submission.description_fields import Description, open_fields, with_settings
from paceline.mlperf.submission.machine_description import machine_description


def describe(
    cluster: str | None, settings: Sequence[str], out: Path | None, ruleset: str | None = None
) -> Description:
    """This machine, or a cluster of such machines, described and held against the official checker.

    With `out` the description is written there. Raises UserError for a file that exists, for an
    unknown cluster, setting or ruleset.
    """
    chosen = _ruleset(ruleset)
    if out is not None and out.exists():
        raise UserError(
            str(out),
            "exists, and nothing is overwritten",
            remedy="give another --out, or edit the file and check it with "
            "`paceline mlperf check FILE`",
        )
    machine, nodes = inventory(), catalog.cluster(cluster) if cluster else None
    is_node, notes = _is_node(machine, nodes)
    filled = with_settings(machine_description(machine, host_parts(), nodes, is_node), settings)
    text = json.dumps(filled, indent=4, ensure_ascii=False) + "\n"
    version, findings, broken = None, (), None
    if checker_rulesets():
        version = f"{PACKAGE} {checker_version()}"
        checked = _checked(text, chosen)
        findings, broken = checked.findings, checked.reason
        notes = (*notes, f"no verdict: {broken}") if broken else notes
    else:
        notes = (*notes, f"{PACKAGE} is not installed: the official checker was not asked")
    if out is not None:
        _write(out, text)
    still_open = open_fields(filled)
    open_names = {field.field for field in still_open}
    wrong = [finding for finding in findings if finding.key not in open_names]
    return Description(
        description=filled,
        unknown=tuple(still_open),
        notes=notes,
        ruleset=chosen,
        checker=version,
        findings=tuple(wrong),
        status="failed" if wrong else "incomplete" if still_open or broken else "complete",
        written=str(out) if out else None,
    )


def _ruleset(option: str | None) -> str:
    rulesets = checker_rulesets()
    if option is not None and rulesets and option not in rulesets:
        raise UserError(
            f"--ruleset {option}",
            "is not known to the official checker",
            allowed=", ".join(rulesets),
            remedy=did_you_mean(option, rulesets) or None,
        )
    return option or DEFAULT_RULESET


def _is_node(machine: dict[str, Any], cluster: Cluster | None) -> tuple[bool, tuple[str, ...]]:
    """Whether this machine speaks for the cluster's nodes, and what to say of it."""
    if cluster is None:
        return True, ()
    if cluster.device != "cpu" and not machine["gpus"]:
        return False, (
            f"this machine has no {cluster.device}: it is no node of {cluster.name}, and what only "
            "a node can tell is left open; run this on one",
        )
    if cluster.nodes > 1:
        alike = f"all {cluster.nodes} nodes of {cluster.name} are taken to be like this machine"
        return True, (alike,)
    return True, ()


def _checked(text: str, ruleset: str) -> CheckedFile:
    with tempfile.TemporaryDirectory(prefix="paceline-mlperf-") as scratch:
        path = Path(scratch) / "system.json"
        path.write_text(text, encoding="utf-8")
        return checked_description(path, path.name, ruleset, Path(scratch))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
