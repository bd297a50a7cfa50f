"""What was planned, as `paceline run` tells it, and how it is to be run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import ReportFormat

if TYPE_CHECKING:
    from paceline.runs.plan import Plan


@dataclass(frozen=True)
class Execution:
    """How what was planned is run and told."""

    form: ReportFormat
    tag: str | None
    probe: bool
    runs_dir: Path | None


def tell_notices(*plans: Plan) -> None:
    """What plans have to say before they start, on standard error and once."""
    for notice in dict.fromkeys(notice for plan in plans for notice in plan.notices):
        typer.echo(f"note: {notice}", err=True)


def print_plan(plan: Plan, form: ReportFormat) -> None:
    """What would run: the script, or as JSON the whole plan."""
    import json

    if form is ReportFormat.json:
        typer.echo(json.dumps(plan_content(plan), indent=2))
        return
    names = ", ".join(sorted({name.partition("/")[0] for name in plan.job.files}))
    typer.echo(f"in a new run folder beside {names}, job.sh:", err=True)
    typer.echo(plan.script, nl=False)


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as JSON tells it."""
    from paceline.engines import engine

    return {
        "spec": plan.spec.model_dump(mode="json"),
        "key": plan.spec.key,
        "script": plan.script,
        "settings": engine(plan.spec.engine).settings(plan.spec),
        "files": sorted(plan.job.files),
    }
