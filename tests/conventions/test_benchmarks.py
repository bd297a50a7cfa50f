"""Benchmarks, which no other test runs as a whole, import only what the package has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@cache
def names_in(module: str) -> frozenset[str]:
    """Return what a module or package of the repository defines, imports or holds."""
    place = ROOT.joinpath(*module.split("."))
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not source.is_file():
        return frozenset(path.stem for path in place.glob("*"))
    tree = ast.parse(source.read_text("utf-8"))
    bound = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    defined = (
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )
    imported = (
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )
    held = (path.stem for path in place.glob("*")) if place.is_dir() else ()
    return frozenset((*bound, *defined, *imported, *held))


def missing(code: str) -> Iterator[str]:
    """Yield every import from the repository's packages that finds nothing."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.split(".")[0] in ("paceline", "tests", "benchmarks"):
            known = names_in(node.module)
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in known)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_imports_what_there_is(script: Path) -> None:
    assert list(missing(script.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "from paceline.mlperf.run.request import NAMES",
        "from paceline.nothing import x",
        "from paceline.core import nothing",
    ],
)
def test_a_missing_name_is_noticed(line: str) -> None:
    assert len(list(missing(line))) == 1
