"""The panels in which `--help` shows the options of a verb that has many."""

from __future__ import annotations

from collections.abc import Sequence

from typer.core import TyperOption

MOST_WITHOUT = 15
"""Options that a verb shows in one list."""
PANELS = {
    "What is trained": "--variant --set --engine --layout --tokens --tiny --synthetic --data "
    "--validation",
    "What to vary": "--zero --mbs --recompute --gbs --max-tp --max-cp "
    "--max-ep --sizes --split --rounds --scaling --compare --stages --samples "
    "--max-nodes --min-efficiency --all-batches --seed",
    "What is measured": "--ops --min-bytes --max-bytes --pairs --seconds --processes --size "
    "--sample-bytes",
    "What is profiled": "--tool --ranks --gpu-metrics --cpu-samples",
    "Place": "--local --device --devices --gpus --cluster --hosts --nodes --launcher --allocation "
    "--ssh-config --max-parallel --oversubscribe "
    "--launch-per --per-node --gpus-per-node --assume-devices --intra --inter --topology",
    "Budget": "--budget --repeat --trials --steps --timeout --extra-rounds --fast "
    "--devices-only --time-limit --wait",
    "Time model": "--calibration --software --dispatcher --compile --cuda-graphs --software-date "
    "--trace-memory --measured-run --measured-step-time",
    "Judgement": "--reference --history --against --check --fail-on-findings --drain-file",
    "Output": "--where --tag --runs-dir --top --save-recipe --html --charts --format --json",
}
PANEL_OF = {option: panel for panel, options in PANELS.items() for option in options.split()}


def group_options(params: Sequence[object]) -> None:
    """Put the options of a verb in panels where they are many; what a declaration says stands."""
    options = [parameter for parameter in params if isinstance(parameter, TyperOption)]
    for option in options:
        named = option.rich_help_panel or PANEL_OF.get(option.opts[0])
        option.rich_help_panel = named if len(options) > MOST_WITHOUT else None
