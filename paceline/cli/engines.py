"""`paceline engines`: the frameworks that can be started, and their environments."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Json
from paceline.cli.output import (
    TableForm,
    TableFormat,
    Where,
    emit_json,
    emit_table,
    refuse_where,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import gib
from paceline.engines import Needs, engine, engine_names, log_formats, needs
from paceline.engines.launch import environments
from paceline.report.document import Column


class Action(StrEnum):
    """What can be done to an environment."""

    install = "install"
    remove = "remove"


def engines(
    action: Annotated[
        Action | None,
        typer.Argument(help="Create (install) or delete (remove) the environment of engine NAME."),
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Engine, as named in the list.")] = None,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="Install a separate torch. By default the environment falls back to the "
            "packages of the interpreter that runs Paceline.",
        ),
    ] = False,
    features: Annotated[
        bool,
        typer.Option(
            "--features", help="List the features that engines do not support, with the reason."
        ),
    ] = False,
    formats: Annotated[
        bool, typer.Option("--log-formats", help="List the log formats that `parse` recognizes.")
    ] = False,
    where: Where = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the training frameworks that `run` can start, and install their environments.

    Environments are stored in $PACELINE_ENGINES, else in ~/.local/share/paceline/engines. `python`
    in a cluster file, or a container, takes precedence.

    Examples:

      paceline engines

      paceline engines --features --where engine=megatron

      paceline engines install deepspeed_chat

      paceline engines remove deepspeed_chat
    """
    form = TableFormat.json if as_json else form
    lists = [name for name, on in (("--features", features), ("--log-formats", formats)) if on]
    if lists and (action is not None or len(lists) > 1):
        other = f"engines {action}" if action else lists[1]
        raise UserError(lists[0], f"is a list of its own beside {other}", remedy="leave one out")
    if formats:
        emit_table(select_rows(_format_rows(), where), _FORMAT_COLUMNS, form)
        return
    if features:
        rows = [row for each in engine_names() for row in _feature_rows(each)]
        emit_table(select_rows(rows, where), _FEATURE_COLUMNS, form)
        return
    if action is None:
        emit_table(select_rows([_row(each) for each in engine_names()], where), _COLUMNS, form)
        return
    refuse_where(where, action.value)
    if name is None:
        raise UserError(f"engines {action}", "names no framework", allowed=_installable())
    if action is Action.remove:
        _remove(name, form)
    else:
        _install(name, form, isolated)


def _row(name: str) -> dict[str, Any]:
    needed, there = needs(name), environments.installed(name)
    absent = [] if there or not needed.imports else _absent_here(needed)
    lacking = [command for command in needed.commands if shutil.which(command) is None]
    if lacking:
        state, remedy = "missing", f"start Paceline where {', '.join(lacking)} is"
    elif there:
        state, remedy = "installed", ""
    elif not absent:
        state, remedy = "here", ""
    else:
        state = "missing"
        remedy = (
            f"paceline engines install {name}"
            if needed.requirements
            else f"{', '.join(absent)} beside Paceline"
        )
    return {
        "name": name,
        "title": needed.title,
        "requires": [*needed.requirements, *([needed.outside] if needed.outside else [])],
        "state": state,
        "versions": there.versions if there else {},
        "size_bytes": there.size_bytes if there else None,
        "folder": str(there.folder) if there else None,
        "remedy": remedy,
    }


def _feature_rows(name: str) -> list[dict[str, Any]]:
    """Return a row for each feature that the engine takes only in part, or not at all."""
    return [
        {
            "engine": name,
            "started_by": way,
            "feature": field,
            "takes": limit.takes,
            "reason": limit.reason,
        }
        for way, support in engine(name).SUPPORT.items()
        for field, limit in support.items()
    ]


def _format_rows() -> list[dict[str, Any]]:
    """Return a row for each log format, in the order in which they are tried."""
    return [
        {
            "engine": name,
            "framework": kind.title,
            "step_line": kind.example.replace("`", ""),
            "step_number": kind.numbered,
            "convention": kind.convention or "-",
        }
        for name, kind in log_formats().items()
    ]


def _absent_here(needed: Needs) -> list[str]:
    return environments.absent_modules(Path(environments.own_interpreter()), needed.imports)


def _install(name: str, form: TableFormat, isolated: bool) -> None:
    needed = needs(name)
    if not needed.requirements:
        raise UserError(
            f"engine {name}",
            "has no environment of its own",
            allowed=_installable(),
            remedy="`paceline engines` says what it needs",
        )
    made = environments.install(
        name,
        needed.requirements,
        needed.imports,
        lambda line: echo(f"  {line}", err=True),
        extra_arguments=needed.pip_arguments,
        isolated=isolated,
    )
    if form is TableFormat.json:
        emit_json(_row(name))
        return
    versions = ", ".join(f"{package} {version}" for package, version in made.versions.items())
    echo(f"{name}: {versions}; {gib(made.size_bytes)} in {made.folder}")


def _remove(name: str, form: TableFormat) -> None:
    needs(name)
    removed = environments.remove(name)
    if form is TableFormat.json:
        emit_json({"name": name, "removed": removed})
    else:
        echo(f"{name}: {'removed' if removed else 'there was no environment'}")


def _installable() -> str:
    return ", ".join(name for name in engine_names() if needs(name).requirements) or "none"


_FORMAT_COLUMNS = [
    Column("engine", "engine"),
    Column("framework", "framework"),
    Column("step_line", "a step line looks like"),
    Column("step_number", "step number"),
    Column("convention", "printed FLOP/s count"),
]
_FEATURE_COLUMNS = [
    Column("engine", "engine"),
    Column("started_by", "started by"),
    Column("feature", "feature"),
    Column("takes", "takes"),
    Column("reason", "reason"),
]
_COLUMNS = [
    Column("name", "engine"),
    Column("title", "framework"),
    Column("state", "state"),
    Column("requires", "requires", " ".join),
    Column("size_bytes", "size", lambda size: gib(size) if size else ""),
    Column("remedy", "how to get it"),
]
