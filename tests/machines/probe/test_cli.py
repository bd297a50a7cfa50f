"""`paceline probe memory` and `collective` print their figures in the common form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core.errors import UserError


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["probe", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("name", "figure"), [("memory", "bytes_per_s"), ("collective", "bus_bytes_per_s")]
)
def test_a_probe_prints_rows_and_the_best_of_them(name: str, figure: str):
    document = json.loads(run(name, "--device", "cpu", "--seconds", "0.1", "--json").stdout)
    assert document["probe"] == name and document["device"]
    assert document["best"][figure] == max(row[figure] for row in document["rows"])
    assert all(row["n"] > 0 and row["spread"] >= 0 and row["bytes"] > 0 for row in document["rows"])


def test_a_table_states_its_units():
    lines = run("memory", "--device", "cpu", "--seconds", "0.1").stdout.splitlines()
    assert lines[0].split() == ["size", "copied", "n", "spread"]
    assert "64 MiB" in lines[1] and "B/s" in lines[1]


def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="'tpu' is not one of 'auto', 'cpu', 'cuda'"):
        run("memory", "--device", "tpu")
    with pytest.raises(UserError, match="--ranks: 1 is too small"):
        run("collective", "--ranks", "1")
    with pytest.raises(UserError, match="no visible NVIDIA GPU"):
        run("collective", "--device", "cuda")
