"""Options of `paceline scale RECIPE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Panel
from paceline.core.errors import UserError
from paceline.machines.placement import HostPlacement, Request
from paceline.scaling.campaigns.plan import CampaignRequest

Recipe = Annotated[
    str | None,
    typer.Argument(
        help="Recipe (name or file) to train in sub-clusters.",
        metavar="RECIPE",
        show_default=False,
    ),
]
GpusPerNode = Annotated[
    str | None,
    typer.Option(
        metavar="1,8",
        help="Devices per node; the largest number is used at all sizes, the others on "
        "single nodes.",
        rich_help_panel=Panel.hosts,
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeat",
        min=1,
        help="Number of times that each round is run.",
        rich_help_panel=Panel.limits,
    ),
]
Topology = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Network topology for --split topology: lines `HOSTS SWITCH`, or Slurm's "
        "topology.conf.",
        rich_help_panel=Panel.hosts,
    ),
]
MaxParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of concurrent sub-clusters (default 128).",
        rich_help_panel=Panel.parallel,
    ),
]
MinPerNode = Annotated[
    float | None,
    typer.Option(
        "--min-per-node",
        min=0,
        metavar="SAMPLES/S",
        rich_help_panel=Panel.criteria,
        help="Minimum throughput per node; sub-clusters below it are marked Fail in results.csv.",
    ),
]
ExtraRounds = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum number of extra rounds that test suspect nodes next to known-good ones"
        " and split slow groups (default 8).",
        rich_help_panel=Panel.limits,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name of the scaling test; an existing test with the same settings is resumed.",
        rich_help_panel=Panel.output,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Resume a scaling test by name, unique prefix or `last`. Takes no RECIPE.",
        rich_help_panel=Panel.limits,
    ),
]


def devices_per_node(text: str | None) -> tuple[int, ...]:
    """Return the distinct numbers in `1,8`, or () for None."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if text is not None and not (
        words and all(w.isascii() and w.isdecimal() and 0 < int(w) < 1000 for w in words)
    ):
        raise UserError(f"--gpus-per-node {text}", "is not a list of numbers", allowed="1,8")
    return tuple(sorted({int(word) for word in words}))


def refuse_other_modes(recipe: str | None, resume: str | None, source: Path | None) -> None:
    """Raise UserError unless exactly one input is given."""
    num_modes = sum(mode is not None for mode in (recipe, resume, source))
    if num_modes != 1:
        raise UserError(
            "paceline scale",
            "got more than one input" if num_modes else "needs an input",
            allowed="one of RECIPE, --resume NAME and --from CSV",
        )


USED_BY_FROM = {
    *("source", "where", "scaling", "reference", "history", "html", "charts", "fail"),
    *("form", "as_json"),
}
"""Parameters of `paceline scale` that the analysis of a table has a use for."""


def refuse_beside_resume(name: str, request: CampaignRequest) -> None:
    """Raise UserError for an option that the stored scaling test `name` already sets."""
    where = HostPlacement(allocation=request.request.where.allocation)
    if request != CampaignRequest(Request("", where=where)):
        raise UserError(
            f"--resume {name}",
            "takes its settings from the scaling test",
            allowed="--allocation, --max-parallel, --extra-rounds, --reference, --history, "
            "--tag, --runs-dir, --format",
            remedy="leave out the rest",
        )
