"""Report on a reproduction: its steps, and the published figures next to the measured ones."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from paceline.compare.published import (
    nearest_row,
    row_comparability,
    rows_with_step_time,
)
from paceline.core.errors import PacelineError
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.units import pluralize, si
from paceline.files import references
from paceline.files.recipe import load_recipe
from paceline.files.references import Row
from paceline.files.run_folder import read_record, run_folders
from paceline.files.staged import stage_root
from paceline.files.studies import Study, StudyPart
from paceline.mlperf.compare.published_scores import (
    RESULTS,
    PublishedScore,
    accelerator_kind,
    published_scores,
)
from paceline.mlperf.score.run_set import score
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.runs.outcome import evaluate
from paceline.staging.plan import StagingPlan, staging_plan

METRICS = ("samples_per_s", "step_time_s", "tokens_per_s")
"""Metrics that are compared, if the published row prints them."""
TINY_NOTE = "Tiny models on other hardware: the published figures are shown, not compared."


@dataclass(frozen=True)
class StepState:
    """One command of a reproduction."""

    number: int
    about: str
    words: tuple[str, ...]
    size: str
    finished: bool = False

    @property
    def command(self) -> str:
        """The command line as it could be typed by hand."""
        return shlex.join(("paceline", *self.words))

    def with_end(self, finished: bool) -> StepState:
        """Return the state with whether the command has finished."""
        return replace(self, finished=finished)

    def staging(self) -> StagingPlan | None:
        """Return the plan of a command that stages; None for another command."""
        if self.words[:2] != ("recipes", "stage"):
            return None
        names = [*self._values("--asset")]
        engine = next(self._values("--engine"), None)
        return staging_plan(load_recipe(self.words[2]), engine, stage_root(), names)

    @property
    def series_name(self) -> str | None:
        """Name of the series of MLPerf trials that the command runs; None for another command."""
        return next(self._values("--name"), None) if self.words[0] == "mlperf" else None

    def _values(self, option: str) -> Iterator[str]:
        return (value for word, value in pairwise(self.words) if word == option)


@dataclass(frozen=True)
class Reproduction:
    """A study, the state of its steps, and where its runs are."""

    study: Study
    part: StudyPart
    tiny: bool
    name: str
    steps: tuple[StepState, ...]
    root: Path
    dry_run: bool

    @property
    def finished(self) -> int:
        """Number of finished steps."""
        return sum(step.finished for step in self.steps)


def reproduction_document(reproduction: Reproduction) -> Document:
    """Return the document: steps and manual work for a dry run, else also the figures."""
    study, steps = reproduction.study, reproduction.steps
    step_rows = [_step_row(step) for step in steps]
    by_hand = [*reproduction.part.by_hand, *_gates(steps)]
    figures = [] if reproduction.dry_run else list(_figures(reproduction))
    progress = f"{reproduction.finished} of {pluralize(len(steps), 'step')} finished"
    complete = reproduction.finished == len(steps)
    return Document(
        kind="reproduction of a published benchmark",
        title=study.title + (", tiny" if reproduction.tiny else ""),
        setup=(f"published: {', '.join(study.references)}", f"guide: {study.guide}"),
        verdict=Verdict(progress, "good" if complete else "plain"),
        sections=(
            Table(
                title="Published and measured",
                name="figures",
                columns=FIGURE_COLUMNS,
                rows=figures,
                note=TINY_NOTE if reproduction.tiny and figures else "",
            ),
            Table(title="Steps", name="steps", columns=STEP_COLUMNS, rows=step_rows),
            Notes(title="By hand, before", name="by-hand", lines=by_hand),
        ),
        notes=tuple(dict.fromkeys(row["label"] for row in figures if "label" in row)),
        data={
            "study": study.title,
            "tiny": reproduction.tiny,
            "name": reproduction.name,
            "references": list(study.references),
            "complete": complete,
            "by_hand": by_hand,
            "steps": step_rows,
            "figures": figures,
        },
    )


STEP_COLUMNS = (
    Column("number", "step", justify="right"),
    Column("about", "what"),
    Column("size", "size"),
    Column("state", "state"),
    Column("command", "command", wraps=True),
)
FIGURE_COLUMNS = (
    Column("setup", "run"),
    Column("devices", "GPUs", "{:,}".format, "right"),
    Column("metric", "metric"),
    Column("measured", "measured", "{:,.4g}".format, "right"),
    Column("n", "runs", justify="right"),
    Column("published", "published", "{:,.4g}".format, "right"),
    Column("ratio", "ratio", "{:.3f}".format, "right"),
    Column("reference", "published row"),
    Column("difference", "differs in", wraps=True),
)


def _step_row(step: StepState) -> dict[str, Any]:
    plan = None if step.finished else step.staging()
    return {
        "number": step.number,
        "about": step.about,
        "size": _staging_size(plan) if plan else step.size or None,
        "state": "finished" if step.finished else "to do",
        "command": step.command,
    }


def _staging_size(plan: StagingPlan) -> str:
    """Return the bytes that are missing, and how many assets have no stated size."""
    words = [si(plan.bytes_needed, "B")] if plan.bytes_needed else []
    if plan.unknown:
        words.append(f"{pluralize(len(plan.unknown), 'asset')} of unknown size")
    return " and ".join(words) or "staged"


def _gates(steps: Iterable[StepState]) -> Iterator[str]:
    """Yield where access to assets must be requested."""
    pages = {
        part.asset.gate: part.asset
        for step in steps
        if not step.finished and (plan := step.staging())
        for part in plan.assets
        if part.asset.gate and part.state != "staged"
    }
    for page, asset in pages.items():
        login = "HF_TOKEN" if asset.kind.startswith("hub-") else "the registry's login"
        yield f"Request access to {asset.source} at {page}, and set {login}."


def _figures(reproduction: Reproduction) -> Iterator[dict[str, Any]]:
    """Yield one row per configuration and metric, with the nearest published row."""
    rows = [
        row
        for name in reproduction.study.references
        if name != RESULTS
        for row in rows_with_step_time(references.find_rows(name))
    ]
    for reports in _groups(_reports(reproduction)):
        facts = reports[0].facts
        candidates = [row for row in rows if reproduction.tiny or row.recipe == facts.recipe]
        if candidates:
            yield from _compare(reports, nearest_row(candidates, [facts], ()), reproduction.tiny)
    for step in reproduction.steps:
        if (name := step.series_name) and (place := reproduction.root / "mlperf" / name).is_dir():
            yield from _scores(place, reproduction.tiny)


def _reports(reproduction: Reproduction) -> Iterator[RunReport]:
    """Yield the reports of all good runs that have the tag of the reproduction."""
    for folder in run_folders(reproduction.root):
        try:
            if read_record(folder).tag != reproduction.name:
                continue
            report = evaluate(folder)
        except PacelineError:
            continue  # A folder of another version is not one of these runs.
        if report.result.status == "ok":
            yield report


def _groups(reports: Iterable[RunReport]) -> Iterator[list[RunReport]]:
    """Yield the runs of each configuration, smaller configurations first."""
    groups: dict[str, list[RunReport]] = defaultdict(list)
    for report in reports:
        groups[_setup(report.facts)].append(report)
    yield from sorted(groups.values(), key=lambda each: each[0].facts.num_devices or 0)


def _setup(facts: RunSettings) -> str:
    """Return recipe, devices and layout in a few words."""
    words = [facts.recipe, facts.variant]
    if (layout := facts.layout) and facts.num_devices:
        words += [layout.label(facts.num_devices), f"mbs {layout.micro_batch}"]
        words += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    return " ".join(word for word in words if word)


def _compare(reports: Sequence[RunReport], row: Row, tiny: bool) -> Iterator[dict[str, Any]]:
    facts = reports[0].facts
    differences = row_comparability(row, [facts]).differences
    difference = ", ".join(dict.fromkeys(each.key.replace("_", " ") for each in differences))
    metric = next((name for name in METRICS if name in row.printed), "step_time_s")
    values = [
        value.value
        for report in reports
        if (value := report.result.metrics.get(metric)) and value.value is not None
    ]
    published = getattr(row, metric)
    if not values:
        return
    measured = median(values)
    yield {
        "setup": _setup(facts),
        "devices": facts.num_devices,
        "metric": metric,
        "measured": measured,
        "n": len(values),
        "published": published,
        "ratio": measured / published if published and not (differences or tiny) else None,
        "reference": row.id,
        "difference": None if tiny else difference or None,
    }


def _scores(place: Path, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the minutes of a series of trials, and those of the nearest published system."""
    try:
        series = score(place)
    except PacelineError:
        return
    benchmark, kind = series.benchmark.removesuffix("_tiny"), accelerator_kind(series.device)
    scores = [each for each in published_scores() if each.benchmark == benchmark]

    def differences(each: PublishedScore) -> list[str]:
        same_kind = accelerator_kind(each.accelerator) == kind
        return [
            *([] if same_kind else [f"accelerator ({each.accelerator})"]),
            *([] if each.gpus == series.num_devices else [f"GPUs ({each.gpus})"]),
        ]

    near = min(
        reversed(scores),  # the newest round first
        key=lambda each: (len(differences(each)), abs(each.gpus - (series.num_devices or 0))),
        default=None,
    )
    trials = [run.minutes for run in series.runs if run.minutes is not None]
    minutes = series.score_minutes or (median(trials) if trials else None)
    different = differences(near) if near else []
    comparable = near is not None and series.score_minutes is not None and not (different or tiny)
    yield {
        "setup": series.benchmark,
        "devices": series.num_devices,
        "metric": "minutes to target" if series.score_minutes else "median minutes of trials",
        "measured": minutes,
        "n": len(trials),
        "published": near and near.score_minutes,
        "ratio": minutes / near.score_minutes if comparable and near and minutes else None,
        "reference": near and f"{near.round} {near.submitter} {near.system}",
        "difference": None if tiny else ", ".join(different) or None,
        "label": series.label,
    }
