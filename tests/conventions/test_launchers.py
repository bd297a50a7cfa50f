"""Nothing outside `paceline/machines` compares the name of a launcher: capabilities decide."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline.core.launchers import LAUNCHERS

PACKAGE = Path(__file__).parents[2] / "paceline"


def names_a_launcher(node: ast.expr) -> bool:
    """Return True for a launcher's name, or a literal collection that holds one."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(value in LAUNCHERS for value in constants if isinstance(value, str))


def is_launcher(node: ast.expr) -> bool:
    """Return True for an expression whose own name says that it holds a launcher's name."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return "launcher" in name.lower()


def comparisons(source: str) -> list[int]:
    """Return the lines that compare a launcher with anything, or match its name."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_launcher, sides)) and any(map(names_a_launcher, sides)):
                lines.append(node.lineno)
        elif isinstance(node, ast.Match) and is_launcher(node.subject):
            lines.append(node.lineno)
    return lines


def test_no_launcher_is_compared_by_name_outside_machines() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "machines" not in path.parents and (lines := comparisons(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('cluster.launcher == "slurm"', True),
        ('"ssh" != launcher_name', True),
        ('spec.cluster.launcher in ("ssh", "slurm")', True),
        ('match cluster.launcher:\n    case "ssh": pass', True),
        ("cluster.runs_here", False),
        ("where.launcher == cluster.launcher", False),
        ('profile.kind == "local"', False),
    ],
)
def test_a_comparison_is_found(source: str, found: bool) -> None:
    assert bool(comparisons(source)) is found
