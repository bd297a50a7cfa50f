"""Checks, scores, series, system descriptions and packages as documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from paceline.core.text import one_line
from paceline.core.units import pluralize, significant
from paceline.mlperf.check.findings import Check
from paceline.mlperf.rules import NOT_A_METRIC, RULESET_ORIGINS
from paceline.mlperf.run.trials import SeriesReport, TrialSeries, TrialState
from paceline.mlperf.score.convergence import Convergence, ExpectedTime
from paceline.mlperf.score.score import Score, ScoredRun
from paceline.mlperf.submission.description_check import UNKNOWN, Description
from paceline.mlperf.submission.package import Package
from paceline.report.document import Column, Document, Figure, Notes, Table, Verdict, unknown_figure
from paceline.report.figures import format_value

JOULES_PER_WH = 3600.0
NOUNS = {"logs": "logs", "description": "descriptions", "submission": "files and folders"}
"""Noun for what each kind of check counts."""
FINDINGS = tuple(
    Column(name, name, str, "right" if name == "line" else "left", wraps=name == "message")
    for name in ("file", "status", "level", "line", "key", "message")
)
RUNS = (
    Column("file", "run"),
    Column("status", "status"),
    Column("part", "part"),
    Column("minutes", "minutes", "{:.4f}".format, "right"),
    Column("samples_to_target", "samples", "{:,}".format, "right"),
    Column("median_samples_per_s", "samples/s", lambda rate: significant(rate, 5), "right"),
    Column("initialization_minutes", "init min", "{:.3f}".format, "right"),
    Column("global_batch", "batch", "{:,}".format, "right"),
    Column("seeds", "seeds"),
    Column("reason", "reason", wraps=True),
)
TRIALS = (
    Column("number", "trial", str, "right"),
    Column("seed", "seed", str, "right"),
    Column("status", "status"),
    Column("samples_to_target", "samples", "{:,}".format, "right"),
    Column("minutes", "minutes", "{:.4f}".format, "right"),
    Column("last_loss", "last loss", "{:.4f}".format, "right"),
    Column("samples_per_s", "samples/s", lambda rate: significant(rate, 4), "right"),
    Column("run", "run"),
    Column("reason", "reason", wraps=True),
)
PACKAGED = tuple(
    Column(name, name)
    for name in ("benchmark", "file", "source", "score_minutes", "scaling_factor", "label")
)


def check_document(check: Check) -> Document:
    """Return the verdict of a check with one row per finding and warning."""
    passed = sum(file.status == "passed" for file in check.files)
    counts = f"{passed} of {len(check.files)} {NOUNS[check.kind]} pass"
    return Document(
        kind="MLPerf check",
        title=check.place,
        setup=(f"{check.ruleset} ({RULESET_ORIGINS[check.ruleset_from]})", check.checker),
        verdict=Verdict(
            f"{check.status}: {counts}", "good" if check.status == "passed" else "alert"
        ),
        sections=(Table(columns=FINDINGS, rows=list(_findings(check))),),
        notes=(check.label,),
        data=check.model_dump(mode="json"),
    )


def _findings(check: Check) -> Iterator[dict[str, Any]]:
    for file in check.files:
        head = {"file": file.file, "status": file.status}
        if not (file.findings or file.warnings):
            yield {**head, "message": file.reason}
        for level, findings in (("finding", file.findings), ("warning", file.warnings)):
            for finding in findings:
                yield {**head, "level": level, **finding.model_dump(mode="json")}


def score_document(score: Score) -> Document:
    """Return the score, what it is based on, its runs and the warnings."""
    rows = [_score_row(score, run) for run in score.runs]
    is_scored = score.score_minutes is not None
    text = f"{score.score_minutes:.4f} minutes" if is_scored else f"no score, {score.status}"
    return Document(
        kind="MLPerf score",
        title=score.benchmark,
        setup=(
            score.system or "unknown system",
            score.folder,
            f"{score.ruleset} ({RULESET_ORIGINS[score.ruleset_from]})",
        ),
        verdict=Verdict(f"{text}, {score.label}", "good" if is_scored else "alert"),
        answer=(score.reason,) if score.reason else (),
        figures=tuple(_score_figures(score)),
        sections=(
            Notes(title="Warnings", lines=score.warnings, tone="alert"),
            Table(title="Runs", columns=RUNS, rows=rows),
        ),
        data=score.model_dump(mode="json"),
        csv=_all_columns(rows),
    )


def _score_row(score: Score, run: ScoredRun) -> dict[str, Any]:
    """Return one run as a table row, with the score of its set."""
    return {
        **run.model_dump(mode="json", exclude={"seeds", "started_ms", "energy"}),
        "seeds": " ".join(map(str, run.seeds)) or None,
        "energy_j": run.energy.energy_j if run.energy else None,
        "benchmark": score.benchmark,
        "ruleset": score.ruleset,
        "set_status": score.status,
        "score_minutes": score.score_minutes,
        "official": score.official,
        "label": score.label,
    }


def _all_columns(rows: list[dict[str, Any]]) -> Table:
    return Table(columns=[Column(name, name) for name in rows[0]], rows=rows)


def _score_figures(score: Score) -> Iterator[Figure]:
    window = next((window for window in score.windows if window.chosen), None)
    if score.olympic_mean_minutes is not None and window:
        times = [run.minutes for run in score.runs if run.part == "counted" and run.minutes]
        n = len(window.files)
        windows = len(score.windows)
        yield Figure(
            "Run time",
            f"{score.olympic_mean_minutes:.4f} minutes",
            f"{min(times):.4f} to {max(times):.4f}" if times else "",
            (
                f"mean of {n - 2} of {n} runs",
                f"median of {windows} windows of {n} consecutive runs" if windows > 1 else "",
            ),
        )
    if score.rcp:
        yield _convergence(score.rcp)
    if score.mean_samples_to_target is not None:
        samples = f"{score.mean_samples_to_target:,.1f}"
        yield Figure("Samples to target", samples, "", ("mean of the converged runs",))
    if score.median_samples_per_s is not None:
        rate = f"{significant(score.median_samples_per_s, 5)} samples/s"
        yield Figure("Throughput", rate, "", ("median of the runs' medians",))
    if score.overall_samples_per_s is not None:
        overall = f"{significant(score.overall_samples_per_s, 5)} samples/s"
        yield Figure("Including evaluations", overall)
    if score.model_flops_per_s_per_device is not None:
        rate = format_value(score.model_flops_per_s_per_device, "FLOP/s", 4)
        where = f"per device on {score.num_devices}, {score.convention}, including evaluations"
        yield Figure("Model FLOP/s", rate, "", (where, NOT_A_METRIC))
    elif score.overall_samples_per_s is not None:
        yield unknown_figure("Model FLOP/s", score.model_flops_reason or "")
    if any(run.energy for run in score.runs):
        yield _energy(score)
    if score.mean_initialization_minutes is not None:
        minutes = f"{score.mean_initialization_minutes:.3f} minutes"
        yield Figure("Initialization", minutes, "", ("mean; not timed",))


def _convergence(rcp: Convergence) -> Figure:
    if rcp.samples is None or rcp.reference_samples is None or rcp.min_samples is None:
        return Figure("Convergence", rcp.status, "", (rcp.reason or "",))
    batches = " and ".join(f"{batch:,}" for batch in rcp.reference_batches)
    factor = f"scaling factor {rcp.scaling_factor:.6f}" if rcp.scaling_factor else ""
    samples = (
        f"{rcp.samples:,.1f} samples, reference {rcp.reference_samples:,.1f}, at least "
        f"{rcp.min_samples:,.1f}"
    )
    references = f"{rcp.kind}, references at batch {batches}"
    return Figure("Convergence", rcp.status, "", (references, samples, factor))


def _energy(score: Score) -> Figure:
    """Return the energy to the target of the counted runs, or why it is unknown."""
    energies = [run.energy for run in score.runs if run.part == "counted" and run.energy]
    if score.mean_energy_j is None or not energies:
        reasons = (energy.reason for energy in energies if energy.reason)
        return unknown_figure("Energy", next(reasons, "not every counted run has it"))
    sources = dict.fromkeys(source for energy in energies for source in energy.sources)
    parts = " and ".join(sorted(energies[0].parts_j))
    power = fmean(energy.power_w for energy in energies if energy.power_w is not None)
    return Figure(
        "Energy",
        f"{significant(score.mean_energy_j / JOULES_PER_WH, 4)} Wh",
        f"at {significant(power, 4)} W",
        (
            f"to the target, mean of {pluralize(len(energies), 'run')}, run_start to run_stop",
            f"of {parts} ({', '.join(sources)})",
        ),
    )


def trial_text(trial: TrialState) -> str:
    """Return the outcome of a trial in one line."""
    row = trial.model_dump(mode="json")
    parts = [
        f"{column.title} {column.format(row[column.key])}"
        for column in TRIALS[3:7]
        if row[column.key] is not None
    ]
    line = f"trial {trial.number}, seed {trial.seed}: {' · '.join((trial.status, *parts))}"
    return one_line(f"{line}: {trial.reason}" if trial.reason else line)


def series_document(report: SeriesReport) -> Document:
    """Return the state and the results of a series of trials."""
    series, score = report.series, report.score
    num_finished = len(series.trials) - len(series.missing)
    trials = pluralize(len(series.trials), "trial")
    common = {"benchmark": series.benchmark, "series": series.name, "label": series.label}
    rows = [{**trial.model_dump(mode="json"), **common} for trial in series.trials]
    figures: tuple[Figure, ...] = ()
    if report.expected is not None:
        figures = (_expected(report.expected),)
    elif series.synthetic and report.status == "complete":
        why = "no speed, no evaluation, or no reference for this batch"
        figures = (unknown_figure("Expected time to train", why),)
    result = score_document(score) if score is not None else None
    outcome = result.verdict.text if result and result.verdict else ""
    tail = series.failed_start.log_tail if series.failed_start else ()
    return Document(
        kind="series of MLPerf trials",
        title=series.benchmark,
        setup=(series.name, report.folder),
        verdict=Verdict(
            f"{report.status}: {num_finished:,} of {trials} finished",
            "alert" if report.status in ("failed", "stopped") else "plain",
        ),
        answer=tuple(filter(None, (_failed_start(series), outcome, score and score.reason))),
        figures=(*figures, *(result.figures if result else ())),
        sections=(
            Notes(
                title="Warnings",
                lines=(*report.warnings, *(score.warnings if score else ())),
                tone="alert",
            ),
            Notes(title="End of the log", lines=tail),
            Table(title="Trials", columns=TRIALS, rows=rows),
        ),
        notes=tuple(filter(None, (report.resume and f"resume: {report.resume}", series.label))),
        data=report.model_dump(mode="json"),
        csv=_all_columns(rows),
    )


def _failed_start(series: TrialSeries) -> str | None:
    """Return why a run stopped the series, None if none did."""
    failure = series.failed_start
    if failure is None:
        return None
    return (
        f"trial {failure.trial} {failure.reason} (run {failure.run}); it does not count as a "
        "trial. Fix the cause, then run the same command again"
    )


def _expected(time: ExpectedTime) -> Figure:
    speed, batches = time.speed, " and ".join(f"{batch:,}" for batch in time.reference_batches)
    return Figure(
        "Expected time to train",
        f"{time.minutes:.4g} minutes",
        f"{time.low_minutes:.4g} to {time.high_minutes:.4g} for {time.coverage:.0%} of runs",
        (
            "not a result",
            f"{time.samples:,.0f} samples (references at batch {batches})",
            f"{significant(speed.samples_per_s, 4)} samples/s, median of "
            f"{pluralize(speed.num_steps, 'step')}",
            f"{pluralize(time.num_evaluations, 'evaluation')} of "
            f"{significant(speed.evaluation_s, 3)} s",
        ),
    )


def description_document(description: Description) -> Document:
    """Return the fields of a system description, those that are open, and the errors."""
    fields = {
        f"{name}.{part}" if part else name: text
        for name, value in description.description.items()
        for part, text in (value if isinstance(value, dict) else {"": value}).items()
    }
    number = pluralize(len(description.unknown), "field", "are")
    is_complete = description.status == "complete"
    output = (f"written to {description.output}",) if description.output else ()
    return Document(
        kind="MLPerf system description",
        title="System description",
        setup=(description.ruleset, description.checker or "official checker not run"),
        verdict=Verdict(description.status, "good" if is_complete else "alert"),
        sections=(
            Table(
                columns=(Column("field", "field"), Column("value", "value", wraps=True)),
                rows=[{"field": name, "value": text} for name, text in fields.items()],
            ),
            Notes(
                title=f"{number} {UNKNOWN}; set with --set FIELD=VALUE",
                lines=[f"{field.field}: {field.what}" for field in description.unknown],
            ),
            Notes(
                title="Errors",
                lines=[finding.message for finding in description.findings],
                tone="alert",
            ),
        ),
        notes=(*description.notes, *output, description.label),
        data=description.model_dump(mode="json"),
    )


def package_document(package: Package) -> Document:
    """Return a package's folder and contents, or the official checker's findings."""
    if package.folder is None:
        document = check_document(package.check)
        reason = "nothing written: the official checker rejects the submission"
        return replace(document, answer=(reason,), data=package.model_dump(mode="json"))
    rows = [
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
    findings = (
        f"{file.file}: {each.message}" for file in package.check.files for each in file.warnings
    )
    return Document(
        kind="MLPerf package",
        title=package.folder,
        setup=(package.system, f"{package.division} division"),
        verdict=Verdict("passes the official checker", "good"),
        sections=(
            Notes(title="Warnings", lines=(*package.warnings, *findings), tone="alert"),
            Table(title="Files", columns=PACKAGED[:-1], rows=rows),
        ),
        notes=(package.label,),
        data=package.model_dump(mode="json"),
        csv=Table(columns=PACKAGED, rows=rows),
    )
