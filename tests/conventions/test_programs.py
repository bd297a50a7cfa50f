"""Programs that run in a framework's environment: alone they import what Paceline has not."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

ENGINES = Path(paceline.__file__).parent / "engines"
FOREIGN = {"torch", "megatron", "deepspeed", "transformers", "torchtitan", "accelerate"}


def imported(path: Path) -> set[str]:
    """First names of what a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_frameworks_are_imported_by_programs_alone():
    files = [path for path in ENGINES.rglob("*.py") if not path.stem.endswith("_program")]
    assert len(files) > 40
    assert {path: names for path in files if (names := imported(path) & FOREIGN)} == {}


def test_programs_import_nothing_of_paceline():
    programs = [*ENGINES.rglob("*_program.py")]
    assert len(programs) > 4
    assert [path for path in programs if "paceline" in imported(path)] == []
