"""`paceline run`: train a recipe here and report how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Json, ReportFormat, RunsDir

if TYPE_CHECKING:
    from paceline.plan import Plan

STATUS_EXIT = {"ok": 0, "incomplete": 4, "cancelled": 4}
"""Exit code by status; every other status is a system fault (2)."""


def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or a YAML file.")],
    variant: Annotated[str | None, typer.Option(help="A variant that the recipe defines.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a recipe field, e.g. --set steps=20."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to use; default every GPU, or two processes on a CPU."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cluster: Annotated[
        str | None, typer.Option(help="A cluster of the catalog, or a YAML file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print exactly what would run, and run nothing.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Time limit in seconds.", metavar="SECONDS")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="A name under which to find the run.")] = None,
    probe: Annotated[
        bool, typer.Option(help="Measure this machine's reachable rate first (kept for later).")
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Run although the memory bound says it cannot fit.")
    ] = False,
    runs_dir: RunsDir = None,
    form: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.text,
    as_json: Json = False,
) -> None:
    """Train a recipe on this machine, measure it, and write the report.

    Examples:

      paceline run tiny-llama                        the first run on a new machine

      paceline run tiny-llama --set layout.zero_stage=3 --set steps=100

      paceline run llama31-8b --dry-run              what would start, without starting it

    Progress goes to standard error, the report to standard output. Everything about the run lies
    in one folder: job.sh, logs, steps, result.json and report.html.
    """
    from paceline.plan import Request, make_plan

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter("must be auto, cpu or cuda", param_hint="--device")
    request = Request(
        recipe, variant, tuple(overrides or ()), devices, device, cluster, timeout, force
    )
    plan = make_plan(request)
    for notice in plan.notices:
        typer.echo(f"note: {notice}", err=True)
    form = ReportFormat.json if as_json else form
    if dry_run:
        _print_plan(plan, form)
        return
    raise typer.Exit(_execute(plan, form, tag, probe, runs_dir))


def _execute(
    plan: Plan, form: ReportFormat, tag: str | None, probe: bool, runs_dir: RunsDir
) -> int:
    from paceline import flow
    from paceline.cli.printing import print_report
    from paceline.cli.progress import progress_display
    from paceline.rundir import runs_root

    root = runs_root(runs_dir)
    try:
        with progress_display(plan.spec) as watch:
            report = flow.run(plan, root, flow.command_line(), watch, tag=tag, probe=probe)
    except flow.UnwrittenReportError as fault:
        print_report(fault.report, form, header=False)
        raise
    except flow.CancelledRunError as cancelled:
        report = cancelled.report
    print_report(report, form, header=False)
    return STATUS_EXIT.get(report.result.status, 2)


def _print_plan(plan: Plan, form: ReportFormat) -> None:
    import json

    from paceline.engines import engine

    if form is ReportFormat.json:
        content = {
            "spec": plan.spec.model_dump(mode="json"),
            "key": plan.spec.key,
            "script": plan.script,
            "settings": engine(plan.spec.engine).settings(plan.spec),
            "files": sorted(plan.job.files),
        }
        typer.echo(json.dumps(content, indent=2))
        return
    names = ", ".join(sorted({name.partition("/")[0] for name in plan.job.files}))
    typer.echo(f"in a new run folder beside {names}, job.sh:", err=True)
    typer.echo(plan.script, nl=False)
