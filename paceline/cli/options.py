"""Options that several verbs share, single or in groups.

A group is a frozen dataclass whose fields are options. A verb that has a parameter of that type
gets all of them: `--help` and the command line know the fields, the verb gets the instance.

    @dataclass(frozen=True)
    class PriceOptions:
        panel: ClassVar[str] = "Cost"
        price: Annotated[float | None, typer.Option(help="Price per device-hour.")] = None
        carbon: Carbon = None

    def estimate(recipe: str, tag: Tag = None, *, prices: PriceOptions) -> None: ...

`panel` names the panel of `--help` for those fields that name none (`rich_help_panel`) themselves.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Iterable, Iterator
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer

from paceline.cli import quantities
from paceline.core.errors import UserError


class Panel(StrEnum):
    """Headings of `--help`, for verbs with more than MAX_IN_ONE_LIST options."""

    recipe = "Recipe"
    search = "Search space"
    measurement = "Measurement"
    profiler = "Profiler"
    hosts = "Hosts and devices"
    network = "Nodes and links"
    parallel = "Parallel runs"
    limits = "Limits and repeats"
    time_model = "Time model"
    log = "Settings that the log does not state"
    criteria = "Criteria"
    output = "Output"


class ReportFormat(StrEnum):
    """Output formats of one run."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"
    html = "html"


class DeviceKind(StrEnum):
    """Type of device; auto takes the GPUs if there are any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Variant = Annotated[
    str | None, typer.Option(help="Variant defined by the recipe.", rich_help_panel=Panel.recipe)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe field, e.g. --set steps=20.",
        rich_help_panel=Panel.recipe,
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Training framework (`paceline recipes engines`); same as --set engine=NAME.",
        rich_help_panel=Panel.recipe,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.001, metavar="SECONDS", help="Time limit of each run.", rich_help_panel=Panel.limits
    ),
]
Tag = Annotated[
    str | None,
    typer.Option(help="Tag for finding the results later.", rich_help_panel=Panel.output),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run without running it.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Run even if the model does not fit in memory, or in fp16 on a CPU (slow emulation).",
    ),
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder that stores all runs; default $PACELINE_RUNS, else runs_dir of "
        "paceline.toml, else ./runs.",
        show_default=False,
        rich_help_panel=Panel.output,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Same as --format json.", rich_help_panel=Panel.output)
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write an HTML report.", rich_help_panel=Panel.output),
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the result as Markdown, for a pull request.",
        rich_help_panel=Panel.output,
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the result as JUnit XML, for a CI server.",
        rich_help_panel=Panel.output,
    ),
]
Prometheus = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write the figures in the OpenMetrics format, for Prometheus' textfile "
        "collector.",
        rich_help_panel=Panel.output,
    ),
]
ChartsFolder = Annotated[
    Path | None,
    typer.Option(
        "--charts",
        metavar="FOLDER",
        help="Also save all charts as SVG in this folder.",
        rich_help_panel=Panel.output,
    ),
]
RunName = Annotated[
    str, typer.Argument(help="Run: folder, unique prefix, tag or `last`.", metavar="RUN")
]
ReportForm = Annotated[
    ReportFormat,
    typer.Option(
        "--format",
        help="Output format; json and csv are unrounded.",
        rich_help_panel=Panel.output,
    ),
]
Device = Annotated[
    DeviceKind,
    typer.Option(
        help="Type of device; auto takes the GPUs if there are any.", rich_help_panel=Panel.hosts
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        parser=quantities.whole_number,
        metavar="N",
        help="Total number of GPUs (on CPUs: processes).",
        rich_help_panel=Panel.hosts,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        help="Cluster of the catalog, or path of a cluster YAML file.", rich_help_panel=Panel.hosts
    ),
]


@dataclass(frozen=True)
class ReportOptions:
    """Output format of one run."""

    panel: ClassVar[Panel] = Panel.output
    form: ReportForm = ReportFormat.text
    as_json: Json = False

    @property
    def output_format(self) -> ReportFormat:
        """Output format from --format or --json."""
        return ReportFormat.json if self.as_json else self.form


def with_option_groups(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return `verb` with one parameter per field of its option groups."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and name != "return"
    }
    if not groups:
        return verb
    signature = inspect.signature(verb)
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=_KEYWORD))

    @wraps(verb)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in _options(group)})
        return verb(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options(group: Any) -> list[Field[Any]]:
    return [each for each in fields(group) if each.init]


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield one parameter of a verb per field of a group, in the group's panel."""
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "panel", None)
    for each in _options(group):
        hint = hints[each.name]
        base, *more = get_args(hint) if get_origin(hint) is Annotated else (hint, typer.Option())
        option = copy(more[0])
        option.rich_help_panel = option.rich_help_panel or panel
        default = each.default if each.default is not MISSING else inspect.Parameter.empty
        if each.default_factory is not MISSING:
            default = each.default_factory()
        yield inspect.Parameter(
            each.name, _KEYWORD, default=default, annotation=Annotated[base, option]
        )


def with_engine(overrides: Iterable[str] | None, engine: str | None) -> tuple[str, ...]:
    """Return the overrides plus that of `--engine`; raise UserError for two engines."""
    changes = tuple(overrides or ())
    if engine is None:
        return changes
    if any(change.partition("=")[0].strip() == "engine" for change in changes):
        raise UserError("--engine", "is also set by --set engine=...", remedy="leave one out")
    return (*changes, f"engine={json.dumps(engine)}")


def refuse_unused(context: typer.Context, mode: str, used_parameters: Container[str]) -> None:
    """Raise UserError for an option on the command line that `mode` would ignore.

    `used` holds the names of the parameters that the mode uses.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in used_parameters:
            is_argument = parameter.param_type_name == "argument"
            display_name = (
                str(parameter.metavar or name.upper()) if is_argument else parameter.opts[0]
            )
            raise UserError(display_name, f"has no effect with {mode}", remedy="leave it out")
