"""`paceline parse` and `paceline import` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.example import noisy
from tests.logs import maxtext_log, megatron_log

ADDED = ("--model", "llama31-8b", "--device", "b200", "--gpus", "8", "--seq-len", "8192")


def paceline(*words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120)


def answer(*words: object) -> Any:
    done = paceline(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(megatron_log([20.0, *noisy(40, 5.7, 0.01)]))
    return path


def test_one_file_is_one_object_and_a_folder_is_a_list(log: Path):
    (log.parent / "z.txt").write_text("no log")
    one = answer("parse", log, "--json")
    assert one["status"] == "ok" and one["step_time_s"]["n"] == 40
    both = answer("parse", log.parent, "--json")
    assert [entry["status"] for entry in both] == ["ok", "not-a-training-log"]
    assert answer("parse", log.parent, "--json", "--where", "status=ok") == [both[0]]


def test_text_says_the_figures_with_window_and_convention(log: Path):
    done = paceline("parse", log, *ADDED, "--dtype", "bf16")
    assert done.returncode == 0
    for words in ("a step", "40 steady steps (2-41)", "tokens/s", "TFLOP/s a device (", "MFU"):
        assert words in done.stdout


def test_the_series_comes_as_csv_json_and_md(log: Path):
    table = list(
        csv.DictReader(io.StringIO(paceline("parse", log, "--steps", "--format", "csv").stdout))
    )
    assert len(table) == 41 and float(table[0]["step_time_s"]) == 20.0 and table[0]["mfu"] == ""
    series = answer("parse", log, "--steps", "--json")["steps"]
    assert series[0]["step"] == 1 and series[0]["loss"] == pytest.approx(2.1)
    assert "| 41 |" in paceline("parse", log, "--steps", "--format", "md").stdout


def test_standard_input_is_read(log: Path):
    done = paceline("parse", "-", "--json", stdin=log.read_text())
    assert json.loads(done.stdout)["n_steps"] == 41


def test_exit_codes(log: Path, tmp_path: Path):
    (tmp_path / "utf16.log").write_bytes("iteration".encode("utf-16"))
    (tmp_path / "none.txt").write_text("no log")
    assert paceline("parse", tmp_path / "utf16.log").returncode == 1
    assert paceline("parse", tmp_path / "none.txt").returncode == 0
    assert paceline("parse", tmp_path / "none.txt", "--fail-on-findings").returncode == 3
    assert paceline("parse", tmp_path).returncode == 0
    missing = paceline("parse", tmp_path / "missing.log")
    assert missing.returncode == 1 and "does not exist" in missing.stderr
    wrong = paceline("parse", log, "--device", "H1000")
    assert wrong.returncode == 1 and "H1000" in wrong.stderr and "Traceback" not in wrong.stderr


def test_an_imported_log_is_a_run_like_any_other(log: Path, tmp_path: Path):
    runs = ("--runs-dir", tmp_path / "runs")
    result = answer("import", log, *ADDED, "--tag", "old", *runs, "--json")
    assert result["status"] == "ok"
    assert result["metrics"]["step_time_s"]["value"] == pytest.approx(5.7, rel=0.01)
    (row,) = answer("list", *runs, "--json")
    assert (row["tag"], row["device"], row["devices"]) == ("old", "B200", 8)
    assert "40 steady steps (2-41)" in paceline("show", "old", *runs).stdout
    page = tmp_path / "page.html"
    assert paceline("report", "old", *runs, "--output", page).returncode == 0
    assert "megatron" in page.read_text()
    (kept,) = (tmp_path / "runs").glob("*/logs/train.log")
    assert kept.read_bytes() == log.read_bytes()


def test_a_log_is_imported_once_unless_asked(log: Path, tmp_path: Path):
    runs = ("--runs-dir", tmp_path / "runs")
    assert paceline("import", log, *runs).returncode == 0
    twice = paceline("import", log, *runs)
    assert twice.returncode == 1 and "was imported as" in twice.stderr
    assert paceline("import", log, *runs, "--again").returncode == 0


def test_what_is_no_log_is_not_imported(tmp_path: Path):
    (tmp_path / "a.txt").write_text("no log")
    done = paceline("import", tmp_path / "a.txt", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1 and "not-a-training-log" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_hostile_name_stays_a_name(tmp_path: Path):
    path = tmp_path / "a\x1b[31m<script>$(touch x).log"
    path.write_text(maxtext_log([2.0] * 20))
    shown = paceline("parse", path)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout
    runs = ("--runs-dir", tmp_path / "runs")
    assert paceline("import", path, *runs).returncode == 0
    page = next((tmp_path / "runs").glob("*/report.html")).read_text()
    assert "<script>$(touch" not in page
