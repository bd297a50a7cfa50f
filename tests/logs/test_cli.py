"""`paceline parse` and `paceline runs import` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import paceline
from tests.example import noisy
from tests.logs.example import chat_log, maxtext_log, megatron_line, megatron_log

ADDED = ("--model", "llama31-8b", "--device", "b200", "--gpus", "8", "--seq-len", "8192")


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
    document = answer("parse", log, "--json")
    assert document["status"] == "ok" and document["step_time_s"]["n"] == 40
    both = answer("parse", log.parent, "--json")
    assert [entry["status"] for entry in both] == ["ok", "not-a-training-log"]
    assert answer("parse", log.parent, "--json", "--where", "status=ok") == [both[0]]


def test_text_says_the_figures_with_window_and_convention(log: Path):
    done = paceline("parse", log, *ADDED, "--dtype", "bf16")
    assert done.returncode == 0
    for words in (
        "s per step",
        "40 steady steps (2-41)",
        "tokens/s",
        "TFLOP/s per device (",
        "MFU",
    ):
        assert words in done.stdout


def test_the_series_comes_as_csv_json_and_md(log: Path):
    table = list(
        csv.DictReader(io.StringIO(paceline("parse", log, "--per-step", "--format", "csv").stdout))
    )
    assert len(table) == 41 and float(table[0]["step_time_s"]) == 20.0 and table[0]["mfu"] == ""
    series = answer("parse", log, "--per-step", "--json")["steps"]
    assert series[0]["step"] == 1 and series[0]["loss"] == pytest.approx(2.1)
    assert "| 41 |" in paceline("parse", log, "--per-step", "--format", "md").stdout


def test_standard_input_is_read(log: Path):
    document = json.loads(paceline("parse", "-", "--json", stdin=log.read_text()).stdout)
    assert (document["n_steps"], document["file"]) == (41, "-")
    for text in ("", "no log"):
        assert json.loads(paceline("parse", "-", "--json", stdin=text).stdout)["file"] == "-"


@pytest.mark.parametrize("rule", ["5:2", "500:600"])
def test_a_window_that_standard_input_lacks_is_refused_by_the_name_given(log: Path, rule: str):
    done = paceline("parse", "-", "--window", rule, stdin=log.read_text())
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: -: --window {rule}: selects none of the 41 timed steps")


def test_a_folder_without_a_file_is_told_so(tmp_path: Path):
    done = paceline("parse", tmp_path, "--json")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert done.stderr == f"note: {tmp_path}: contains no file\n"


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
    result = answer("runs", "import", log, *ADDED, "--tag", "old", *runs, "--json")
    assert result["status"] == "ok"
    assert result["metrics"]["step_time_s"]["value"] == pytest.approx(5.7, rel=0.01)
    (row,) = answer("runs", "list", *runs, "--json")
    assert (row["tag"], row["device"], row["devices"]) == ("old", "B200", 8)
    assert "40 steady steps (2-41)" in paceline("runs", "show", "old", *runs).stdout
    page = tmp_path / "page.html"
    assert paceline("runs", "report", "old", *runs, "--output", page).returncode == 0
    assert "megatron" in page.read_text()
    (kept,) = (tmp_path / "runs").glob("*/logs/train.log")
    assert kept.read_bytes() == log.read_bytes()


def test_a_log_is_imported_once_unless_asked(log: Path, tmp_path: Path):
    runs = ("--runs-dir", tmp_path / "runs")
    assert paceline("runs", "import", log, *runs).returncode == 0
    twice = paceline("runs", "import", log, *runs)
    assert twice.returncode == 1 and "was imported as" in twice.stderr
    assert paceline("runs", "import", log, *runs, "--reimport").returncode == 0


def test_what_is_no_log_is_not_imported(tmp_path: Path):
    (tmp_path / "a.txt").write_text("no log")
    done = paceline("runs", "import", tmp_path / "a.txt", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1 and "not-a-training-log" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_hostile_name_stays_a_name(tmp_path: Path):
    path = tmp_path / "a\x1b[31m<script>$(touch x).log"
    path.write_text(maxtext_log([2.0] * 20))
    shown = paceline("parse", path)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout
    runs = ("--runs-dir", tmp_path / "runs")
    assert paceline("runs", "import", path, *runs).returncode == 0
    page = next((tmp_path / "runs").glob("*/report.html")).read_text()
    assert "<script>$(touch" not in page


def test_a_window_is_asked_of_a_folder_of_which_one_log_is_too_short(log: Path):
    (log.parent / "b.log").write_text(maxtext_log([2.0] * 10))
    short, long = answer("parse", log.parent, "--window", "35:41", "--json")
    assert short["window"] is None and "selects none" in short["warnings"][0]
    assert long["window"]["n"] == 7
    assert paceline("parse", log.parent / "b.log", "--window", "35:41").returncode == 1
    for words in (("--window", "35"), ("--where", "nothing=1"), ("--device", "H1000")):
        assert paceline("parse", log.parent, *words).returncode == 1


def test_the_series_of_a_folder_keeps_to_the_conditions_and_the_exit_codes(log: Path):
    (log.parent / "empty.log").write_text("")
    both = answer("parse", log.parent, "--per-step", "--json")
    assert [len(entry["steps"]) for entry in both] == [0, 41]
    (row,) = answer("parse", log.parent, "--per-step", "--json", "--where", "status=ok")
    assert row["file"] == str(log)
    (log.parent / "gone.log").symlink_to("nowhere")
    assert paceline("parse", log.parent / "gone.log", "--per-step").returncode == 1


def test_a_name_over_two_lines_is_one_row(log: Path):
    log.rename(log.parent / "a\nb.log")
    assert len(paceline("parse", log.parent).stdout.splitlines()) == 2


def test_a_log_with_a_lost_loss_is_imported_with_that_status(tmp_path: Path):
    path = tmp_path / "train-\udcff.log"
    path.write_text(megatron_log(noisy(20, 5.7)) + megatron_line(21, 5.7, loss="nan"))
    result = answer("runs", "import", path, "--runs-dir", tmp_path / "runs", "--json")
    assert result["status"] == "nan" and "step 21" in result["reason"]
    (steps,) = (tmp_path / "runs").glob("*/steps.jsonl")
    last = json.loads(steps.read_text().splitlines()[-1])
    assert last["step"] == 21 and last["loss"] is None
    (kept,) = (tmp_path / "runs").glob("*/logs/*")
    assert kept.name == "train-?.log" and kept.read_bytes() == path.read_bytes()


def test_the_published_figures_own_log_is_judged_against_it(tmp_path: Path):
    (path := tmp_path / "train.log").write_text(chat_log("943.455"))
    result = answer(
        "runs",
        "import",
        path,
        "--recipe",
        "opt-350m-sft",
        "--device",
        "H100-SXM",
        "--dtype",
        "fp16",
        "--runs-dir",
        tmp_path / "runs",
        "--json",
    )
    assert result["verdict"]["kind"] == "undecided" and result["references"][0]["comparable"]
    shown = paceline("runs", "show", "last", "--runs-dir", tmp_path / "runs").stdout
    assert "Step time, mean" in shown and "median" not in shown
    assert "as printed by the source" in shown
    (page,) = (tmp_path / "runs").glob("*/report.html")
    assert "as printed by the source" in page.read_text()


def test_few_steps_are_not_judged_and_the_report_says_why(tmp_path: Path):
    (path := tmp_path / "train.log").write_text(maxtext_log([2.0] * 3))
    shown = paceline("runs", "import", path, "--runs-dir", tmp_path / "runs").stdout
    assert "train.log · maxtext log" in shown and "fewer than 5 steady step lines" in shown
