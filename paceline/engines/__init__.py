"""Training frameworks: each starts runs (RunSpec to Job), reads its own logs, or both.

One module or package per framework. Modules are discovered by name, so adding a framework needs no
change elsewhere. Plug-ins add frameworks and log formats of other distributions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

from paceline.core.errors import UserError, unknown_name
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.log_reading.generic import column_choice, generic_format
from paceline.engines.log_reading.log_content import LogFormat
from paceline.engines.log_reading.table_format import (
    FormatTable,
    is_table_path,
    read_table,
    shipped_tables,
    user_tables_folder,
)
from paceline.engines.log_reading.table_reader import table_format
from paceline.engines.support import Support, TestedProgram
from paceline.files.plugins import ENGINES, LOG_FORMATS, plugins
from paceline.files.recipe import Recipe


class Engine(Protocol):
    """Interface of a framework module that can start runs.

    SUPPORT declares the supported part of a RunSpec per way to start the framework (`""` if there
    is only one).

    Event lines from the ranks take precedence over their logs, which the module's LOG_FORMAT reads.
    TESTED_PROGRAMS lists the versions of programs that it has started for real.
    A framework with its own environment lists it in REQUIREMENTS (pip pins) and IMPORTS (modules
    that must be importable in it); PIP_ARGUMENTS are additional arguments to pip.
    """

    SUPPORT: Mapping[str, Support]

    def unsupported(self, spec: RunSpec) -> list[str]:
        """Return what the framework cannot do of `spec`, one sentence each."""
        ...

    def missing(self, spec: RunSpec) -> str | None:
        """Return what is not installed but needed, as `what; remedy`, or None."""
        ...

    def job(self, spec: RunSpec, name: str) -> Job:
        """Return the program to start, with every file it needs."""
        ...

    def settings(self, spec: RunSpec) -> dict[str, Any]:
        """Return the resolved settings as the framework reads them."""
        ...


ENGINE_ATTRIBUTES = ("SUPPORT", "unsupported", "missing", "job", "settings")
"""Attributes of `Engine` that a plug-in must have."""


@dataclass(frozen=True)
class EngineRequirements:
    """Packages and programs that a framework needs in order to start."""

    title: str
    requirements: tuple[str, ...]
    """Pip pins for its own environment; empty for a framework without one."""
    imports: tuple[str, ...]
    pip_arguments: tuple[str, ...]
    """Additional arguments to pip, such as `--no-deps`."""
    commands: tuple[str, ...] = ()
    """Programs that must be on this machine's PATH."""
    outside: str = ""
    """Requirement that no Python environment can meet."""
    tested_programs: tuple[TestedProgram, ...] = ()
    """Versions of programs that were started for real."""


def engine_requirements(name: str) -> EngineRequirements:
    """Return the requirements of engine `name`; raise UserError with the nearest name."""
    module = _module_with(name, "job", engine_names)
    return EngineRequirements(
        title=module.LOG_FORMAT.title
        if hasattr(module, "LOG_FORMAT")
        else getattr(module, "TITLE", name),
        requirements=getattr(module, "REQUIREMENTS", ()),
        imports=getattr(module, "IMPORTS", ()),
        pip_arguments=getattr(module, "PIP_ARGUMENTS", ()),
        commands=getattr(module, "COMMANDS", ()),
        outside=getattr(module, "OUTSIDE", ""),
        tested_programs=getattr(module, "TESTED_PROGRAMS", ()),
    )


def last_step(spec: RunSpec) -> int | None:
    """Return the step at which the log of the run's engine ends; None if unknown.

    A module whose framework does not count the requested steps defines `last_step` itself.
    """
    engine_last_step = getattr(_module(spec.engine), "last_step", None)
    return engine_last_step(spec) if engine_last_step else spec.steps_requested


def notes(spec: RunSpec) -> list[str]:
    """Return what the run's engine tells about its results before it starts, one sentence each.

    Such a module defines `notes`.
    """
    engine_notes = getattr(_module(spec.engine), "notes", None)
    return engine_notes(spec) if engine_notes else []


def ends_at_target(spec: RunSpec) -> bool:
    """Return whether the run's engine stops at a quality target, so fewer steps can be complete.

    Such a module sets `ENDS_AT_TARGET`.
    """
    return getattr(_module(spec.engine), "ENDS_AT_TARGET", False)


def sizes_in_files(recipe: Recipe, cluster: Cluster) -> dict[str, int]:
    """Return the sizes that files of the recipe's engine set, by field; empty for most engines.

    Such a module defines `sizes_in_files` itself. A field is one of `cluster`, `layout` or
    `training`. Raises UserError for files that cannot be used.
    """
    engine_sizes = getattr(_module_with(recipe.engine, "job", engine_names), "sizes_in_files", None)
    return engine_sizes(recipe, cluster) if engine_sizes else {}


