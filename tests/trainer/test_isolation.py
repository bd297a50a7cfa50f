"""The trainer needs torch and the standard library, and nothing else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from paceline.files.trainer_program import write_program
from tests.trainer.example import LIMIT_S, end, settings, train_alone

TRAINER = Path(__file__).parents[2] / "paceline" / "trainer"
FILES = sorted(TRAINER.rglob("*.py"))


def name_of(path: Path) -> str:
    """A file's place in the trainer."""
    return str(path.relative_to(TRAINER))


def foreign_imports(source: str) -> set[str]:
    """Imported third-party libraries, and modules of the package outside `trainer`."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    foreign = {name for name in modules if not name.startswith("paceline.trainer.")}
    return {
        name if name.startswith("paceline") else name.partition(".")[0] for name in foreign
    } - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_torch_alone(path: Path) -> None:
    allowed = {"torch", "torchao"} if path.name == "low_precision.py" else {"torch"}
    assert foreign_imports(path.read_text()) <= allowed


def test_a_foreign_import_is_noticed() -> None:
    source = "import json\ndef f():\n    from numpy.linalg import norm\n"
    source += "from paceline.core.units import GIB\nfrom paceline.trainer.config import Model"

    assert foreign_imports(source) == {"numpy", "paceline.core.units"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


def needs_of(name: str) -> set[str]:
    """A package with all that it requires here, extras left out."""
    found, open_ends = set[str](), [name]
    while open_ends:
        name = open_ends.pop()
        try:
            wishes = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform
        if name not in found:
            found.add(name)
            open_ends += [re.split(r"[\s;<>=!~\[(]", w)[0] for w in wishes if "extra ==" not in w]
    return found


def link_packages(names: set[str], folder: Path) -> None:
    """Links to the top-level files of these packages, and of no other, in `folder`."""
    for name in names:
        tops = {file.parts[0] for file in metadata.files(name) or [] if ".." not in file.parts}
        for top in tops:
            origin = Path(str(metadata.distribution(name).locate_file(top)))
            if origin.exists() and not (folder / top).exists():
                (folder / top).symlink_to(origin)


@pytest.fixture(scope="module")
def only_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of an interpreter that finds torch, its needs, and nothing else."""
    folder = tmp_path_factory.mktemp("only-torch")
    link_packages(needs_of("torch"), folder)
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return {**kept, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    """What a program prints under an interpreter without site-packages."""
    # -S keeps site-packages away. torchrun would start its ranks without it, so there is only one.
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_that_environment_has_torch_and_no_other_library(
    only_torch: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "look.py").write_text(
        "import importlib.util as u, torch\n"
        "print(torch.__version__, [n for n in ('numpy', 'pydantic', 'paceline') if u.find_spec(n)])"
    )

    assert run(only_torch, tmp_path, "look.py").split() == [torch.__version__, "[]"]


def test_a_copy_trains_where_only_torch_is(only_torch: dict[str, str], tmp_path: Path) -> None:
    write_program("main", tmp_path)
    raw = settings(steps=3, source="stdlib", dtype="bf16")
    (tmp_path / "trainer.json").write_text(json.dumps(raw))

    run(only_torch, tmp_path, "trainer", "trainer.json")

    assert end(tmp_path)["status"] == "ok" and end(tmp_path)["steps"] == 3


def test_a_torch_that_cannot_be_loaded_is_told_in_the_end_line(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text('raise ImportError("libcudart.so is not there")')

    code = train_alone(tmp_path / "run", settings(), PYTHONPATH=str(tmp_path / "broken"))

    assert code == 1
    last = end(tmp_path / "run")
    assert (last["status"], last["reason"]) == ("failed", "ImportError: libcudart.so is not there")
