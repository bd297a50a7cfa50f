"""Options that several verbs share, one by one or in groups.

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
        "--force", help="Run what the memory bound refuses, and fp16 on a CPU, which emulates it."
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


@dataclass(frozen=True)
class ReportOptions:
    """In which form one run is printed."""

    panel: ClassVar[str] = "Output"
    form: ReportForm = ReportFormat.text
    as_json: Json = False

    @property
    def chosen(self) -> ReportFormat:
        """The form, whichever of both options names it."""
        return ReportFormat.json if self.as_json else self.form


def expanded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return `verb` with a parameter for each field of its groups of options."""
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
    """Yield a parameter of a verb for each field of a group, in the group's panel."""
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
