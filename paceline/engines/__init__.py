"""Frameworks: each turns a RunSpec into a Job, or reads the logs that it writes, or both.

One file per framework. A new one is found by its name; nothing else needs to change.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

from paceline.core.errors import UserError, did_you_mean
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.log_reading.log_content import LogFormat
from paceline.engines.support import Support


class Engine(Protocol):
    """What a module of this folder offers that can start runs.

    SUPPORT declares what the framework takes of a run, by the way that it is started (`""` for the
    only one).

    What the ranks' event lines tell goes before their logs, which the module's LOG_FORMAT reads. A
    framework that has an environment of its own names it in REQUIREMENTS (pins of pip) and IMPORTS
    (modules that must be importable in it); PIP_ARGUMENTS are more of pip's.
    """

    SUPPORT: Mapping[str, Support]

    def unsupported(self, spec: RunSpec) -> list[str]:
        """What the framework cannot do of `spec`, one sentence each."""
        ...

    def missing(self, spec: RunSpec) -> str | None:
        """What is not installed that a start needs, as `what; remedy`, or None."""
        ...

    def job(self, spec: RunSpec, name: str) -> Job:
        """The program to start, with every file it needs."""
        ...

    def settings(self, spec: RunSpec) -> dict[str, Any]:
        """The resolved settings as the framework reads them."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a framework needs that a start would import."""

    title: str
    requirements: tuple[str, ...]
    """Pins of pip for an environment of its own; empty for one that has none."""
    imports: tuple[str, ...]
    pip_arguments: tuple[str, ...]
    """More of pip's arguments, as `--no-deps`."""
    commands: tuple[str, ...] = ()
    """Programs that it calls on this machine."""
    outside: str = ""
    """What it needs that no environment holds."""


def needs(name: str) -> Needs:
    """What the engine called `name` needs; raises UserError with the nearest name."""
    module = _named(name, "job", engine_names)
    return Needs(
        title=module.LOG_FORMAT.title
        if hasattr(module, "LOG_FORMAT")
        else getattr(module, "TITLE", name),
        requirements=getattr(module, "REQUIREMENTS", ()),
        imports=getattr(module, "IMPORTS", ()),
        pip_arguments=getattr(module, "PIP_ARGUMENTS", ()),
        commands=getattr(module, "COMMANDS", ()),
        outside=getattr(module, "OUTSIDE", ""),
    )


def last_step(spec: RunSpec) -> int | None:
    """The step at which the log of the run's engine ends; None where nobody knows.

    A module says so itself, by `last_step`, where its framework counts others than those asked for.
    """
    counted = getattr(_module(spec.engine), "last_step", None)
    return counted(spec) if counted else spec.steps_requested


def ends_at_target(spec: RunSpec) -> bool:
    """Whether the run's engine trains to a quality, so that fewer steps than asked for are whole.

    A module says so by `ENDS_AT_TARGET`.
    """
    return getattr(_module(spec.engine), "ENDS_AT_TARGET", False)


def engine_names() -> list[str]:
    """Every framework that can be started."""
    return [name for name in _names() if hasattr(_module(name), "job")]


def engine(name: str) -> Engine:
    """The engine called `name`; raises UserError with the nearest name."""
    return cast(Engine, _named(name, "job", engine_names))


def log_formats() -> dict[str, LogFormat]:
    """How the frameworks' logs are read, by engine name, most specific first."""
    modules = {name: _module(name) for name in _names()}
    by_name = {name: m.LOG_FORMAT for name, m in modules.items() if hasattr(m, "LOG_FORMAT")}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].precedence, item[0])))


def log_format(name: str) -> LogFormat:
    """The log format of the engine called `name`, `-` for `_` allowed; raises UserError."""
    module = _named(name.lower().replace("-", "_"), "LOG_FORMAT", log_formats)
    return cast(LogFormat, module.LOG_FORMAT)


def _names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _named(name: str, needed: str, candidates: Callable[[], Iterable[str]]) -> Any:
    """The module called `name`, which has what is `needed`; no other is imported for it.

    Raises UserError with the names of those `candidates`, for which all are imported.
    """
    if name in _names():
        module = _module(name)
        if hasattr(module, needed):
            return module
    names = list(candidates())
    raise UserError(
        f"engine {name!r}",
        "is unknown",
        allowed=", ".join(names),
        remedy=did_you_mean(name, names) or None,
    )
