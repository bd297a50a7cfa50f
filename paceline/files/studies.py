"""Studies: how each published benchmark is repeated, as commands that could be typed by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import product

from paceline.core.errors import unknown_name
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

    def with_values(self, values: Mapping[str, str]) -> StudyPart:
        """Return the part with the values of `{NAME}` in its commands."""
        grid: dict[str, tuple[str]] = {name: (value,) for name, value in values.items()}
        steps = (step.model_copy(update={"grid": {**step.grid, **grid}}) for step in self.steps)
        return self.model_copy(update={"steps": tuple(steps)})


class Study(Value):
    """A published benchmark: commands from nothing to a result, and the figures to compare with."""

    title: str
    references: tuple[str, ...]
    """Published sources, tables or rows."""
    guide: str
    """Page of the documentation."""
    benchmarks: dict[str, dict[str, str]] = {}
    """Benchmarks of --benchmark, and their values of `{NAME}` in title and commands. The first is
    the default."""
    full: StudyPart
    tiny: StudyPart

    def of_benchmark(self, name: str | None) -> Study:
        """Return the study of one of its benchmarks; raise UserError for an unknown one."""
        if name is None and not self.benchmarks:
            return self
        name = name or next(iter(self.benchmarks))
        if name not in self.benchmarks:
            raise unknown_name(
                f"--benchmark {name}",
                "is not a benchmark of this study",
                name,
                self.benchmarks,
                if_none="only studies of several benchmarks have it",
            )
        values = {"benchmark": name, **self.benchmarks[name]}
        parts = {"full": self.full.with_values(values), "tiny": self.tiny.with_values(values)}
        return self.model_copy(update={"title": self.title.format(**values), **parts})


def study_names() -> list[str]:
    """Return the names of all studies."""
    folder = resources.files("paceline.files") / "studies"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_study(name: str, benchmark: str | None = None) -> Study:
    """Return a study, with the values of one of its benchmarks.

    Raises UserError for an unknown study or benchmark.
    """
    names = study_names()
    if name not in names:
        raise unknown_name(f"study {name!r}", "is unknown", name, names)
    path = resources.files("paceline.files") / "studies" / f"{name}.yaml"
    return Study.model_validate(read_shipped(path)).of_benchmark(benchmark)
