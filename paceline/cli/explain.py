"""`paceline explain`: explain why a run is slow."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.log_options import LogOptions
from paceline.cli.options import ChartsFolder, Html, RunsDir
from paceline.cli.output import TableOptions, emit
from paceline.explain.diagnosis import explain as explain_run
from paceline.explain.observed_run import find_source
from paceline.explain.report import explanation_document
from paceline.files.run_folder import runs_root


def explain(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|LOG",
            help="Run: folder, unique prefix, tag or `last`; or a training log.",
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|LOG|reference|estimate",
            help="Baseline: another run or log, the nearest published row, or the estimate. "
            "Default: the run itself, without the time in which its ranks waited.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE",
            help="Profiled run of the same training, or its profile.json; default: the "
            "run's own profile.",
        ),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    *,
    log: LogOptions,
    output: TableOptions,
) -> None:
    """Explain why a run is slow: causes, time lost to each, evidence and remedies.

    Uses step times, waits, telemetry, settings, the environment, the estimate and the verdicts of
    scaling tests. Time without a known cause is reported as not explained. A run that is as fast
    as its baseline gets no cause (docs/reference/diagnosis.md). A training log is explained as far
    as it goes: slow steps, pipeline bubble, recomputation, and what differs from another log.

    Examples:

      paceline explain last

      paceline explain last --against baseline --html why.html

      paceline explain 2026-11 --against estimate --json

      paceline explain slow.log --against fast.log --gpu H100 --gpus 64
    """
    root = runs_root(runs_dir)
    settings = log.settings()
    answer = explain_run(find_source(root, run), against, root, profile, settings)
    emit(explanation_document(answer), output.output_format, page=html, charts=charts)
