"""Studies: how each published benchmark is repeated, as commands that could be typed by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import resources
from itertools import product

from paceline.core.errors import UserError, did_you_mean
from paceline.core.value import Value
from paceline.files.yaml_file import read_shipped


class StudyStep(Value):
    """One command of a study, or one per combination of `grid`."""

    about: str
    """Purpose of the command in a few words."""
    command: str
    """Command line after `paceline`. `{NAME}` is replaced by the values of `grid`."""
    grid: dict[str, tuple[str | int, ...]] = {}
    size: str = ""
    """Size of the hardware. The size of staged files is computed."""

    @property
    def commands(self) -> Iterator[list[str]]:
        """The words of each command."""
        for values in product(*self.grid.values()):
            yield shlex.split(self.command.format(**dict(zip(self.grid, values, strict=True))))


class StudyPart(Value):
    """The commands of a study at one size, and what must be done by hand before."""

    by_hand: tuple[str, ...] = ()
    cluster: str | None = None
    """Cluster of the published results."""
    steps: tuple[StudyStep, ...]


class Study(Value):
    """A published benchmark: commands from nothing to a result, and the figures to compare with."""

    title: str
    references: tuple[str, ...]
    """Published sources, tables or rows."""
    guide: str
    """Page of the documentation."""
    full: StudyPart
    tiny: StudyPart


def study_names() -> list[str]:
    """Return the names of all studies."""
    folder = resources.files("paceline.files") / "studies"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_study(name: str) -> Study:
    """Return a study; raise UserError for an unknown one."""
    names = study_names()
    if name not in names:
        raise UserError(
            f"study {name!r}",
            "is unknown",
            allowed=", ".join(names),
            remedy=did_you_mean(name, names) or None,
        )
    path = resources.files("paceline.files") / "studies" / f"{name}.yaml"
    return Study.model_validate(read_shipped(path))
