"""A program of the trainer travels with all that it reaches, and takes nothing from elsewhere."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.files.trainer_program import imports, program_files, write_program


def test_a_program_has_what_it_reaches_and_nothing_else() -> None:
    package = "trainer/paceline/trainer"

    assert set(program_files("programs.context_memory")) == {
        "trainer/__main__.py",
        "trainer/paceline/__init__.py",
        f"{package}/__init__.py",
        f"{package}/programs/__init__.py",
        f"{package}/programs/context_memory.py",
        f"{package}/measure/__init__.py",
        f"{package}/measure/machine.py",
    }


def test_what_is_imported_inside_functions_travels_too() -> None:
    names = {name.rpartition("/")[2] for name in program_files("main")}

    assert {"train.py", "pipeline.py", "memory_tracker.py"} <= names
    assert not {"gemm.py", "memory_trace.py"} & names


def test_no_import_of_the_trainer_is_overlooked() -> None:
    for path, text in program_files("main").items():
        nodes = list(ast.walk(ast.parse(text)))
        names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        own = {name for name in names if name.partition(".")[0] == "paceline"}

        assert own <= set(imports(text)), path


def test_every_way_to_write_an_import_is_read() -> None:
    text = (
        "import os, paceline.a as a\nimport paceline.b, paceline\n"
        "if x:\n    from paceline.c import (\n        d,  # why, if\n        e as f,\n    )\n"
        "from paceline import g"
    )

    assert sorted(imports(text)) == [
        *("paceline", "paceline", "paceline.b", "paceline.c"),
        *("paceline.c.d", "paceline.c.e", "paceline.g"),
    ]


@pytest.mark.parametrize("setting", ["PYTHONPATH", "PYTHONSAFEPATH"])
def test_another_paceline_is_not_mixed_in(tmp_path: Path, setting: str) -> None:
    other = tmp_path / "other" / "paceline"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another version')")
    start = write_program("main", tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": str(other.parent), setting: str(other.parent)}

    done = subprocess.run(
        [sys.executable, str(start)],
        cwd=other.parent,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert done.stderr == "usage: trainer trainer.json\n"
