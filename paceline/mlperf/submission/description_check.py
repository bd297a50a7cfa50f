"""Check a system description: its fields, their errors, and the official checker's verdict."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import UserError, did_you_mean
from paceline.core.text import as_text
from paceline.core.value import Value
from paceline.files.documents import parse_json, read_text
from paceline.mlperf.check.findings import CheckedFile, CheckFinding, FileStatus
from paceline.mlperf.check.official_checker import (
    PackageVerdict,
    check_description_copy,
)
from paceline.mlperf.rules import UNOFFICIAL

UNKNOWN = "UNKNOWN"
"""Prefix of a value that is still open; no package is built with one."""
AVAILABILITIES = (
    "Available on-premise",
    "Available cloud",
    "Research, Development, or Internal (RDI)",
    "Preview",
)
DIVISIONS = ("closed", "open")
SOFTWARE = "other_software_stack"

FIELDS: dict[str, str] = {
    "submitter": "submitting organization",
    "division": "closed or open",
    "status": " | ".join(AVAILABILITIES),
    "system_name": "name under which the results are listed",
    "number_of_nodes": "nodes of a run",
    "host_processors_per_node": "sockets",
    "host_processor_model_name": "name of the processor",
    "host_processor_core_count": "cores of one processor",
    "host_processor_vcpu_count": "hardware threads of a node",
    "host_processor_frequency": "base or highest clock",
    "host_processor_caches": "sizes by level",
    "host_processor_interconnect": "link between the sockets",
    "host_memory_capacity": "of a node",
    "host_storage_type": "disks that hold the data",
    "host_storage_capacity": "number and size",
    "host_networking": "adapters of a node",
    "host_networking_topology": "topology of the switches between the nodes",
    "host_memory_configuration": "number, size and type of the modules",
    "accelerators_per_node": "number",
    "accelerator_model_name": "name",
    "accelerator_host_interconnect": "PCIe generation and width",
    "accelerator_frequency": "clock",
    "accelerator_on-chip_memories": "caches and shared memory",
    "accelerator_memory_configuration": "type of memory",
    "accelerator_memory_capacity": "of one accelerator",
    "accelerator_interconnect": "link between the accelerators of a node",
    "accelerator_interconnect_topology": "direct, switched, ...",
    "cooling": "air, liquid, ...",
    "hw_notes": "may be empty",
    "framework": "framework with its version",
    SOFTWARE: "other software with its versions",
    "operating_system": "name and version",
    "sw_notes": "may be empty",
}
"""Every field that the official checker requires, and its meaning."""

TEXTS_ONLY = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerators_per_node",
    "accelerator_model_name",
    "framework",
)
"""Fields that the official checker joins into a line; a number there makes it raise an error."""

_PLACEHOLDER = re.compile(
    r"placeholder|unknown|changeme|change[_ -]me|\btodo\b|\btbd\b|\bfixme\b|^x{3,}$|^<.*>$|^\[.*\]$"
    r"|\b(your|my)[_ -]?(org|organi[sz]ation|company|name)\b",
    re.IGNORECASE,
)


class OpenField(Value):
    """Field whose value is still open."""

    field: str
    what: str


class Description(Value):
    """Output of `paceline mlperf system`."""

    description: dict[str, str | dict[str, str]]
    unknown: tuple[OpenField, ...]
    notes: tuple[str, ...] = ()
    """Limits of the values if they do not cover the whole system."""
    ruleset: str
    checker: str | None
    """Name and version of the official package; None if it is not installed."""
    findings: tuple[CheckFinding, ...]
    status: Literal["complete", "incomplete", "failed"]
    official: Literal[False] = False
    label: str = UNOFFICIAL
    output: str | None = None


def is_placeholder(name: str) -> bool:
    """Return whether `name` is only a placeholder for an organization's name."""
    return not name.strip() or bool(_PLACEHOLDER.search(name.strip()))


def open_fields(description: Mapping[str, object]) -> list[OpenField]:
    """Return the fields that are still open."""
    return [
        OpenField(field=name, what=what)
        for name, what in FIELDS.items()
        if str(description.get(name, "")).startswith(UNKNOWN)
    ]


def open_value(field: str) -> str:
    """Return the text of an open field."""
    return f"{UNKNOWN}: {FIELDS[field]}"


