"""Print a run's plan to standard output."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.cli.options import Panel, ReportFormat, ReportOptions, RunsDir, Tag
from paceline.cli.terminal import echo
from paceline.engines import engine
from paceline.machines.node.script import open_variables
from paceline.runs.logged_run import NATIVE
from paceline.runs.plan import Plan


@dataclass(frozen=True)
class ExecutionOptions(ReportOptions):
    """Options for running a plan, storing the run and printing its report."""

    tag: Tag = None
    probe: Annotated[
        bool,
        typer.Option(
            help="Measure the achievable GEMM throughput of this machine first (cached).",
            rich_help_panel=Panel.limits,
        ),
    ] = True
    runs_dir: RunsDir = None


def print_notices(*plans: Plan) -> None:
    """Print the notices of plans to standard error, each once."""
    for notice in dict.fromkeys(notice for plan in plans for notice in plan.notices):
        echo(f"note: {notice}", err=True)


def print_plan(plan: Plan, form: ReportFormat) -> None:
    """Print the script of a plan, or the whole plan as JSON."""
    if form is ReportFormat.json:
        echo(json.dumps(plan_content(plan), indent=2))
        return
    names = ", ".join(sorted({name.partition("/")[0] for name in plan.job.files}))
    if plan.job.program and plan.spec.engine != NATIVE and not plan.spec.cluster.runs_here:
        # Their scripts start node.sh, which is in the run folder.
        if environment := plan.spec.engine_settings.get("environment"):
            echo(f"with the variables: {environment}", err=True)
        echo(f"on every node: {shlex.join(plan.job.program)}", err=True)
    echo(f"job.sh, in a new run folder with {names}:", err=True)
    echo(plan.script, nl=False)
    for name, text in _submitted(plan).items():
        does = "runs" if plan.job.batch and plan.job.batch.submits else "submits"
        echo(f"and {name}, which job.sh {does}:", err=True)
        echo(text, nl=False)


def _submitted(plan: Plan) -> dict[str, str]:
    """Return the batch script of a run by its name, if it has one."""
    batch, files = plan.job.batch, plan.job.files
    name = batch.script.removeprefix("./") if batch else ""
    return {name: files[name]} if name in files else {}


def plan_content(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON content."""
    return {
        "spec": plan.spec.model_dump(mode="json"),
        "key": plan.spec.key,
        "script": plan.script,
        "program": list(plan.job.program),
        "environment": open_variables(plan.job.env),
        "settings": engine(plan.spec.engine).settings(plan.spec),
        "files": sorted(plan.job.files),
        **({"submitted": submitted} if (submitted := _submitted(plan)) else {}),
    }
