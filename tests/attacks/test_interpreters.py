"""Modules in the working folder: no interpreter that Paceline starts imports them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import paceline as package
from paceline.core.errors import UserError
from paceline.engines.launch import environments
from paceline.machines.probe import program
from tests.command import paceline
from tests.engines.test_environments import NAME, VERSION, install, wheels

__all__ = ["wheels"]

POISONED = ("paceline", "pip", "torch", "json", "torchtitan", "importlib", NAME)


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose modules leave a mark when they are imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in POISONED:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'mark')!r}, 'w')\nraise SystemExit(3)\n"
        )
    monkeypatch.chdir(folder)
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "engines"))
    return folder


def test_watch_starts_a_run_without_them(poisoned: Path, tmp_path: Path) -> None:
    done = paceline("runs", "watch", "--once", "--", "true", runs=tmp_path / "runs", cwd=poisoned)
    assert "SystemExit" not in done.stderr and not (tmp_path / "mark").exists()
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == 1, done.stderr


def test_engines_are_neither_found_nor_installed_with_them(
    poisoned: Path, tmp_path: Path, wheels: Path
) -> None:
    python = Path(environments.own_interpreter())
    assert environments.absent_modules(python, ("torchtitan", NAME)) == ["torchtitan", NAME]
    assert environments.package_version(python, "pip") is not None
    install(wheels, f"{NAME}=={VERSION}", (NAME,))
    assert environments.installed(NAME) is not None and not (tmp_path / "mark").exists()


@pytest.mark.usefixtures("poisoned")
def test_a_probe_runs_without_them(tmp_path: Path) -> None:
    lines = program.probe_lines(
        sys.executable,
        "programs.allreduce",
        {"device": "cpu", "seconds": 0.1},
        ranks=2,
        limit_s=120,
    )
    assert lines
    assert not (tmp_path / "mark").exists()


def test_modules_and_programs_are_started_apart_from_the_working_folder() -> None:
    """`-m` and `-c` of an interpreter follow -P; scripts find modules in their own folder only."""
    root = Path(package.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        for before, word in zip(node.elts, node.elts[1:], strict=False)
        if isinstance(word, ast.Constant) and word.value in ("-m", "-c")
        if "sys.executable" in ast.unparse(before) or "_python(" in ast.unparse(before)
    ]
    assert found == []


@pytest.mark.parametrize("kind", ["checkout", "link", "file"])
def test_an_engines_folder_that_paceline_did_not_make_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheels: Path, kind: str
) -> None:
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "engines"))
    folder = environments.environments_root() / NAME
    target = tmp_path / "elsewhere" if kind == "link" else folder
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "train.py").write_text("mine")
    if kind == "link":
        (target / environments.MANIFEST).write_text("{}")
        folder.symlink_to(target)

    for change in (
        lambda: environments.remove(NAME),
        lambda: install(wheels, f"{NAME}=={VERSION}", (NAME,)),
    ):
        with pytest.raises(UserError, match=r"not an environment that Paceline installed"):
            change()
    assert (target if kind == "file" else target / "train.py").read_text() == "mine"


def test_an_interrupted_installation_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "engines"))
    folder = environments.environments_root() / NAME
    folder.mkdir(parents=True)
    (folder / environments.MANIFEST).write_text("{}\n")
    (folder / "pyvenv.cfg").write_text("")
    assert environments.installed(NAME) is None
    assert environments.remove(NAME) and not folder.exists()