def engine_names() -> list[str]:
    """Return the names of all frameworks that can be started."""
    return [name for name in _names() if hasattr(_module(name), "job")]


def engine(name: str) -> Engine:
    """Return the engine called `name`; raise UserError with the nearest name."""
    return cast(Engine, _module_with(name, "job", engine_names))


def log_formats() -> dict[str, LogFormat]:
    """Return the log formats by engine name, most specific first."""
    modules = {name: _module(name) for name in _names()}
    by_name = {name: m.LOG_FORMAT for name, m in modules.items() if hasattr(m, "LOG_FORMAT")}
    by_name = {**table_formats(), **by_name}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].precedence, item[0])))


def log_format(name: str) -> LogFormat:
    """Return the log format of engine `name` (`-` may replace `_`), or of a file with a table.

    Raises UserError for an unknown name and for an invalid file.
    """
    if is_table_path(name):
        return _table_of(name)
    if (choice := column_choice(name)) is not None:
        return generic_format(choice)
    if (table := table_formats().get(name.lower().replace("-", "_"))) is not None:
        return table
    module = _module_with(name.lower().replace("-", "_"), "LOG_FORMAT", log_formats)
    return cast(LogFormat, module.LOG_FORMAT)


@cache
def table_formats() -> dict[str, LogFormat]:
    """Return the log formats that are declared as tables."""
    return {name: table_format(table) for name, table in format_tables().items()}


@cache
def format_tables() -> dict[str, FormatTable]:
    """Return the tables of log formats: shipped ones, then plug-ins', then the user's."""
    values = plugins(LOG_FORMATS, _problem_of_log_format)
    tables = shipped_tables()
    tables |= {
        name: FormatTable.model_validate(value)
        for name, value in values.items()
        if not isinstance(value, LogFormat)
    }
    folder = user_tables_folder()
    if folder.is_dir():
        tables |= {_name_of(path): read_table(path) for path in sorted(folder.glob("*.yaml"))}
    return tables


def format_table(name: str) -> FormatTable | None:
    """Return the table of a log format by name or path; None if it is not declared as a table."""
    if is_table_path(name):
        return read_table(Path(name))
    return format_tables().get(name.lower().replace("-", "_"))


def _name_of(path: Path) -> str:
    """Return the name of a user's table; raise UserError for that of another format."""
    name = path.stem.lower().replace("-", "_")
    if name in _names():
        raise UserError(str(path), "has the name of another log format", remedy="rename the file")
    return name


@cache
def _table_of(path: str) -> LogFormat:
    return table_format(read_table(Path(path)))


def _names() -> list[str]:
    return sorted({*_shipped_names(tuple(__path__)), *_plugins()})


@cache
def _shipped_names(folders: tuple[str, ...]) -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(folders))


def _module(name: str) -> ModuleType:
    if name in _shipped_names(tuple(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    return _plugins()[name]


def _plugins() -> dict[str, Any]:
    """Return the modules of plug-ins by name; a log format is wrapped like a module with one."""
    formats = plugins(LOG_FORMATS, _problem_of_log_format)
    format_modules = {
        name: SimpleNamespace(LOG_FORMAT=each)
        for name, each in formats.items()
        if isinstance(each, LogFormat)
    }
    return {**format_modules, **plugins(ENGINES, _problem_of_engine)}


def _problem_of_log_format(name: str, value: Any) -> str | None:
    if name in _shipped_names(tuple(__path__)):
        return "Paceline has a framework of this name"
    if isinstance(value, Mapping):
        FormatTable.model_validate(value)
    elif not isinstance(value, LogFormat):
        return "it is neither a LogFormat nor a dict of a log format's table"
    return None


def _problem_of_engine(name: str, value: Any) -> str | None:
    if name in _shipped_names(tuple(__path__)):
        return "Paceline has a framework of this name"
    absent = [each for each in ENGINE_ATTRIBUTES if not hasattr(value, each)]
    if absent:
        return f"it has no {', '.join(absent)}"
    own_format = getattr(value, "LOG_FORMAT", None)
    return None if own_format is None else _problem_of_log_format(name, own_format)


def _module_with(name: str, attribute: str, candidates: Callable[[], Iterable[str]]) -> Any:
    """Return the module called `name` if it has the attribute `needed`, without importing others.

    Raises UserError with the names of all `candidates`, which imports them all.
    """
    if name in _shipped_names(tuple(__path__)) or name in _plugins():
        module = _module(name)
        if hasattr(module, attribute):
            return module
    kind, listing = ("log format", "paceline formats")
    if attribute == "job":
        kind, listing = "engine", "paceline recipes engines"
    raise unknown_name(f"{kind} {name!r}", "is unknown", name, candidates(), listing=listing)
