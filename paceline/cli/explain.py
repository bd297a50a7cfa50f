"""`paceline explain`: why a run is as slow as it is."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import ChartsFolder, Html, RunName, RunsDir
from paceline.cli.output import TableOptions, emit
from paceline.explain.diagnosis import explain as explain_run
from paceline.explain.report import explanation_document
from paceline.files.run_folder import find_run, runs_root


def explain(
    run: RunName,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|reference|estimate",
            help="What it should take: another run, the nearest published row, or the estimate. "
            "Without it a run is held against itself: the time in which its ranks could not work.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE",
            help="A profile of the same training: a profiled run, or its profile.json. Without it "
            "the run's own, if it has one.",
        ),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Say why a run is slow: causes by their share of the lost time, with evidence and remedies.

    Joins steps, waits, telemetry, settings, surroundings, estimate and the verdicts of scaling
    campaigns. What no cause explains is called so, and a run that is as fast as its baseline gets
    no cause (docs/explain.md).

    Examples:

      paceline explain last

      paceline explain last --against baseline --html why.html

      paceline explain 2026-11 --against estimate --json
    """
    root = runs_root(runs_dir)
    answer = explain_run(find_run(root, run), against, root, profile)
    emit(explanation_document(answer), output.chosen, page=html, charts=charts)
