"""`paceline recipes engines`: list training frameworks and install their environments."""

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
    WhereOption,
    emit_json,
    emit_table,
    refuse_where,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import gib
from paceline.engines import (
    EngineRequirements,
    engine,
    engine_names,
    engine_requirements,
)
from paceline.engines.launch import environments
from paceline.report.document import Column


class Action(StrEnum):
    """Actions on an environment."""

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
            "packages of Paceline's interpreter.",
        ),
    ] = False,
    features: Annotated[
        bool,
        typer.Option(
            "--features", help="List the features that engines do not support, with the reason."
        ),
    ] = False,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the training frameworks that `run` can start, and install their environments.

    Environments are stored in $PACELINE_ENGINES, else in ~/.local/share/paceline/engines. `python`
    in a cluster file, or a container, takes precedence.

    Examples:

      paceline recipes engines

      paceline recipes engines --features --where engine=megatron

      paceline recipes engines install deepspeed_chat

      paceline recipes engines remove deepspeed_chat
    """
    form = TableFormat.json if as_json else form
    if features and action is not None:
        raise UserError(
            "--features", f"cannot be combined with engines {action}", remedy="leave one out"
        )
    if features:
        rows = [row for each in engine_names() for row in _feature_rows(each)]
        emit_table(select_rows(rows, where), _FEATURE_COLUMNS, form)
        return
    if action is None:
        emit_table(select_rows([_row(each) for each in engine_names()], where), _COLUMNS, form)
        return
    refuse_where(where, action.value)
    if name is None:
        raise UserError(f"engines {action}", "needs the name of an engine", allowed=_installable())
    if action is Action.remove:
        _remove(name, form)
    else:
        _install(name, form, isolated)


def _row(name: str) -> dict[str, Any]:
    engine_needs, environment = engine_requirements(name), environments.installed(name)
    absent = [] if environment or not engine_needs.imports else _missing_modules(engine_needs)
    lacking = [command for command in engine_needs.commands if shutil.which(command) is None]
    if lacking:
        state, remedy = "missing", f"start Paceline where {', '.join(lacking)} is"
    elif environment:
        state, remedy = "installed", ""
    elif engine_needs.outside:
        state, remedy = "not checked", ""
    elif not absent:
        state, remedy = "here", ""
    else:
        state = "missing"
        remedy = (
            f"paceline recipes engines install {name}"
            if engine_needs.requirements
            else f"{', '.join(absent)} in Paceline's environment"
        )
    return {
        "name": name,
        "title": engine_needs.title,
        "requires": [
            *engine_needs.requirements,
            *([engine_needs.outside] if engine_needs.outside else []),
        ],
        "state": state,
        "versions": environment.versions if environment else {},
        "size_bytes": environment.size_bytes if environment else None,
        "folder": str(environment.folder) if environment else None,
        "remedy": remedy,
    }


def _feature_rows(name: str) -> list[dict[str, Any]]:
    """Return a row for each feature that an engine supports only in part, or not at all."""
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


def _missing_modules(engine_needs: EngineRequirements) -> list[str]:
    return environments.absent_modules(Path(environments.own_interpreter()), engine_needs.imports)


def _install(name: str, form: TableFormat, isolated: bool) -> None:
    engine_needs = engine_requirements(name)
    if not engine_needs.requirements:
        raise UserError(
            f"engine {name}",
            "has no environment of its own",
            allowed=_installable(),
            remedy="`paceline recipes engines` shows what it needs",
        )
    environment = environments.install(
        name,
        engine_needs.requirements,
        engine_needs.imports,
        lambda line: echo(f"  {line}", err=True),
        extra_arguments=engine_needs.pip_arguments,
        isolated=isolated,
    )
    if form is TableFormat.json:
        emit_json(_row(name))
        return
    versions = ", ".join(
        f"{package} {version}" for package, version in environment.versions.items()
    )
    echo(f"{name}: {versions}; {gib(environment.size_bytes)} in {environment.folder}")


def _remove(name: str, form: TableFormat) -> None:
    engine_requirements(name)
    removed = environments.remove(name)
    if form is TableFormat.json:
        emit_json({"name": name, "removed": removed})
    else:
        echo(f"{name}: {'removed' if removed else 'no environment to remove'}")


def _installable() -> str:
    return (
        ", ".join(name for name in engine_names() if engine_requirements(name).requirements)
        or "none"
    )


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
