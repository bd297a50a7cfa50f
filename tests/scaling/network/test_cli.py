"""`paceline probe network` measures all collectives among the devices of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import with_option_groups
from paceline.cli.probe_network import network
from paceline.core.errors import SystemFaultError, UserError
from paceline.scaling.network.measurement import payloads
from paceline.scaling.network.readings import OPERATIONS

app = typer.Typer()
app.command("network")(with_option_groups(network))


def run(folder: Path, *arguments: str) -> Any:
    words = [*arguments, "--device=cpu", "--json", f"--runs-dir={folder}"]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_every_collective_is_measured_and_right(tmp_path: Path):
    document = run(tmp_path, "--min-bytes=1000", "--max-bytes=5000", "--seconds=1")
    rows = document["collectives"]
    assert [row["operation"] for row in rows] == [each for each in OPERATIONS for _ in range(3)]
    assert [row["bytes"] for row in rows[:3]] == [1000, 4000, 5000]
    assert all(row["ranks"] == 2 and row["wrong"] == 0 and row["n"] == 7 for row in rows)
    assert document["pairs"] == [] and document["faults"] == []
    assert (Path(document["folder"]) / "report.html").is_file()


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"'gossip' is not a collective; .*all_reduce"):
        run(tmp_path, "--ops=gossip")
    with pytest.raises(UserError, match="one device has no network"):
        run(tmp_path, "--devices=1")
    with pytest.raises(SystemFaultError, match="nothing was measured"):
        run(tmp_path, "--ops=none")


def test_payloads_grow_by_four_up_to_the_largest():
    assert payloads(4, 100) == [4, 16, 64, 100]
    assert payloads(1024, 1024) == [1024] == payloads(1024, 10)
