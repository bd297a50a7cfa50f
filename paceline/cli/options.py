"""Options that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UserError


class ReportFormat(StrEnum):
    """Forms in which one run is printed."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"
    html = "html"


class DeviceKind(StrEnum):
    """On what a run goes; auto: a GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Variant = Annotated[str | None, typer.Option(help="A variant that the recipe defines.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a recipe field, e.g. --set steps=20."
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", help="What trains, as `--set engine=NAME`; `paceline engines` lists them."
    ),
]
Timeout = Annotated[
    float | None, typer.Option(min=0.001, metavar="SECONDS", help="Time limit of each run.")
]
Tag = Annotated[str | None, typer.Option(help="A name under which to find what is stored.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Run what the memory bound refuses, and dtypes that a CPU has to emulate."
    ),
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of all runs; default $PACELINE_RUNS, else ./runs.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Same as --format json.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write a page of it: one file.")
]
ChartsFolder = Annotated[
    Path | None, typer.Option("--charts", metavar="FOLDER", help="Also save every chart as SVG.")
]
RunName = Annotated[
    str, typer.Argument(help="A run: folder, unique prefix, tag, or `last`.", metavar="RUN")
]
ReportForm = Annotated[ReportFormat, typer.Option("--format")]
Device = Annotated[DeviceKind, typer.Option(help="auto, cpu or cuda.")]
ClusterName = Annotated[str | None, typer.Option(help="A cluster of the catalog, or a YAML file.")]


def with_engine(overrides: Iterable[str] | None, engine: str | None) -> tuple[str, ...]:
    """The overrides, and that of `--engine` behind them; raises UserError for two engines."""
    changes = tuple(overrides or ())
    if engine is None:
        return changes
    if any(change.partition("=")[0].strip() == "engine" for change in changes):
        raise UserError("--engine", "is set by --set engine=... as well", remedy="leave one out")
    return (*changes, f"engine={json.dumps(engine)}")


def refuse_unused(context: typer.Context, mode: str, used: Container[str]) -> None:
    """Raise UserError for an option that was written and that `mode` would pass over in silence.

    `used` are the names of the parameters that the mode has a use for.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in used:
            is_argument = parameter.param_type_name == "argument"
            shown = str(parameter.metavar or name.upper()) if is_argument else parameter.opts[0]
            raise UserError(shown, f"changes nothing beside {mode}", remedy="leave it out")
