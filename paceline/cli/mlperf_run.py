"""`paceline mlperf run`: run a series of trials, or show its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli import options
from paceline.cli.options import Panel
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.printing import print_notices, print_plan
from paceline.cli.progress import progress_display
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_INCOMPLETE, EXIT_OK, EXIT_SYSTEM_FAULT
from paceline.core.units import pluralize
from paceline.files.run_folder import runs_root
from paceline.machines.placement import Request
from paceline.mlperf.report import series_document, trial_text
from paceline.mlperf.rules import TRIAL_VARIANT
from paceline.mlperf.run.request import SeriesRequest, plan_trials, report_series, series_report
from paceline.mlperf.run.tiny_data import refuse_training
from paceline.mlperf.run.trials import SeriesReport, TrialSeries, TrialState, TrialTask, run_trials
from paceline.runs.flow import Watcher, command_line
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot

EXIT_CODES = {
    "complete": EXIT_OK,
    "running": EXIT_INCOMPLETE,
    "unfinished": EXIT_INCOMPLETE,
    "stopped": EXIT_SYSTEM_FAULT,
    "failed": EXIT_SYSTEM_FAULT,
}


def run(
    benchmark: Annotated[
        str,
        typer.Argument(
            help="Benchmark: llama2-70b-lora, llama31-8b, flux1 or gpt-oss-20b.",
            metavar="BENCHMARK",
        ),
    ],
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Train the tiny variant, which takes seconds per trial.",
            rich_help_panel=Panel.recipe,
        ),
    ] = False,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic",
            help="Train a few steps on random samples and estimate the time to train.",
            rich_help_panel=Panel.recipe,
        ),
    ] = False,
    trials: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            help="Number of trials, each with its own seed. A smaller number than before drops "
            "trials that have not started.",
            rich_help_panel=Panel.limits,
        ),
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first trial.", rich_help_panel=Panel.search)
    ] = 1,
    timeout: options.Timeout = None,
    drop_caches: Annotated[
        bool,
        typer.Option(
            "--drop-caches", help="Drop the kernel's file caches before each trial (needs root)."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Training data of the benchmark.", rich_help_panel=Panel.recipe
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Validation data of the benchmark.", rich_help_panel=Panel.recipe
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Training framework: native, or mlperf for the run.sub and config_*.sh of a "
            "submission.",
            rich_help_panel=Panel.recipe,
        ),
    ] = None,
    overrides: options.Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the series; an existing series is resumed.", rich_help_panel=Panel.output
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices per host; default with --tiny: 1.", rich_help_panel=Panel.hosts
        ),
    ] = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    status: Annotated[
        bool,
        typer.Option(
            "--status",
            help="Print the state of the newest series (or of --name) without running anything.",
        ),
    ] = False,
    runs_dir: options.RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: options.Json = False,
    *,
    location: place.BoundHostOptions,
) -> None:
    """Train a benchmark to its target several times and score the trials. Never an official result.

    The same command resumes an interrupted series: finished trials are not run again, and a trial
    that still runs is followed to its end. A failed trial does not stop the others; a run that
    fails before run_start does not count as a trial and stops the series. Logs are written to
    <runs>/mlperf/<series>/result_<n>.txt, where `paceline mlperf score` and `check` read them.

    Examples:

      paceline mlperf run llama31-8b --tiny                    ten trials to a score, on any machine

      paceline mlperf run flux1 --synthetic --trials 1         how long this machine would take

      paceline mlperf run llama31-8b --data c4.bin --validation c4-val.bin
      --set data.token_dtype=uint32

      paceline mlperf run llama31-8b --engine mlperf --cluster lambda-gb300-nvl72 --data /data
      --set engine_settings.config=config_GB300_18x4x1xtp1pp1cp2_8b.sh
      --set engine_settings.container=registry/llama31_8b.sqsh

    Exit codes: 0 all trials have finished; 4 some are missing; 2 all failed, or a run failed before
    run_start.
    """
    placement = location.where()
    alone = tiny and devices is None and cluster is None and not placement.wants_nodes
    request = Request(
        recipe="",
        variant=None,
        overrides=(*([f"engine={engine}"] if engine else []), *(overrides or ())),
        devices=1 if alone else devices,
        device=device.value,
        cluster=cluster,
        timeout_s=None,
        force=force,
        where=placement,
        runs_dir=runs_dir,
    )
    series_request = SeriesRequest(
        benchmark=benchmark,
        run=request,
        tiny=tiny,
        synthetic=synthetic,
        trials=trials,
        first_seed=seed,
        trial_limit_s=timeout,
        drop_caches=drop_caches,
        data=data,
        heldout=validation,
        name=name,
        root=runs_root(runs_dir),
    )
    form = TableFormat.json if as_json else form
    if status:
        _end(series_report(series_request), form)
        return
    display = TrialsDisplay()
    trials_plan = plan_trials(series_request, refuse_training if dry_run else display.base)
    if dry_run:
        series = trials_plan.series
        count = min(series.trials_per_job, len(series.trials))
        _print_first(trials_plan.plan_trial(series.trials[0], count), form)
        return
    _announce(trials_plan.series)
    series, _ = run_trials(trials_plan, display)
    _end(report_series(trials_plan, series, command_line()), form)


def _end(series_answer: SeriesReport, form: TableFormat) -> None:
    emit(series_document(series_answer), form)
    if EXIT_CODES[series_answer.status]:
        raise typer.Exit(EXIT_CODES[series_answer.status])


def _announce(series: TrialSeries) -> None:
    num_finished = len(series.trials) - len(series.missing)
    already = f", {num_finished} already finished" if num_finished else ""
    other = f" · variant {series.variant}" if series.variant != TRIAL_VARIANT else ""
    echo(
        f"{series.benchmark}{other}: {pluralize(len(series.trials), 'trial')}{already} · "
        f"{series.label}",
        err=True,
    )


class TrialsDisplay:
    """Progress of each trial on standard error, and a line when it has finished."""

    @contextmanager
    def base(self, plan: Plan) -> Iterator[Watcher]:
        """Show the training of the base model."""
        title = "base model, trained once for all trials"
        with progress_display(plan.spec, title) as watch:
            yield watch

    def running(self, task: TrialTask, plan: Plan) -> AbstractContextManager[Watcher]:
        """Show the progress of one trial."""

        trial = task.trial
        numbers = "-".join(str(each.number) for each in (trial, *task.later[-1:]))
        title = f"trial {numbers} of 0-{task.num_trials - 1}, seed {trial.seed}"
        return progress_display(plan.spec, title)

    def task_ended(self, task: TrialTask, state: TrialState) -> None:
        """Print the result of a trial."""

        echo(f"  {trial_text(state)}", err=True)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """Do nothing: every trial uses all hosts, and its own result reports a lost one."""


def _print_first(plan: Plan, form: TableFormat) -> None:
    print_notices(plan)
    print_plan(
        plan, options.ReportFormat.json if form is TableFormat.json else options.ReportFormat.text
    )
