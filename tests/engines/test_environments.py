"""Environments of frameworks: made by pip from a wheel of our own, checked, taken away."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster
from paceline.engines.launch import environments
from tests.cli.test_errors import paceline
from tests.example import make_spec

NAME, VERSION = "example_framework", "1.5"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel, whose module tells its version."""
    folder = tmp_path_factory.mktemp("wheels")
    info = f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{NAME}.py", f"version = '{VERSION}'\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "engines"))


def install(wheels: Path, requirement: str, imports: tuple[str, ...]) -> list[str]:
    told: list[str] = []
    offline = ("--no-index", "--find-links", str(wheels))
    environments.install(NAME, [requirement], imports, told.append, extra_arguments=offline)
    return told


def test_a_process_that_has_them_can_still_import_setuptools() -> None:
    """As torch.compile does in a program that uses the Python API."""
    program = "import paceline.engines.launch.environments, setuptools"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_environment_has_what_was_asked_for_and_sees_what_runs_paceline(wheels: Path):
    told = install(wheels, f"{NAME}=={VERSION}", (NAME, "pydantic"))
    made = environments.installed(NAME)
    assert made is not None and made.versions == {NAME: VERSION} and made.size_bytes > 1000
    assert [line.split()[0] for line in told] == ["creating", "installing", "importing"]
    assert install(wheels, f"{NAME}=={VERSION}", (NAME, "pydantic")) == []
    program = f"import {NAME}, pydantic; print({NAME}.version)"
    done = subprocess.run([made.python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{VERSION}\n"

    spec = make_spec(engine=NAME)
    assert environments.interpreter(spec) == str(made.python)
    assert environments.not_installed(spec, ("no_such_module",)) is None
    named = Cluster(name="x", device="cpu", devices_per_node=2, python="/opt/python")
    assert environments.interpreter(make_spec(engine=NAME, cluster=named)) == "/opt/python"
    assert environments.remove(NAME) and not environments.remove(NAME)
    assert "no_such_module cannot be imported; run `paceline recipes engines install" in str(
        environments.not_installed(spec, ("no_such_module", "json"))
    )


@pytest.mark.parametrize(
    ("requirement", "imports", "words"),
    [
        ("no_such_framework==1", (NAME,), "No matching distribution"),
        (f"{NAME}=={VERSION}", ("no_such_module",), "No module named 'no_such_module'"),
    ],
)
def test_what_was_never_finished_is_no_environment(
    wheels: Path, requirement: str, imports: tuple[str, ...], words: str
):
    with pytest.raises(SystemFaultError, match=words):
        install(wheels, requirement, imports)
    assert environments.installed(NAME) is None
    assert not environments.environments_root().joinpath(NAME).exists()


def test_the_verb_lists_what_can_be_started_and_refuses_what_has_no_environment(tmp_path: Path):
    listed = paceline("recipes", "engines", "--format", "csv", runs=tmp_path)
    assert listed.returncode == 0 and "native,Paceline,here" in listed.stdout
    for words, message in (
        (("install",), "needs the name of an engine; allowed: "),
        (("install", "native"), "engine native: has no environment of its own; allowed: "),
        (("remove", "nativ"), "did you mean 'native'?"),
        (("install", "native", "--where", "name=x"), "--where"),
    ):
        done = paceline("recipes", "engines", *words, runs=tmp_path)
        assert done.returncode == 1 and message in done.stderr
