"""The subpackages and their imports: pyproject.toml says it, import-linter holds it.

`make lint` checks the package. Here each contract is seen to fail on a copy that breaks it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VAGUE_NAMES = {"utils", "helpers", "common"}
TRAINER_LIBRARIES = {"torch", "torchao"}
MAX_TOP_MODULES = 6


def broken_contracts(root: Path) -> list[str]:
    """Names of the contracts that the package under `root` breaks."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return re.findall(r"^(.+) BROKEN(?: \(\d+ ignored imports?\))?$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's code and of the contracts."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", root)
    ignored = shutil.ignore_patterns("*.yaml", "*.json", "templates", "__pycache__")
    shutil.copytree(ROOT / "paceline", root / "paceline", ignore=ignored)
    return root


def test_the_package_keeps_its_contracts(copy: Path) -> None:
    assert broken_contracts(copy) == []


LAYERS = "A package imports only packages below it"
CYCLES = "Neighbours import each other in one direction"
TRAINER = "The trainer is a program of its own, and torch is for it alone"
LIBRARIES = "The trainer takes nothing but torch"


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/units.py", "from paceline.files import recipe", LAYERS),
        ("core/units.py", "def f():\n    from paceline.runs import flow", LAYERS),
        ("estimate/extra.py", "from paceline.runs import flow", LAYERS),
        ("engines/extra.py", "from paceline.machines import local", LAYERS),
        ("extra/__init__.py", "", LAYERS),
        ("core/stats.py", "from paceline.core import window", CYCLES),
        ("runs/flow.py", "from paceline.trainer import config", TRAINER),
        ("core/flops.py", "def f():\n    import torch.nn", TRAINER),
        ("trainer/config.py", "import numpy", LIBRARIES),
    ],
)
def test_a_breach_breaks_its_contract(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / "paceline" / file
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        assert contract in broken_contracts(copy)
    finally:
        path.unlink() if before is None else path.write_text(before)


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every file of the package by its path in it, with its tree."""
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        yield str(path.relative_to(ROOT / "paceline")), ast.parse(path.read_text())


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {part.removesuffix(".py") for name, _ in modules() for part in name.split("/")}

    assert not names & VAGUE_NAMES


def test_few_modules_are_outside_a_package() -> None:
    top_modules = [name for name, _ in modules() if "/" not in name]

    assert len(top_modules) <= MAX_TOP_MODULES


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)

    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_trainer_imports_only_the_standard_library_and_torch() -> None:
    libraries = {
        library
        for name, tree in modules()
        if name.startswith("trainer/")
        for library in imported_libraries(tree)
    }

    assert libraries - sys.stdlib_module_names - TRAINER_LIBRARIES == {"paceline"}


def imported_libraries(tree: ast.Module) -> Iterator[str]:
    """Top names of all that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
