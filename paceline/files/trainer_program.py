"""Export a program of the trainer as files that need only PyTorch, not this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

PROGRAM_FOLDER = "trainer"
"""Folder that Python is started with: it runs `__main__.py` and finds modules there first."""
_START = '''\
"""Start a program of Paceline's trainer from the files next to this one."""

import runpy

runpy.run_module("{module}", run_name="__main__", alter_sys=True)
'''


def program_files(program: str) -> dict[str, str]:
    """Return the text of each file of a program by path: all imported modules, and the entry point.

    `program` is a module of the trainer, such as `programs.gemm`. Imports inside functions count.
    """
    start = f"paceline.trainer.{program}"
    texts: dict[str, str] = {}
    names = [start]
    while names:
        source = _source(names.pop())
        if source is not None and source.path not in texts:
            texts[source.path] = source.text
            names += source.reaches
    texts["__main__.py"] = _START.format(module=start)
    return {f"{PROGRAM_FOLDER}/{path}": texts[path] for path in sorted(texts)}


def write_program(program: str, folder: Path) -> Path:
    """Write a program's files into `folder` and return the path to start with Python."""
    for name, text in program_files(program).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / PROGRAM_FOLDER


@dataclass(frozen=True)
class _Source:
    """A module's file and its imported names, some of which are not modules."""

    path: str
    text: str
    reaches: tuple[str, ...]


@cache
def _source(name: str) -> _Source | None:
    """Return a module of this package, None for any other name."""
    package, *parts = name.split(".")
    if package != "paceline":
        return None
    root = resources.files("paceline")
    path = "/".join([*parts, "__init__"] if root.joinpath(*parts).is_dir() else parts) + ".py"
    if not root.joinpath(path).is_file():
        return None
    text = root.joinpath(path).read_text(encoding="utf-8")
    return _Source(f"paceline/{path}", text, (name.rpartition(".")[0], *imports(text)))


_IMPORT = re.compile(
    r"^[ \t]*(?:from (paceline[\w.]*) import (\([^)]*\)|.*)|import (paceline.*))", re.MULTILINE
)


def imports(text: str) -> Iterator[str]:
    """Yield the imported modules of this package, and imported names, which may be modules.

    Parsing the modules would take most of the time in which a run is planned.
    """
    for module, names, modules in _IMPORT.findall(text):
        if module:
            yield module
            yield from (f"{module}.{name}" for name in _names(names))
        else:
            yield from _names(modules)


def _names(text: str) -> list[str]:
    """Return the names of an import's list, without parentheses, comments and `as`."""
    lines = [line.partition("#")[0].strip(" ()") for line in text.splitlines()]
    return [part.split()[0] for part in ",".join(lines).split(",") if part.strip()]
