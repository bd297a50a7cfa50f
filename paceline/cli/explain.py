"""`paceline explain`: explain why a run is slow."""

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
            help="Baseline: another run, the nearest published row, or the estimate. Default: "
            "the run itself, without the time in which its ranks waited.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE",
            help="Profile of the same training: a profiled run, or its profile.json. Default: "
            "the profile of the run, if it has one.",
        ),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Explain why a run is slow: causes, time lost to each, evidence and remedies.

    Uses step times, waits, telemetry, settings, the environment, the estimate and the verdicts of
    scaling tests. Time without a known cause is reported as not explained. A run that is as fast
    as its baseline gets no cause (docs/reference/diagnosis.md).

    Examples:

      paceline explain last

      paceline explain last --against baseline --html why.html

      paceline explain 2026-11 --against estimate --json
    """
    root = runs_root(runs_dir)
    answer = explain_run(find_run(root, run), against, root, profile)
    emit(explanation_document(answer), output.output_format, page=html, charts=charts)
