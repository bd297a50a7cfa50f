"""`paceline run --from BUNDLE`: plan or show the repetition of a bundled run."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.options import ReportFormat
from paceline.cli.output import emit_json
from paceline.cli.printing import ExecutionOptions, plan_content, print_plan
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.files.run_folder import runs_root
from paceline.runs.bundles.repetition import Repetition, obstacles_text, repetition
from paceline.runs.bundles.verification import open_bundle
from paceline.runs.plan import Plan


def bundle_plan(path: Path, how: ExecutionOptions, dry_run: bool) -> Plan | None:
    """Return the plan that repeats a bundle's run, or None after printing a dry run.

    Raises UserError if something that the run needs is missing here.
    """
    with open_bundle(path) as contents:
        repetition_plan = repetition(contents, path, runs_root(how.runs_dir))
        run_name = contents.bundle.run
    if not dry_run:
        _print_notes(repetition_plan)
        if repetition_plan.obstacles:
            raise UserError(
                f"run {run_name}", "cannot be repeated here; the notes above give the reasons"
            )
        return repetition_plan.plan
    if how.output_format is ReportFormat.json:
        emit_json(
            {
                "run": run_name,
                "inputs": [part.model_dump() for part in repetition_plan.inputs],
                "obstacles": list(repetition_plan.obstacles),
                "environment": [change.model_dump() for change in repetition_plan.environment],
                **plan_content(repetition_plan.plan),
            }
        )
        return None
    _print_notes(repetition_plan)
    print_plan(repetition_plan.plan, how.output_format)
    return None


def _print_notes(repeat: Repetition) -> None:
    for sentence in (*obstacles_text(repeat), *repeat.plan.notices):
        echo(f"note: {sentence}", err=True)
