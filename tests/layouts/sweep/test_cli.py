"""`paceline sweep`, really run on this machine with models of milliseconds."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.output import TableFormat, emit
from paceline.cli.sweep import exit_code
from paceline.core.layout import Layout
from paceline.layouts.sweep.report import sweep_document
from paceline.layouts.sweep.result import SweepResult, SweepRow
from tests.cli.test_errors import paceline
from tests.runs.test_flow import SMALL
from tests.waiting import wait_until

QUICK = ["sweep", "tiny-llama", "--devices", "2", *SMALL, "--set", "steps=60"]
LISTS = ["--tp", "1,2", "--mbs", "2,3", "--recompute", "none"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A sweep of two layouts that run and two that cannot: runs folder, JSON, standard error."""
    runs = tmp_path_factory.mktemp("runs")
    done = paceline(*QUICK, *LISTS, "--json", runs=runs)
    assert done.returncode == 0, done.stderr
    return runs, json.loads(done.stdout), done.stderr


def by_label(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {" ".join(row["settings"].values()): row for row in document["rows"]}


def test_a_sweep_measures_what_can_run_and_refuses_the_rest(
    swept: tuple[Path, dict[str, Any], str],
):
    _, document, errors = swept
    rows = by_label(document)
    assert [rows[name]["status"] for name in ("1 2 none", "2 2 none")] == ["ok", "ok"]
    assert {rows[name]["status"] for name in ("1 3 none", "2 3 none")} == {"refused"}
    assert sum(row["best"] for row in document["rows"]) == 1
    first = rows["1 2 none"]
    assert first["tokens_per_s"] == pytest.approx(16 * 64 / first["step_time_s"])
    assert first["memory_kind"] == "resident" and first["memory_bytes"] > 0 and first["dp"] == 2
    assert "4 combinations, 2 runs pending, 2 refused" in errors


def test_the_same_command_runs_nothing_again_and_prints_the_same(
    swept: tuple[Path, dict[str, Any], str],
):
    runs, document, _ = swept
    before = len(list(runs.glob("*/run.json")))
    done = paceline(*QUICK, *LISTS, "--json", runs=runs)
    assert done.returncode == 0 and "0 runs pending, 2 already measured" in done.stderr
    assert json.loads(done.stdout)["rows"] == document["rows"]
    assert len(list(runs.glob("*/run.json"))) == before == 2


def test_its_folder_holds_table_document_and_chart(swept: tuple[Path, dict[str, Any], str]):
    runs, document, _ = swept
    folder = runs / document["name"]
    assert json.loads((folder / "sweep.json").read_text())["rows"] == document["rows"]
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    assert len(rows) == 4 and rows[0]["status"] == "ok"
    assert float(rows[0]["step_time_s"]) == document["rows"][0]["step_time_s"]
    assert (folder / "speed-memory.svg").read_text().startswith("<svg")


def test_its_layouts_can_be_compared_as_groups(swept: tuple[Path, dict[str, Any], str]):
    runs, document, _ = swept
    groups = [f"{document['name']}-{row['key']}" for row in document["rows"] if row["key"]]
    done = paceline("compare", *groups, "--allow", "layout", "--json", runs=runs)
    assert done.returncode in (0, 3, 4) and json.loads(done.stdout)["n_a"] == 1


def test_a_dry_run_runs_nothing(tmp_path: Path):
    done = paceline(*QUICK, *LISTS, "--dry-run", "--format", "md", runs=tmp_path)
    assert done.returncode == 0 and done.stdout.count("| waiting |") == 2
    assert "| nodes | TP | PP | DP | MBS | recompute |" in done.stdout
    assert not list(tmp_path.glob("*/run.json"))


def test_lack_of_memory_is_a_row_of_its_own(tmp_path: Path):
    done = paceline(
        "sweep",
        "gpt-1b3-tiny",
        "--devices",
        "2",
        "--mbs",
        "1,8",
        "--recompute",
        "none",
        "--set",
        "steps=12",
        "--set",
        "memory_limit_bytes=80e6",
        "--json",
        runs=tmp_path,
    )
    rows = by_label(json.loads(done.stdout))
    assert rows["8 none"]["status"] == "oom", done.stderr
    assert rows["8 none"]["step_time_s"] is None and rows["8 none"]["reason"]
    # A machine in use may leave too few steady steps.
    assert rows["1 none"]["status"] in ("ok", "incomplete"), done.stderr


def test_pruning_nothing_and_pruning_above_a_bound_is_a_contradiction(tmp_path: Path):
    done = paceline(*QUICK, *LISTS, "--no-prune", "--prune-above", "0.5", runs=tmp_path)
    assert done.returncode == 1 and "has no effect with --no-prune" in done.stderr


def test_nothing_that_can_run_is_bad_input(tmp_path: Path):
    done = paceline(*QUICK, "--tp", "3,5", runs=tmp_path)
    assert done.returncode == 1 and "no combination can run" in done.stderr
    assert "does not divide 2 devices" in done.stdout


def test_ctrl_c_keeps_what_has_ended(tmp_path: Path):
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path)}
    endless = ("steps=100000", "--set", "compile=none")
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *QUICK[:-1], *endless, "--mbs", "1,2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    wait_until(lambda: list(tmp_path.glob("*/steps/*.jsonl")), "step lines", limit_s=90)
    process.send_signal(signal.SIGINT)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.terminate()  # a shell may have started the tests with SIGINT ignored
    document = json.loads(output)
    assert process.returncode == 4, errors
    assert document["interrupted"] and [r["status"] for r in document["rows"]] == ["waiting"] * 2
    assert (
        document["resume_command"].startswith("paceline sweep tiny-llama")
        and "Traceback" not in errors
    )


def outcome(*statuses: str, interrupted: bool = False) -> SweepResult:
    rows = tuple(
        SweepRow.model_validate(
            {
                "settings": {"layout.vp": "1"},
                "layout": Layout(),
                "status": status,
                "best": status == "ok",
            }
        )
        for status in statuses
    )
    return SweepResult(
        name="s",
        recipe="r",
        dimensions={"layout.vp": ("1", "2")},
        rows=rows,
        flops_convention="six-n",
        interrupted=interrupted,
    )


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (outcome("ok", "oom", "failed", "refused"), 0),
        (outcome("ok", "waiting", interrupted=True), 4),
        (outcome("refused", "pruned"), 1),
        (outcome("incomplete", "refused"), 4),
        (outcome("oom", "oom"), 2),
    ],
)
def test_the_exit_code_says_whether_there_is_an_answer(result: SweepResult, code: int):
    assert exit_code(result) == code


def test_where_nothing_ran_no_convention_of_flops_is_named(capsys: pytest.CaptureFixture[str]):
    refused = outcome("refused").model_copy(update={"flops_convention": None})
    emit(sweep_document(refused), TableFormat.text)
    assert "TFLOP/s per device" not in capsys.readouterr().out
    emit(sweep_document(outcome("oom")), TableFormat.text)
    assert "including recomputation (six-n+recompute)" in capsys.readouterr().out


def test_failed_runs_have_an_x_for_people_and_nothing_in_csv(capsys: pytest.CaptureFixture[str]):
    emit(sweep_document(outcome("oom", "refused")), TableFormat.md)
    _, _, table = capsys.readouterr().out.partition("| nodes |")
    _, first, second = [line for line in table.splitlines() if line.startswith("| ")]
    assert first.count("| x ") == 2 and "| OOM |" in first
    assert "x" not in second and "| refused |" in second
    emit(sweep_document(outcome("oom")), TableFormat.csv)
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["status"] == "oom" and row["step_time_s"] == "" and row["vp"] == "1"
