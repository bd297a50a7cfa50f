"""`paceline estimate rampup` as a user and as a script call it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from tests.cli.test_errors import paceline
from tests.layouts.rampup.study import SCHEDULE_16GB

STUDY = (
    "estimate",
    "rampup",
    "gpt-1b3",
    "--variant",
    "ramp-up",
    "--max-nodes",
    "16",
    "--software",
    "softmax",
)
NODES = ("--cluster", "jean-zay-v100-16g")


def test_a_plan_as_text_has_a_line_a_stage_and_its_totals():
    done = paceline(*STUDY, *NODES, "--stages", "32,128,512")
    assert done.returncode == 0
    assert re.search(r"plan: [\d,]+ device-hours, [\d,]+\.\d days\b", done.stdout)
    _, _, table = done.stdout.partition("Plan\n")
    lines = table.splitlines()[1:4]
    assert [line.split()[0] for line in lines] == ["32", "128", "512"]
    hours = [float(line.split()[-2].replace(",", "")) for line in lines]
    assert max(hours) > 1e4 and "e+" not in done.stdout


def test_json_has_the_stages_and_the_judgement_of_a_schedule(tmp_path: Path):
    (tmp_path / "table.md").write_text(SCHEDULE_16GB)
    done = paceline(
        *STUDY, *NODES, "--set", "layout.pp=2", "--check", str(tmp_path / "table.md"), "--json"
    )
    document = json.loads(done.stdout)
    assert [stage["batch"] for stage in document["stages"]] == [32, 64, 128, 256, 512]
    assert {stage["verdict"] for stage in document["checked"]["stages"]} == {"slow"}
    assert all(stage["plan"]["bubble_share"] > 0.35 for stage in document["checked"]["stages"])
    assert document["checked"]["days"] > 0 and document["device_hours"] > 0


def test_csv_is_one_table(tmp_path: Path):
    (tmp_path / "table.csv").write_text("nodes,batch\n1,32\n3,512\n")
    checked = paceline(*STUDY, *NODES, "--check", str(tmp_path / "table.csv"), "--format", "csv")
    rows = list(csv.DictReader(checked.stdout.splitlines()))
    assert [row["batch"] for row in rows] == ["32", "512"]
    assert rows[1]["verdict"] == "cannot run" and rows[1]["step_time_s"] == ""
    listed = paceline(*STUDY, *NODES, "--stages", "32,512", "--all", "--format", "csv")
    rows = list(csv.DictReader(listed.stdout.splitlines()))
    assert len(rows) > 4 and {row["batch"] for row in rows} == {"32", "512"}
    assert float(rows[0]["step_time_s"]) > 0


def test_markdown_has_both_tables(tmp_path: Path):
    (tmp_path / "table.md").write_text(SCHEDULE_16GB)
    done = paceline(
        *STUDY,
        *NODES,
        "--set",
        "layout.pp=2",
        "--check",
        str(tmp_path / "table.md"),
        "--format",
        "md",
    )
    assert done.stdout.count("| batch | nodes |") == 2
    assert "| slow | one micro-batch for 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs devices"),
        (("--device", "abacus"), "abacus"),
        (("--device", "H100", "--cluster", "dgx-h100"), "already states the devices"),
        ((*NODES, "--stages", "32,x"), "'x' is not a number"),
        ((*NODES, "--stages", "64,32"), "must increase"),
        ((*NODES, "--stages", "1.5"), "'1.5' is not a number"),
        ((*NODES, "--samples", "0"), "'0' is not a number"),
        ((*NODES, "--samples", "9", "--all-batches"), "takes the samples per stage"),
        ((*NODES, "--check", "/none.csv"), "cannot be read"),
        ((*NODES, "--software", "jax"), "must be one of any, "),
        ((*NODES, "--min-efficiency", "2"), "min-efficiency"),
    ],
)
def test_bad_input_is_one_error_with_exit_code_1(arguments: tuple[str, ...], message: str):
    done = paceline(*STUDY, *arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout
