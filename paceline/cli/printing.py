"""A run's plan on standard output in the form that was asked for."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.cli.options import Panel, ReportFormat, ReportOptions, RunsDir, Tag
from paceline.cli.terminal import echo
from paceline.engines import engine
from paceline.runs.logged_run import NATIVE
from paceline.runs.plan import Plan


@dataclass(frozen=True)
class ExecutionOptions(ReportOptions):
    """How a plan is run, where it is stored, and how the answer is printed."""

    tag: Tag = None
    probe: Annotated[
        bool,
        typer.Option(
            help="Measure the achievable GEMM throughput of this machine first (cached).",
            rich_help_panel=Panel.limits,
        ),
    ] = True
    runs_dir: RunsDir = None


def tell_notices(*plans: Plan) -> None:
    """What plans have to say before they start, on standard error and once."""
    for notice in dict.fromkeys(notice for plan in plans for notice in plan.notices):
        echo(f"note: {notice}", err=True)


def print_plan(plan: Plan, form: ReportFormat) -> None:
    """What would run: the script, or as JSON the whole plan."""
    if form is ReportFormat.json:
        echo(json.dumps(plan_content(plan), indent=2))
        return
    names = ", ".join(sorted({name.partition("/")[0] for name in plan.job.files}))
    if plan.job.program and plan.spec.engine != NATIVE and not plan.spec.cluster.runs_here:
        # Their scripts start node.sh, which lies in the run folder.
        echo(f"on every node: {shlex.join(plan.job.program)}", err=True)
    echo(f"in a new run folder beside {names}, job.sh:", err=True)
    echo(plan.script, nl=False)
    for name, text in _submitted(plan).items():
        does = "runs" if plan.job.batch and plan.job.batch.submits else "submits"
        echo(f"and {name}, which it {does}:", err=True)
        echo(text, nl=False)


def _submitted(plan: Plan) -> dict[str, str]:
    """The batch script that the run itself brings along, by its name."""
    batch, files = plan.job.batch, plan.job.files
    name = batch.script.removeprefix("./") if batch else ""
    return {name: files[name]} if name in files else {}


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as JSON tells it."""
    return {
        "spec": plan.spec.model_dump(mode="json"),
        "key": plan.spec.key,
        "script": plan.script,
        "settings": engine(plan.spec.engine).settings(plan.spec),
        "files": sorted(plan.job.files),
        **({"submitted": submitted} if (submitted := _submitted(plan)) else {}),
    }
