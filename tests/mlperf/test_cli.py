"""`paceline mlperf` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path

import pytest

from tests import command
from tests.mlperf.samples import TEN, submission, trial

LABEL = "unofficial, not verified by MLCommons Association"


def paceline(*words: object) -> subprocess.CompletedProcess[str]:
    return command.paceline("mlperf", *words)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return submission(tmp_path / "runs", TEN)


def test_a_score_is_printed_as_unofficial_with_its_ruleset(runs: Path):
    done = paceline("score", runs)

    assert (done.returncode, done.stderr) == (0, "")
    assert f"10.1875 minutes, {LABEL}" in done.stdout
    for words in (
        "5.1.0 (the default)",
        "mean of 8 of 10 runs",
        "scaling factor 1.000000",
        "not an official MLPerf metric",
        "result_9.txt  success  slowest",
    ):
        assert words in done.stdout, done.stdout


def test_json_holds_the_whole_score(runs: Path):
    done = paceline("score", runs, "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 0
    assert answer["score_minutes"] == pytest.approx(10.1875)
    assert (answer["official"], answer["label"], answer["status"]) == (False, LABEL, "ok")
    assert answer["rcp"]["status"] == "passed" and len(answer["runs"]) == 10


def test_csv_and_markdown_say_that_it_is_unofficial(runs: Path):
    rows = list(csv.DictReader(io.StringIO(paceline("score", runs, "--format", "csv").stdout)))

    assert len(rows) == 10 and {row["label"] for row in rows} == {LABEL}
    assert LABEL in paceline("score", runs, "--format", "md").stdout


def test_exit_codes_tell_a_score_a_refusal_and_a_gap_apart(runs: Path):
    (runs / "result_0.txt").write_text(trial(0, minutes=None))
    assert paceline("score", runs).returncode == 0

    (runs / "result_1.txt").write_text(trial(1, minutes=None))
    refused = paceline("score", runs)
    assert refused.returncode == 3 and "score        none, invalid: 2 of 10" in refused.stdout

    (runs / "result_2.txt").unlink()
    gap = paceline("score", runs, "--json")
    assert gap.returncode == 4 and json.loads(gap.stdout)["score_minutes"] is None


def test_bad_input_is_one_line_and_exit_code_1(runs: Path, tmp_path: Path):
    (runs / "result_2.txt").write_text(trial(2, benchmark="flux1"))
    for words in (
        ("score", runs),
        ("score", tmp_path / "no"),
        ("score", runs, "--ruleset", "x"),
        ("check", tmp_path / "no"),
        ("check", runs, "--ruleset", "x"),
    ):
        done = paceline(*words)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_check_names_findings_in_every_form(runs: Path):
    pytest.importorskip("mlperf_logging")
    log = runs / "result_0.txt"

    text = paceline("check", log)
    assert text.returncode == 3 and "0 of 1 logs pass 5.1.0 (the default)" in text.stdout
    assert (
        "    Required EXACTLY_ONE occurrence of 'train_samples' but found 0" in text.stdout
        and LABEL in text.stdout
    )

    answer = json.loads(paceline("check", log, "--json").stdout)
    assert (answer["status"], answer["official"]) == ("failed", False)
    assert {finding["key"] for finding in answer["files"][0]["findings"]} >= {
        "lora_rank",
        "lora_alpha",
    }

    rows = list(csv.DictReader(io.StringIO(paceline("check", log, "--format", "csv").stdout)))
    assert "Required EXACTLY_ONE occurrence of 'train_samples' but found 0" in [
        row["message"] for row in rows
    ]


def test_check_of_a_log_that_passes_exits_with_0(reference_data: Path):
    pytest.importorskip("mlperf_logging")
    logs = (reference_data / "mlperf/logs/v5.1/Lambda").glob("*/llama2_70b_lora/result_*")
    done = paceline("check", min(logs))

    assert done.returncode == 0 and "1 of 1 logs pass" in done.stdout
