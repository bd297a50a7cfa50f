"""Format system descriptions and packages of submissions as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.text import one_line
from paceline.core.units import pluralize
from paceline.mlperf.check.findings import check_lines
from paceline.mlperf.submission.description_check import UNKNOWN, Description
from paceline.mlperf.submission.package import Package


def description_rows(description: Description) -> list[dict[str, str]]:
    """Return one row per field; parts of a field have rows of their own."""
    rows: list[dict[str, str]] = []
    for name, value in description.description.items():
        parts = value if isinstance(value, dict) else {"": value}
        rows += [
            {"field": f"{name}.{part}" if part else name, "value": one_line(text)}
            for part, text in parts.items()
        ]
    return rows


def description_lines(description: Description) -> Iterator[str]:
    """Yield the open fields and the errors of a description, as terminal lines."""
    checker = description.checker or "official checker not run"
    yield f"{description.status} by {description.ruleset}, {checker}"
    if description.unknown:
        number = len(description.unknown)
        them = "it" if number == 1 else "them"
        fields = pluralize(number, "field", "are")
        yield f"  {fields} {UNKNOWN}; fill {them} in with --set FIELD=VALUE:"
        yield from (f"    {field.field}: {field.what}" for field in description.unknown)
    yield from (one_line(f"  wrong: {finding.message}") for finding in description.findings)
    yield from (one_line(f"  note: {note}") for note in description.notes)
    if description.output:
        yield one_line(f"  written to {description.output}")
    yield description.label


def package_rows(package: Package) -> list[dict[str, Any]]:
    """Return one row per file of the package."""
    return [
        {
            "benchmark": runs.benchmark,
            "file": name,
            "source": source,
            "score_minutes": runs.score_minutes,
            "scaling_factor": runs.scaling_factor,
            "label": package.label,
        }
        for runs in package.results
        for name, source in runs.files.items()
    ]


def package_lines(package: Package) -> Iterator[str]:
    """Yield the package's folder and contents, or the official checker's findings."""
    if package.folder is None:
        yield "nothing written: the official checker rejects the submission"
        yield from check_lines(package.check)
        return
    yield one_line(
        f"{package.folder}: {package.system}, {package.division} division, passes the official "
        "checker"
    )
    for runs in package.results:
        minutes = "no score" if runs.score_minutes is None else f"{runs.score_minutes:.4f} minutes"
        scaled = f", scaled by {runs.scaling_factor:.6f}" if (runs.scaling_factor or 1) > 1 else ""
        yield one_line(
            f"  {runs.benchmark}: {pluralize(len(runs.files), 'run')} from {runs.source}, "
            f"{minutes}{scaled}"
        )
    yield from (one_line(f"  warning: {warning}") for warning in package.warnings)
    for file in package.check.files:
        for warning in file.warnings:
            yield one_line(f"  warning: {file.file}: {warning.message}")
    yield package.label
