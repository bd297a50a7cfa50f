"""Everything in the package is fully annotated, but for a few functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"
MIN_ANNOTATED = 0.97
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(root: Path) -> list[Function]:
    """Return every function in the Python files under `root`."""
    trees = [ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]


def is_annotated(function: Function) -> bool:
    """Return True when every parameter except self and cls has a type, and so has the result."""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    typed = [p for p in parameters if p is not None and p.arg not in ("self", "cls")]
    return function.returns is not None and all(p.annotation for p in typed)


def test_the_package_is_annotated() -> None:
    annotated = [is_annotated(function) for function in functions(PACKAGE)]

    assert sum(annotated) / len(annotated) >= MIN_ANNOTATED


@pytest.mark.parametrize(
    ("head", "annotated"),
    [
        ("def f(a: int) -> int:", True),
        ("def f(self, a: int) -> None:", True),
        ("async def f() -> None:", True),
        ("def f(a: int):", False),
        ("def f(a, b: int) -> int:", False),
        ("def f(*a, b: int) -> int:", False),
        ("def f(**a) -> int:", False),
        ("def f(*, a) -> int:", False),
    ],
)
def test_annotated_means_every_parameter_and_the_return(head: str, annotated: bool) -> None:
    (parsed,) = ast.parse(f"{head}\n    return 1\n").body

    assert isinstance(parsed, Function)
    assert is_annotated(parsed) is annotated
