"""Frameworks: each turns a RunSpec into a Job, or reads the logs that it writes, or both.

One file per framework. A new one is found by its name; nothing else needs to change.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

from paceline.core.logs.logged import Dialect
from paceline.core.run import Job, RunSpec
from paceline.core.steps import Step
from paceline.errors import UserError, did_you_mean
from paceline.events import RankLog


class Engine(Protocol):
    """What a module of this folder offers."""

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

    def steps(self, lines: Iterable[str]) -> Iterator[Step]:
        """The steps that log lines tell."""
        ...

    def read_rank(self, lines: Iterable[str]) -> RankLog:
        """Everything that one rank's lines tell: start, steps, end."""
        ...


def engine_names() -> list[str]:
    """Every framework that can be started."""
    return [name for name, module in _modules().items() if hasattr(module, "job")]


def engine(name: str) -> Engine:
    """The engine called `name`; raises UserError with the nearest name."""
    return cast(Engine, _named(name, engine_names()))


def dialects() -> dict[str, Dialect]:
    """How the frameworks' logs are read, by engine name, most specific first."""
    found = {
        name: module.DIALECT for name, module in _modules().items() if hasattr(module, "DIALECT")
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].precedence, item[0])))


def dialect(name: str) -> Dialect:
    """The dialect of the engine called `name`, `-` for `_` allowed; raises UserError."""
    return cast(Dialect, _named(name.lower().replace("-", "_"), list(dialects())).DIALECT)


@cache
def _modules() -> dict[str, ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def _named(name: str, names: list[str]) -> Any:
    if name not in names:
        raise UserError(
            f"engine {name!r}", "is unknown", allowed=", ".join(names),
            remedy=did_you_mean(name, names) or None,
        )  # fmt: skip
    return _modules()[name]
