"""The native trainer's exchanges, as `paceline probe profile --tool nccl` counts them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command import paceline
from tests.profiles.nccl.debug_lines import setup, steps
from tests.profiles.test_profile_run import SMALL


def test_bytes_of_a_step_stand_beside_what_the_layout_asks_for(tmp_path: Path) -> None:
    changes = [word for change in SMALL for word in ("--set", change)]
    asked = ["--device", "cpu", "--devices", "2", "--ranks", "1", "--steps", "3-4", "--no-probe"]
    tool = ["--tool", "nccl"]
    answer = paceline("probe", "profile", "tiny-llama", *tool, *changes, *asked, runs=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "Communication per rank per step (trainer counters, 1 rank)" in answer.stdout

    (file,) = tmp_path.glob("*/profile.json")
    profile = json.loads(file.read_text())
    (row,) = profile["traffic"]
    assert (row["axis"], row["collective"]) == ("dp", "all_reduce")
    assert row["counted_bytes"] == row["predicted_bytes"] > 0
    assert (profile["ranks"], profile["steps"]) == ([1], [3, 4])
    assert profile["overhead"]["why"] and not profile["warnings"]


def test_a_log_from_elsewhere_is_read_as_text_and_as_a_table(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("\n".join([*setup(), *steps()]))
    told = paceline("probe", "profile", "--tool", "nccl", "--from", str(log))
    assert told.returncode == 0 and "connections: 1 P2P/CUMEM, 1 NET/IB GDRDMA" in told.stdout

    charts = paceline(
        "probe", "profile", "--tool", "nccl", "--from", log, "--charts", tmp_path / "charts"
    )
    assert "charts: no chart is written, because there is nothing to draw" in charts.stderr
    assert not (tmp_path / "charts").exists()
    table = paceline("probe", "profile", "--tool", "nccl", "--from", str(log), "--format", "csv")
    head, *rows = table.stdout.splitlines()
    assert head.startswith("axis,ranks,stride") and len(rows) == 4
    assert ",4,2,2,reduce_scatter,2.0,16000.0,12000.0," in rows[0]


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "other.log"
    log.write_text("step 1 loss 2.0\n")
    answer = paceline("probe", "profile", "--tool", "nccl", "--from", str(log))
    assert answer.returncode == 1 and "holds no NCCL lines" in answer.stderr
