"""`paceline show`: one run's report again, from its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import Json, ReportFormat, RunName, RunsDir


def show(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    form: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.text,
    as_json: Json = False,
) -> None:
    """Show one run: status, figures, where its files lie.

    The figures are computed anew from the raw files, so this works while a run goes on and after
    it was killed.

    Example: paceline show last --json
    """
    from paceline.cli.printing import print_report
    from paceline.files.run_folder import find_run, runs_root
    from paceline.runs.outcome import evaluate

    report = evaluate(find_run(runs_root(runs_dir), run))
    form = ReportFormat.json if as_json else form
    if form is ReportFormat.html:
        from paceline.estimate.explanation import explained

        report = explained(report)
    print_report(report, form)
