"""`paceline scale RECIPE`: run, resume, interrupt and print a scaling test."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from paceline.cli.campaign_options import refuse_beside_resume
from paceline.cli.campaign_progress import CampaignDisplay
from paceline.cli.options import ReportFormat
from paceline.cli.output import (
    TableFormat,
    emit,
    emit_table,
    render,
)
from paceline.cli.progress import run_headline
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, EXIT_OK, SystemFaultError
from paceline.core.hosts import compress
from paceline.core.interrupts import SIGNALS
from paceline.core.units import pluralize
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import runs_root
from paceline.machines import cancel_orphan
from paceline.report.document import Column
from paceline.runs.flow import command_line
from paceline.scaling.analysis.analysis import AnalysisContext
from paceline.scaling.campaigns.plan import (
    CampaignRequest,
    begin,
    equivalent_campaigns,
    new_campaign,
    resumed_campaign,
    with_folder,
)
from paceline.scaling.campaigns.record import Campaign, campaign_runs, exclusive_lock
from paceline.scaling.campaigns.result import (
    CampaignResult,
    campaign_analysis,
    campaign_result,
    lambda_csv,
    trials_csv,
)
from paceline.scaling.campaigns.rounds import EXTRA_ROUNDS, MAX_PARALLEL, CampaignRunner, Limits
from paceline.scaling.report import scaling_document


@dataclass(frozen=True)
class CampaignOptions:
    """Options for running and printing a scaling test."""

    form: TableFormat
    runs_dir: Path | None
    resume: str | None = None
    allocation: str | None = None
    max_parallel: int | None = None
    extra_rounds: int | None = None
    tag: str | None = None
    dry_run: bool = False
    html: Path | None = None
    charts: Path | None = None
    fail_on_findings: bool = False
    context: AnalysisContext | None = None
    min_per_node: float | None = None
    """Samples/s a node below which a sub-cluster is a Fail in results.csv."""


def run_campaign(request: CampaignRequest, how: CampaignOptions) -> int:
    """Run or resume a scaling test, print it, and return the exit code."""

    root = runs_root(how.runs_dir)
    if how.resume is not None:
        refuse_beside_resume(how.resume, request)
        campaign = resumed_campaign(root, how.resume, how.allocation)
    else:
        campaign = new_campaign(root, request, command_line())
        for name in equivalent_campaigns(root, campaign):
            echo(
                f"note: {name} has the same settings; use --resume {name} to continue it", err=True
            )
    _announce(campaign)
    if how.dry_run:
        _print_plan(campaign, how.form)
        return EXIT_OK
    campaign = with_folder(root, campaign)
    with exclusive_lock(root / campaign.name), _stop_on_signals() as stop:
        campaign = begin(root, campaign)
        for folder in campaign_runs(root, campaign.name):
            if job := cancel_orphan(folder):
                echo(f"note: {job} of a killed call was cancelled", err=True)
        runner = _runner(campaign, root, how, stop)
        runner.run()
        result = _write_result(runner, how)
    if runner.stop_reason and result is None:
        raise SystemFaultError(
            f"campaign {campaign.name}", runner.stop_reason, remedy=_resume_command(campaign, how)
        )
    if runner.stop_reason:
        echo(f"error: stopped: {runner.stop_reason}", err=True)
        echo(f"to resume: {_resume_command(campaign, how)}", err=True)
    return EXIT_INCOMPLETE if result is None else exit_code(result, how.fail_on_findings)


def exit_code(result: CampaignResult, fail: bool) -> int:
    """Return 0 if every size has a value, even with failed sub-clusters or flagged nodes."""
    if result.interrupted or result.missing or result.sizes_without_value:
        return EXIT_INCOMPLETE
    return EXIT_GATE_FAILED if fail and (result.flagged or result.excluded_hosts) else EXIT_OK


def _runner(campaign: Campaign, root: Path, how: CampaignOptions, stop: Event) -> CampaignRunner:

    extra = EXTRA_ROUNDS if how.extra_rounds is None else how.extra_rounds
    limits = Limits(how.max_parallel or MAX_PARALLEL, extra)
    display = CampaignDisplay(len(campaign.plan))
    context = how.context or AnalysisContext()
    return CampaignRunner(
        display,
        root,
        command_line(),
        how.tag,
        stop=stop,
        campaign=campaign,
        round_begins=display.round_begins,
        limits=limits,
        context=context,
    )


@contextmanager
def _stop_on_signals() -> Iterator[Event]:
    """Yield an event that Ctrl-C, SIGTERM and SIGHUP set; further signals have no effect."""
    stop = Event()

    def ask(_number: int, _frame: object) -> None:
        message = (
            b"still ending them\n"
            if stop.is_set()
            else b"ending what runs; finished runs are kept\n"
        )
        stop.set()
        with suppress(OSError):  # The terminal may be closed.
            os.write(2, message)

    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_result(runner: CampaignRunner, how: CampaignOptions) -> CampaignResult | None:
    """Write and print the results, or return None if no sub-cluster has a value."""
    campaign = runner.campaign
    folder = runner.root / campaign.name
    trials = sorted(runner.trials.values(), key=lambda trial: (trial.round, trial.hosts))
    write_text(folder / "results.csv", lambda_csv(trials, campaign.whole_node, how.min_per_node))
    write_text(folder / "trials.csv", trials_csv(trials, campaign.scaling))
    if not any(trial.ok and trial.devices_per_node == campaign.whole_node for trial in trials):
        echo(f"no sub-cluster has a value; {_resume_command(campaign, how)}", err=True)
        return None
    analysis = campaign_analysis(campaign, trials, runner.context)
    missing = sum(len(runner.missing(round_)) for round_ in campaign.plan)
    interrupted = runner.stop.is_set()
    result = campaign_result(
        campaign,
        trials,
        analysis,
        excluded_hosts=runner.excluded_hosts,
        unplaced_hosts=runner.unplaced_hosts,
        missing=missing,
        interrupted=interrupted,
        resume=_resume_command(campaign, how) if missing else None,
    )
    write_value(folder / "scale.json", result)
    judged_by = runner.context.reference
    healthy = judged_by.samples_per_s if judged_by else None
    document = scaling_document(result, analysis.measured, campaign.name, healthy)
    write_text(folder / "report.html", render(document, ReportFormat.html))
    emit(document, how.form, page=how.html, charts=how.charts)
    if how.form in (TableFormat.text, TableFormat.md) and result.resume:
        echo(f"missing: {pluralize(result.missing, 'sub-cluster')}; {result.resume}", err=True)
    echo(f"{folder}: report.html, scale.json, results.csv, trials.csv", err=True)
    return result


def _resume_command(campaign: Campaign, how: CampaignOptions) -> str:
    place = f" --runs-dir {shlex.quote(str(how.runs_dir))}" if how.runs_dir else ""
    return f"paceline scale --resume {campaign.name}{place}"


def _announce(campaign: Campaign) -> None:
    """Print to standard error what will run."""
    echo(run_headline(campaign.points[-1].spec), err=True)
    trials = sum(len(round_.groups) for round_ in campaign.plan)
    sizes = ", ".join(map(str, campaign.sizes))
    echo(
        f"{campaign.scaling} scaling · hosts {compress(campaign.hosts)} · "
        f"sizes {sizes} · {pluralize(trials, 'sub-cluster')} in "
        f"{pluralize(len(campaign.plan), 'round')}",
        err=True,
    )
    for notice in campaign.notices:
        echo(f"note: {notice}", err=True)


def _print_plan(campaign: Campaign, form: TableFormat) -> None:
    """Print every planned round."""
    batches = {(p.nodes, p.devices_per_node): p.spec.training.global_batch for p in campaign.points}
    rows = [
        {
            "round": round_.number,
            "nodes": round_.nodes,
            "gpus": round_.nodes * round_.devices_per_node,
            "global_batch": batches[round_.nodes, round_.devices_per_node],
            "n": len(round_.groups),
            "left_over": compress(round_.left_over) or None,
            "groups": "  ".join(compress(group) for group in round_.groups),
        }
        for round_ in campaign.plan
    ]
    columns = [
        Column("round", "round", justify="right"),
        Column("nodes", "nodes", justify="right"),
        Column("gpus", "gpus", justify="right"),
        Column("global_batch", "global batch", justify="right"),
        Column("n", "sub-clusters", justify="right"),
        Column("left_over", "left over"),
        Column("groups", "on"),
    ]
    emit_table(
        rows, columns, form, document={**campaign.model_dump(mode="json"), "key": campaign.key}
    )
