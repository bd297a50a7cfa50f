"""A launcher is a module and a line in a table: nothing else has to know of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.launchers import LAUNCHERS, Capabilities, capabilities
from paceline.machines import launcher
from tests.runs.test_flow import SMALL


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "toy", Capabilities("tests.machines.toy_launcher"))


@pytest.mark.usefixtures("toy")
def test_a_run_of_two_nodes_goes_through_a_new_launcher(tmp_path: Path) -> None:
    options = ["--launcher", "toy", "--nodes", "2", "--devices", "1", "--set", "steps=20"]
    words = ["run", "tiny-llama", "--no-probe", *SMALL, *options, "--json"]
    done = CliRunner().invoke(app, [*words, "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["status"] == "ok"
    record = json.loads((tmp_path / result["run"] / "run.json").read_text())
    assert record["spec"]["cluster"]["launcher"] == "toy"
    assert {path.name for path in (tmp_path / result["run"] / "steps").iterdir()} == {
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    }


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_offers_what_the_protocol_names(name: str) -> None:
    for function in ("render", "prepare", "submit", "unfit_hosts"):
        assert callable(getattr(launcher(name), function))
    if LAUNCHERS[name].lists_hosts:
        assert callable(launcher(name).available_hosts)


def test_an_unknown_launcher_is_refused_with_those_there_are() -> None:
    allowed = "allowed: kubernetes, local, ray, slurm, ssh"
    with pytest.raises(UserError, match=f"not available; {allowed}"):
        capabilities("pbs")
    with pytest.raises(ValueError, match=allowed):
        Cluster(name="c", device="cpu", devices_per_node=1, launcher="pbs")
