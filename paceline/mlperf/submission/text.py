"""System descriptions and packages of submissions as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.mlperf.score.text import check_lines
from paceline.mlperf.submission.description import Description
from paceline.mlperf.submission.package import Package
from paceline.report.figures import one_line


def description_rows(found: Description) -> list[dict[str, str]]:
    """One row a field; parts of a field have rows of their own."""
    rows: list[dict[str, str]] = []
    for name, value in found.description.items():
        parts = value if isinstance(value, dict) else {"": value}
        rows += [
            {"field": f"{name}.{part}" if part else name, "value": one_line(text)}
            for part, text in parts.items()
        ]
    return rows


def description_lines(found: Description) -> Iterator[str]:
    """What is open or wrong, in plain words, for a terminal."""
    checker = found.checker or "official checker not asked"
    yield f"{found.status} by {found.ruleset}, {checker}"
    if found.unknown:
        yield f"  {len(found.unknown)} fields are open; fill them in with --set FIELD=VALUE:"
        yield from (f"    {one.field}: {one.what}" for one in found.unknown)
    yield from (one_line(f"  wrong: {one.message}") for one in found.findings)
    yield from (one_line(f"  note: {note}") for note in found.notes)
    if found.written:
        yield one_line(f"  written: {found.written}")
    yield found.label


def package_rows(made: Package) -> list[dict[str, Any]]:
    """One row a file of the package."""
    return [
        {"benchmark": one.benchmark, "file": name, "source": source,
         "score_minutes": one.score_minutes, "scaling_factor": one.scaling_factor,
         "label": made.label}
        for one in made.results
        for name, source in one.files.items()
    ]  # fmt: skip


def package_lines(made: Package) -> Iterator[str]:
    """Where the package lies and what is in it, or what the official checker objects to."""
    if made.folder is None:
        yield "nothing was written: the official checker does not pass it"
        yield from check_lines(made.check)
        return
    yield one_line(
        f"{made.folder}: {made.system}, {made.division} division, passes the official checker"
    )
    for one in made.results:
        minutes = "no score" if one.score_minutes is None else f"{one.score_minutes:.4f} minutes"
        scaled = f", scaled by {one.scaling_factor:.6f}" if (one.scaling_factor or 1) > 1 else ""
        yield one_line(
            f"  {one.benchmark}: {len(one.files)} runs of {one.source}, {minutes}{scaled}"
        )
    warned = [(file.file, found) for file in made.check.files for found in file.warnings]
    yield from (one_line(f"  warning: {warning}") for warning in made.warnings)
    yield from (one_line(f"  warning: {file}: {found.message}") for file, found in warned)
    yield made.label
