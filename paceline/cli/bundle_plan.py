"""`paceline run --from BUNDLE`: what would repeat a run, shown, and planned where it can start."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.options import ReportFormat
from paceline.cli.output import emit_json
from paceline.cli.printing import ExecutionOptions, plan_content, print_plan
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.files.run_folder import runs_root
from paceline.runs.bundles.repetition import Repetition, obstacles_text, repetition
from paceline.runs.bundles.verification import opened_bundle
from paceline.runs.plan import Plan


def bundle_plan(path: Path, how: ExecutionOptions, dry_run: bool) -> Plan | None:
    """The plan that repeats a bundle's run; None after a dry run, which printed it.

    Raises UserError where something that it needs is not here.
    """
    with opened_bundle(path) as opened:
        repeat = repetition(opened, path, runs_root(how.runs_dir))
        then = opened.bundle.run
    if not dry_run:
        _tell(repeat)
        if repeat.obstacles:
            raise UserError(f"run {then}", "cannot be repeated here as it was: see above")
        return repeat.plan
    if how.chosen is ReportFormat.json:
        emit_json(
            {
                "run": then,
                "inputs": [part.model_dump() for part in repeat.needed],
                "obstacles": list(repeat.obstacles),
                "environment": [change.model_dump() for change in repeat.environment],
                **plan_content(repeat.plan),
            }
        )
        return None
    _tell(repeat)
    print_plan(repeat.plan, how.chosen)
    return None


def _tell(repeat: Repetition) -> None:
    for sentence in (*obstacles_text(repeat), *repeat.plan.notices):
        echo(f"note: {sentence}", err=True)
