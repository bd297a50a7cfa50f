"""`paceline mlperf system`, `package` and `compare` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from paceline.cli.mlperf_submission import _code_folders
from paceline.core.errors import UserError
from paceline.mlperf.check import official_checker
from tests.mlperf.submissions import SYSTEM, description, ten_runs
from tests.mlperf.test_cli import LABEL, paceline

installed = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)


def test_system_prints_every_field_and_says_what_is_open(tmp_path: Path):
    done = paceline("system", "--set", "submitter=Example", "--output", tmp_path / "box.json")

    assert done.returncode == 0, done.stderr
    assert "submitter " in done.stdout and "cooling: air, liquid, ..." in done.stdout
    assert f"written to {tmp_path}/box.json" in done.stdout and LABEL in done.stdout
    assert json.loads((tmp_path / "box.json").read_text())["submitter"] == "Example"
    assert paceline("system", "--output", tmp_path / "box.json").returncode == 1


def test_system_as_json_and_as_a_gate():
    done = paceline("system", "--json", "--fail-on-findings")
    answer = json.loads(done.stdout)

    assert done.returncode == 3 and answer["status"] == "incomplete"
    assert {"field": "cooling", "what": "air, liquid, ..."} in answer["unknown"]
    rows = list(csv.DictReader(io.StringIO(paceline("system", "--format", "csv").stdout)))
    assert "operating_system" in {row["field"] for row in rows}


@installed
def test_package_then_check_then_compare(tmp_path: Path):
    runs, code = ten_runs(tmp_path / "runs"), tmp_path / "code"
    code.mkdir()
    words = [
        "package",
        runs,
        "--org",
        "Example",
        "--division",
        "closed",
        "--code",
        code,
        "--system",
        description(tmp_path / f"{SYSTEM}.json"),
        "--output",
        tmp_path / "sub",
    ]
    made = paceline(*words)
    assert made.returncode == 0, made.stderr + made.stdout
    assert "closed division" in made.stdout and LABEL in made.stdout
    assert "passes the official checker" in made.stdout
    again = paceline(*words)
    assert again.returncode == 1 and "already exists" in again.stderr

    checked = paceline("check", tmp_path / "sub/Example", "--json")
    assert checked.returncode == 0 and json.loads(checked.stdout)["kind"] == "submission"

    place = tmp_path / f"sub/Example/results/{SYSTEM}/llama2_70b_lora"
    plots = [tmp_path / "a.html", tmp_path / "a.svg"]
    compared = paceline("compare", place, "--json", "--plot", plots[0], "--plot", plots[1])
    answer = json.loads(compared.stdout)
    assert compared.returncode == 0 and answer["scores"][0]["num_devices"] == 16
    assert LABEL in plots[0].read_text() and plots[1].stat().st_size > 1000


@installed
def test_a_package_that_the_checker_refuses_is_named_with_its_lines(tmp_path: Path):
    runs = ten_runs(tmp_path / "runs", lora_rank=8)
    made = paceline(
        "package",
        runs,
        "--org",
        "Example",
        "--division",
        "closed",
        "--code",
        f"llama2_70b_lora={runs}",
        "--output",
        tmp_path / "sub",
        "--system",
        description(tmp_path / f"{SYSTEM}.json"),
    )

    assert made.returncode == 3 and "nothing written" in made.stdout
    assert "CHECK for 'lora_rank' failed" in made.stdout


def test_compare_without_a_score_is_incomplete_and_a_sibling_is_refused(tmp_path: Path):
    runs = ten_runs(tmp_path / "runs", submission_platform="tiny box")
    refused = paceline("compare", runs)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "a tiny variant of the benchmark" in refused.stderr

    ten_runs(runs)
    (runs / "result_4.txt").unlink()
    assert paceline("compare", runs).returncode == 4


def test_a_second_folder_of_code_for_the_same_benchmark_is_refused():
    assert _code_folders(["a=b", "flux1=c"]) == {"": Path("a=b"), "flux1": Path("c")}
    for twice in (["flux1=a", "flux1=b"], ["a", "b"]):
        with pytest.raises(UserError, match="is a second folder for"):
            _code_folders(twice)
