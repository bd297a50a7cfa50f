"""Programs for a framework's environment take nothing of Paceline, and nothing else takes torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINES = Path(__file__).parents[2] / "paceline" / "engines"
PROGRAMS = sorted(ENGINES.rglob("*_program.py"))
OTHERS = sorted(path for path in ENGINES.rglob("*.py") if path not in PROGRAMS)


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports, by their first names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_imports_nothing_of_paceline(path: Path) -> None:
    assert "paceline" not in imported(path)


def test_torch_is_for_programs_alone() -> None:
    assert PROGRAMS and OTHERS
    assert [path.name for path in OTHERS if "torch" in imported(path)] == []
