"""The numbers that keep the code small: file and function lengths and annotations."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults(root: Path) -> list[str]:
    """The limits that the code under `root` breaks, each with its value."""
    source = read(root / "paceline")
    tests = read(root / "tests")
    files = [length for _, tree, length in source if says_more_than_a_docstring(tree)]
    functions = [f for _, tree, _ in source for f in ast.walk(tree) if isinstance(f, Function)]
    lengths = [length_of(function) for function in functions]
    typed = sum(map(is_annotated, functions)) / len(functions)
    found = [f"{path} has {n} lines, more than 400" for path, _, n in source + tests if n > 400]
    limits = [
        ("lines in the median file", median(files), "at most", 150),
        ("lines in the median function", median(lengths), "at most", 12),
        ("lines in the 95th percentile function", p95(lengths), "at most", 50),
        ("of the functions are fully annotated", typed, "at least", 0.97),
    ]
    return found + [
        f"{value:.3g} {what}, {bound} {limit:g} wanted"
        for what, value, bound, limit in limits
        if (value > limit if bound == "at most" else value < limit)
    ]


def read(folder: Path) -> list[tuple[Path, ast.Module, int]]:
    """Every Python file under `folder` with its tree and its number of lines."""
    texts = [(path, path.read_text()) for path in sorted(folder.rglob("*.py"))]
    return [(path, ast.parse(text), len(text.splitlines())) for path, text in texts]


def says_more_than_a_docstring(tree: ast.Module) -> bool:
    """False for the empty files that make a folder a package, which would flatter the median."""
    return len(tree.body) > (ast.get_docstring(tree) is not None)


def length_of(function: Function) -> int:
    """Lines from `def` to the last statement, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_annotated(function: Function) -> bool:
    """True when every parameter but self and cls has a type, and so has the result."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    starred = [a for a in (spec.vararg, spec.kwarg) if a]
    given = [a for a in named + starred if a.arg not in ("self", "cls")]
    return function.returns is not None and all(a.annotation for a in given)


def p95(lengths: Iterable[int]) -> int:
    """The smallest length that at least 95 % of the functions do not exceed."""
    ordered = sorted(lengths)
    return ordered[ceil(0.95 * len(ordered)) - 1]


def test_the_code_keeps_its_size() -> None:
    assert faults(ROOT) == []


def function(num_lines: int, head: str = "def f(a: int) -> int:") -> str:
    """The source of a function of this many lines."""
    return "\n".join([head, *["    a += 1"] * (num_lines - 2), "    return a\n"])


SOUND = {
    "paceline/__init__.py": '"""A package."""\n',
    "paceline/a.py": function(3) * 10,
    "paceline/b.py": function(3) * 9 + function(50),
    "tests/test_a.py": "a = 1\n" * 200,
}


def made_up(root: Path, files: dict[str, str]) -> Path:
    """A repository of these files in `root`."""
    for name, source in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(source)
    return root


def test_a_sound_repository_has_no_faults(tmp_path: Path) -> None:
    assert faults(made_up(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"paceline/c.py": "a = 1\n" * 401, "tests/test_c.py": "a = 1\n" * 400}, "c.py has 401"),
        ({"tests/test_c.py": "a = 1\n" * 401}, "test_c.py has 401 lines, more than 400"),
        (
            {"paceline/a.py": "a = 1\n" * 151, "paceline/c.py": "a = 1\n" * 151}
            | {"tests/test_c.py": "a = 1\n" * 300},
            "151 lines in the median file, at most 150 wanted",
        ),
        (
            {"paceline/a.py": function(13) * 10, "paceline/c.py": function(13)},
            "13 lines in the median function, at most 12 wanted",
        ),
        (
            {"paceline/a.py": function(3) * 8 + function(51) * 2},
            "51 lines in the 95th percentile function",
        ),
        (
            {"paceline/a.py": function(3) * 9 + function(3, "def f(a) -> int:")},
            "0.95 of the functions are fully annotated, at least 0.97 wanted",
        ),
    ],
)
def test_a_breach_is_found(tmp_path: Path, changed: dict[str, str], fault: str) -> None:
    found = faults(made_up(tmp_path, SOUND | changed))

    assert len(found) == 1
    assert fault in found[0]


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
    (parsed,) = ast.parse(function(2, head)).body

    assert isinstance(parsed, Function)
    assert is_annotated(parsed) is annotated