def with_settings(
    description: Mapping[str, str | dict[str, str]], settings: Sequence[str]
) -> dict[str, str | dict[str, str]]:
    """Return the description with each `key=value` set; raises UserError for an unknown field."""
    fields = dict(description)
    for setting in settings:
        name, equals, value = setting.partition("=")
        stack, dot, part = name.partition(".")
        if not equals:
            raise UserError(f"--set {setting}", "is not key=value")
        if dot and stack == SOFTWARE and part:
            fields[SOFTWARE] = {**_stack(fields), part: value}
        elif name in FIELDS and name != SOFTWARE:
            fields[name] = value
        else:
            raise UserError(
                f"--set {setting}",
                "is not a field of a system description",
                allowed=f"{', '.join(FIELDS)}; {SOFTWARE}.NAME",
                remedy=did_you_mean(name, FIELDS) or None,
            )
    return fields


def faults(text: str, description: Mapping[str, object]) -> list[CheckFinding]:
    """Return the errors of a description, each with its line in the file's `text`."""
    findings = [_fault(text, name, "is missing") for name in FIELDS if name not in description]
    for name, value in description.items():
        if name not in FIELDS:
            continue
        if isinstance(value, Mapping | list) and name == SOFTWARE:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and name not in TEXTS_ONLY:
            continue
        if not isinstance(value, str):
            problem = f"must be a string, not {json.dumps(value)[:60]}"
            findings.append(_fault(text, name, problem))
        elif value.startswith(UNKNOWN):
            findings.append(_fault(text, name, f"is still {UNKNOWN} ({FIELDS[name]})"))
        elif problem := _problem(name, value):
            findings.append(_fault(text, name, problem))
    return sorted(findings, key=lambda f: (f.line is None, f.line or 0))


def _problem(name: str, value: str) -> str | None:
    """Return the error of a field's text, None if it has none."""
    match name:
        case "status" if value not in AVAILABILITIES:
            return f"must be one of {'; '.join(AVAILABILITIES)}, not {value[:60]!r}"
        case "division" if value not in DIVISIONS:
            return f"must be closed or open, not {value[:60]!r}"
        case "submitter" if is_placeholder(value):
            return f"is a placeholder: {value[:60]!r}"
        case "number_of_nodes" | "accelerators_per_node" if not value.isdecimal():
            return f"must be an integer, not {value[:60]!r}"
        case _:
            return None


def _fault(text: str, name: str, what: str) -> CheckFinding:
    match = re.search(rf'"{re.escape(name)}"\s*:', text)
    line = text.count("\n", 0, match.start()) + 1 if match else None
    return CheckFinding(key=name, line=line, message=f"{name} {what}")


def _stack(description: Mapping[str, str | dict[str, str]]) -> dict[str, str]:
    stack = description.get(SOFTWARE)
    return stack if isinstance(stack, dict) else {}


def check_description(path: Path, name: str, ruleset: str, scratch: Path) -> CheckedFile:
    """Return the errors of one system description, including the official checker's."""
    description = read_description(path, name)
    if description.status == "failed":
        return description
    copy = scratch / "description.json"
    shutil.copyfile(path, copy)
    verdict = check_description_copy(copy, ruleset)
    return description if verdict.passed else with_verdict(description, verdict)


def read_description(path: Path, name: str) -> CheckedFile:
    """Return the errors of a system description that Paceline finds itself."""
    text, fields, unreadable = _fields_in(path)
    findings = (unreadable,) if unreadable is not None else tuple(faults(text, fields))
    status: FileStatus = "failed" if findings else "passed"
    return CheckedFile(file=as_text(name), status=status, findings=findings)


def with_verdict(description: CheckedFile, verdict: PackageVerdict) -> CheckedFile:
    """Return the result of a description that only the official checker rejects or cannot check."""
    status: FileStatus = "error" if verdict.checker_error and not verdict.errors else "failed"
    findings = tuple(CheckFinding(message=m.text) for m in verdict.messages)
    return description.model_copy(
        update={"status": status, "reason": verdict.checker_error, "findings": findings}
    )


def _fields_in(path: Path) -> tuple[str, dict[str, Any], CheckFinding | None]:
    """Return the text, its fields, and the error that left it without fields."""
    try:
        text = read_text(path)
        fields = parse_json(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        return "", {}, _unreadable("not UTF-8 text", None)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        return "", {}, _unreadable(f"invalid JSON: {error}", line)
    if not isinstance(fields, dict):
        return text, {}, _unreadable("not a JSON object", 1)
    return text, fields, None


def _unreadable(why: str, line: int | None) -> CheckFinding:
    return CheckFinding(line=line, message=why)
