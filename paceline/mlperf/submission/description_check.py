"""The description of a system under our own reading and the official checker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.files.documents import read_text
from paceline.logs.parser import as_text
from paceline.mlperf.check.findings import CheckedFile, CheckFinding, FileStatus
from paceline.mlperf.submission.description_fields import faults
from paceline.mlperf.submission.official_package_checker import (
    PackageVerdict,
    check_description_copy,
)


def checked_description(path: Path, name: str, ruleset: str, scratch: Path) -> CheckedFile:
    """One system description: what is wrong with it, and the official checker's own verdict."""
    description = read_description(path, name)
    if description.status == "failed":
        return description
    copy = scratch / "description.json"
    shutil.copyfile(path, copy)
    verdict = check_description_copy(copy, ruleset)
    return description if verdict.passed else with_verdict(description, verdict)


def read_description(path: Path, name: str) -> CheckedFile:
    """What is wrong with a system description by our own reading."""
    text, fields, unreadable = _fields_in(path)
    findings = (unreadable,) if unreadable is not None else tuple(faults(text, fields))
    status: FileStatus = "failed" if findings else "passed"
    return CheckedFile(file=as_text(name), status=status, findings=findings)


def with_verdict(description: CheckedFile, verdict: PackageVerdict) -> CheckedFile:
    """A description that only the official checker objects to, or has no answer for."""
    status: FileStatus = "broken" if verdict.broken and not verdict.errors else "failed"
    findings = tuple(CheckFinding(message=m.text) for m in verdict.messages)
    return description.model_copy(
        update={"status": status, "reason": verdict.broken, "findings": findings}
    )


def _fields_in(path: Path) -> tuple[str, dict[str, Any], CheckFinding | None]:
    """The text, its fields, and why it has none."""
    try:
        text = read_text(path)
        fields = json.loads(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        return "", {}, _unreadable("it is no UTF-8 text", None)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        return "", {}, _unreadable(f"it is no JSON: {error}", line)
    if not isinstance(fields, dict):
        return text, {}, _unreadable("it is no JSON object", 1)
    return text, fields, None


def _unreadable(why: str, line: int | None) -> CheckFinding:
    return CheckFinding(line=line, message=why)
