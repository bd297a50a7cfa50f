"""`paceline probe experts` exchanges tokens between real ranks and refuses what is unbalanced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import with_option_groups
from paceline.cli.probe_experts import experts
from paceline.core.errors import UserError
from paceline.scaling.experts.report import ExpertsReport

app = typer.Typer()
app.command("experts")(with_option_groups(experts))


def run(folder: Path, *arguments: str) -> Any:
    words = [*arguments, "--device=cpu", "--json", f"--runs-dir={folder}"]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_every_part_of_four_ranks_is_measured_and_right(tmp_path: Path):
    sizes = ("--tokens=64", "--hidden=32", "--ffn=16", "--experts=8", "--top-k=2")
    document = run(tmp_path, *sizes, "--devices=4", "--seconds=0.1")
    rows = {row["part"]: row for row in document["rows"]}
    assert list(rows) == ["dispatch", "experts", "combine", "total"]
    sent = 64 * 2 * 32 * 4 * 3 / 4
    assert rows["dispatch"]["bytes"] == rows["combine"]["bytes"] == sent
    assert rows["dispatch"]["bytes_per_s"] == pytest.approx(sent / rows["dispatch"]["time_s"])
    flops = 2 * 3 * 64 * 2 * 32 * 16
    assert rows["experts"]["flops_per_s"] == pytest.approx(flops / rows["experts"]["time_s"])
    assert all(row["n"] >= 5 for row in rows.values())
    assert document["ranks"] == 4 and document["wrong"] == 0 and document["faults"] == []
    assert {each["dispatcher"] for each in document["absent"]} == {"deepep", "hybridep"}
    best, folder = document.pop("best"), document.pop("folder")
    assert (document.pop("probe"), document.pop("device")) == ("experts", document["device_name"])
    assert best == rows["total"]
    stored = ExpertsReport.model_validate_json(Path(folder).read_text())
    assert stored == ExpertsReport.model_validate(document)


def test_sizes_that_cannot_be_balanced_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="--experts 16: is not a multiple of 3 ranks"):
        run(tmp_path, "--devices=3")
    with pytest.raises(UserError, match="--top-k 17: is more than the experts"):
        run(tmp_path, "--top-k=17")
    with pytest.raises(UserError, match="--tokens 7: x top-k 4 is not a multiple of 16 experts"):
        run(tmp_path, "--tokens=7")
    with pytest.raises(UserError, match="one device exchanges nothing"):
        run(tmp_path, "--devices=1")
    assert list(tmp_path.rglob("*.json")) == []
