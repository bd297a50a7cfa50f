"""Parallel axes are enumerated in core/axes alone, so that a new one reaches every table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.core.axes import AXES, MESH_AXES
from paceline.core.layout import AXIS_FIELDS, MODEL_AXES, Layout
from paceline.trainer import config

PACKAGE = Path(__file__).parents[2] / "paceline"
ENUMERATED = {"tp", "pp", "cp"}
"""Code that names these three together enumerates the axes by hand."""
ALLOWED = {
    "engines/log_reading/megatron_settings.py": "names as Megatron prints them",
    "engines/log_reading/mlperf_system.py": "names as an MLPerf system file prints them",
    "engines/maxtext.py": "names as MaxText prints them",
    "engines/torchtitan/log_format.py": "names as torchtitan prints them",
    "estimate/fit/published.py": "columns of published tables",
    "estimate/memory/device_memory.py": "groups that make communicators, with buffers of their own",
    "layouts/search/space.py": "ranges that are searched differ from axis to axis",
    "profiles/nccl/traffic_comparison.py": "ranks of the groups of each axis, in the mesh's order",
    "trainer/config.py": "the trainer's own table; a test below compares it",
    "trainer/measure/traffic.py": "groups of the mesh, which are not one an axis",
}
"""Files that name them for a reason of their own."""


def enumerations(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of literals, calls and chains of operators that name all of ENUMERATED."""
    for node in ast.walk(tree):
        names: set[str] = set()
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            names = {name for element in node.elts for name in _names(element)}
        elif isinstance(node, ast.Dict):
            names = {name for key in node.keys if key for name in _names(key)}
        elif isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, (ast.BinOp, ast.BoolOp)):
            names = {name for part in ast.walk(node) for name in _names(part)}
        if names >= ENUMERATED:
            yield node.lineno


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


def test_no_file_enumerates_the_axes_by_hand() -> None:
    found = {
        str(path.relative_to(PACKAGE)): sorted(lines)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "core" / "axes"
        and (lines := set(enumerations(ast.parse(path.read_text()))))
    }

    assert {path: lines for path, lines in found.items() if path not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED), "an exception that nobody needs any more"


@pytest.mark.parametrize(
    ("code", "enumerates"),
    [
        ('AXES = ("tp", "pp", "cp", "ep")', True),
        ('AXES = (b"tp", b"cp", b"pp")', True),
        ('COLUMNS = {"tp": 1, "pp": 2, "cp": 3}', True),
        ("devices = x.tp * x.pp * x.cp", True),
        ("alone = x.tp == 1 and x.pp == 1 and x.cp == 1", True),
        ("case = replace(case, tp=1, pp=1, cp=1)", True),
        ('AXES = ("tp", "cp")', False),
        ("tokens = micro_batch * seq_len / x.cp", False),
    ],
)
def test_an_enumeration_is_seen(code: str, enumerates: bool) -> None:
    assert bool(list(enumerations(ast.parse(code)))) == enumerates


def test_every_size_of_a_layout_is_a_declared_axis() -> None:
    assert {axis.name for axis in AXES} == {"dp", *AXIS_FIELDS}
    assert set(MODEL_AXES) <= set(AXIS_FIELDS) <= set(Layout.model_fields)


def test_the_trainer_has_the_dimensions_that_are_declared() -> None:
    assert config.MESH_AXES == MESH_AXES
    assert {field.name for field in fields(config.LayoutConfig)} >= {*AXIS_FIELDS}
