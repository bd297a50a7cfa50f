"""Is B slower than A? Asked with whatever files there are."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.engines import log_formats
from tests.command import paceline
from tests.engines.samples import log_text

NOISE = (0.001, -0.002, 0.003, -0.001, 0.0, 0.002, -0.003)
"""Relative deviations of steps, the same in every log."""


def write_log(path: Path, step_s: float, name: str = "megatron") -> Path:
    times = [step_s * (1 + NOISE[n % len(NOISE)]) for n in range(40)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(log_text(name, times, noise=()))
    return path


def compare(folder: Path, *arguments: object, code: int) -> dict[str, Any]:
    done = paceline("compare", *arguments, "--json", cwd=folder, runs=folder / "runs")
    assert (done.returncode, done.stderr) == (code, "")
    assert not (folder / "runs").exists() or not list((folder / "runs").glob("*/run.json"))
    return json.loads(done.stdout)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three logs a side, the one side 8% slower."""
    for number, change in enumerate((0.0, 0.001, -0.001), 1):
        write_log(tmp_path / f"a/{number}.log", 1.67 * (1 + change))
        write_log(tmp_path / f"b/{number}.log", 1.804 * (1 + change))
    shutil.copy(tmp_path / "a/1.log", tmp_path / "a.log")
    shutil.copy(tmp_path / "b/1.log", tmp_path / "b.log")
    return tmp_path


def test_two_logs_show_the_difference_first_and_then_what_would_prove_it(logs: Path):
    done = paceline("compare", "a.log", "b.log", cwd=logs, runs=logs / "runs")
    first, badge, proof = done.stdout.splitlines()[:3]
    assert first.startswith("b.log is 8.0% slower than a.log: 1.804 s vs 1.670 s · margin ")
    assert badge.strip() == "▽ likely slower (low confidence)" and done.returncode == 4
    assert proof.strip().startswith("Likely, not proven: 95% interval +")
    assert "published pairs (MLPerf Training v3.1" in proof
    assert "Run 2 more of each, alternating (A B A B)." in proof


@pytest.mark.parametrize("form", ["md", "junit", "csv"])
def test_every_form_takes_logs(logs: Path, form: str):
    done = paceline("compare", "a.log", "b.log", "--format", form, cwd=logs)
    assert done.returncode == 4 and "1.804" in done.stdout and not done.stderr


def test_a_page_of_two_logs_has_the_difference_as_its_title(logs: Path):
    paceline("compare", "a.log", "b.log", "--html", "page.html", cwd=logs)
    text = (logs / "page.html").read_text("utf-8")
    assert "<title>b.log is 8.0% slower than a.log: 1.804 s vs 1.670 s</title>" in text
    assert "likely slower" in text and "published pairs" in text


@pytest.mark.parametrize("name", sorted(log_formats()))
def test_logs_of_every_framework_are_compared(tmp_path: Path, name: str):
    write_log(tmp_path / "a.log", 10.0, name)
    write_log(tmp_path / "b.log", 11.0, name)
    # These logs name an H100, on which 10% are proven.
    judged = compare(tmp_path, "a.log", "b.log", code=3 if name in ("llm_c", "nanochat") else 4)
    # Some frameworks print rates alone, picotron with three digits.
    slower = (
        "b.log is 10.0% slower than a.log: ",
        "b.log is 9.9% slower than a.log: ",
        "of b.log is 9.1% lower than of a.log: ",
    )
    assert any(words in judged["observed"] for words in slower)


@pytest.mark.parametrize(
    "sides",
    [
        ("a", "b"),
        ("a/", "./b"),
        ("a/*.log", "b/?.log"),
        ("a/1.log,a/2.log,a/3.log", "b"),
        ("a.tar.gz", "b.tar.gz"),
    ],
)
def test_several_logs_per_side_are_a_test(logs: Path, sides: tuple[str, str]):
    for side in "ab":
        shutil.make_archive(str(logs / side), "gztar", logs / side)
    judged = compare(logs, *sides, code=3)
    assert (judged["verdict"], judged["n_a"], judged["n_b"]) == ("slower", 3, 3)
    assert "Proven: 95% interval +7." in judged["sentence"]


def test_sides_of_unequal_size_say_which_one_lacks_runs(logs: Path):
    write_log(logs / "c.log", 1.7)
    judged = compare(logs, "a", "c.log", code=4)
    assert "Run 2 more of c.log." in judged["sentence"]
    judged = compare(logs, "a/1.log,a/2.log", "c.log", code=4)
    assert "Run 1 more of a/1.log,a/2.log and 2 more of c.log." in judged["sentence"]


def test_direct_comparison_and_import_give_the_same_figures(logs: Path):
    direct = compare(logs, "a", "b", code=3)
    for side in "ab":
        for log in sorted((logs / side).iterdir()):
            paceline("runs", "import", log, "--tag", side, runs=logs / "stored")
    done = paceline("compare", "a", "b", "--json", runs=logs / "stored")
    stored = json.loads(done.stdout)
    for key in ("verdict", "ratio", "low", "high", "p", "metrics", "differing_keys"):
        assert direct[key] == stored[key], key
    mixed = paceline("compare", "a", "b", "--json", cwd=logs, runs=logs / "stored")
    assert json.loads(mixed.stdout)["ratio"] == stored["ratio"]


def test_a_log_and_its_own_import_are_one_run(logs: Path):
    paceline("runs", "import", logs / "a.log", "--tag", "stored", runs=logs / "stored")
    done = paceline("compare", "stored", "a.log", "--json", cwd=logs, runs=logs / "stored")
    assert any("is on both sides" in line for line in json.loads(done.stdout)["warnings"])
    one = paceline("compare", "stored,a.log", "b", "--json", cwd=logs, runs=logs / "stored")
    assert json.loads(one.stdout)["n_a"] == 1


def test_ranks_of_one_run_are_no_repeats(tmp_path: Path):
    for side, step_s in (("a", 1.67), ("b", 1.804)):
        for rank in range(3):
            write_log(tmp_path / f"{side}/rank-{rank}.log", step_s + rank * 1e-3)
            write_log(tmp_path / f"t{side}/attempt_0/{rank}/stdout.log", step_s + rank * 1e-3)
    assert compare(tmp_path, "a", "b", code=4)["n_a"] == 1
    assert compare(tmp_path, "ta", "tb", code=4)["n_b"] == 1


def test_step_times_as_csv_are_a_run_and_several_with_a_column_of_files(logs: Path):
    for side in "ab":
        done = paceline("parse", side, "--per-step", "--format", "csv", cwd=logs)
        (logs / f"{side}.csv").write_text(done.stdout)
    assert compare(logs, "a.csv", "b.csv", code=3)["n_a"] == 3
    (logs / "s.csv").write_text("time_s\n" + "1.670\n1.671\n1.669\n" * 10)
    (logs / "ms.csv").write_text("step_time_ms\n" + "1804\n1805\n1803\n" * 10)
    judged = compare(logs, "ms.csv", "s.csv", code=4)
    assert judged["observed"] == "s.csv is 7.4% faster than ms.csv: 1.670 s vs 1.804 s."


def test_a_setting_that_only_one_log_states_is_assumed_equal_and_can_be_added(tmp_path: Path):
    write_log(tmp_path / "a.log", 1.67)
    (tmp_path / "b.csv").write_text("step_time_s\n" + "1.80\n1.81\n1.79\n" * 10)
    judged = compare(tmp_path, "a.log", "b.csv", code=4)
    assert judged["observed"] == "b.csv is 7.8% slower than a.log: 1.800 s vs 1.670 s."
    (line,) = (line for line in judged["why_low"] if "b.csv does not state it" in line)
    assert line.endswith("global_batch; add it with --gpus, --seq-len, --global-batch")
    assert "global_batch" in judged["unknown_keys"] and judged["differing_keys"] == []
    added = compare(tmp_path, "a.log", "b.csv", "--global-batch", 64, code=3)
    assert added["differing_keys"] == ["global_batch"]
    assert "a.log and b.csv are not comparable: global_batch " in added["sentence"]


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        (("a.log", "c.log"), "run 'c.log': is not in"),
        (("a.log", "c.log"), "did you mean"),
        (("a.log", "notes.txt"), "notes.txt: not-a-training-log"),
        (("a.log", "empty"), "empty: contains no training log"),
        (("a.log", "bad.csv"), "bad.csv: has 0 columns with step times; allowed: step_time_s"),
        (("a.log", "word.csv"), "word.csv:3: step_time_s: 'fast' is not a number"),
        (("a.log",), "takes either B or --against"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_compared_is_one_clear_error(logs: Path, sides: tuple[str, ...], words: str):
    (logs / "notes.txt").write_text("nothing\n")
    (logs / "empty").mkdir()
    (logs / "bad.csv").write_text("seconds per step\n1.0\n")
    (logs / "word.csv").write_text("step_time_s\n1.0\nfast\n")
    done = paceline("compare", *sides, cwd=logs, runs=logs / "runs")
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr


def dated(path: Path, step_s: float, start: str) -> Path:
    """Write a Megatron log whose step lines have dates from `start` on; an empty one has none."""
    write_log(path, step_s)
    time, lines = datetime.fromisoformat(start) if start else None, list[str]()
    for line in path.read_text().splitlines():
        bare = re.sub(r"\[20[^]]*\] ?", "", line)
        lines.append(f" [{time}] {bare.strip()}" if time and "iteration" in bare else bare)
        time = time and time + timedelta(seconds=round(step_s))
    path.write_text("\n".join(lines) + "\n")
    return path


DAYS = tuple(f"2026-03-0{day}" for day in range(2, 7))


@pytest.mark.parametrize(
    ("n", "change", "verdict"),
    [
        (1, 0.08, "slower"),
        (1, 0.05, "likely slower"),
        (1, -0.05, "likely faster"),
        (1, 0.01, "undecided"),
        (2, 0.03, "slower"),
        (3, 0.03, "slower"),
        (5, 0.03, "slower"),
        (5, -0.03, "faster"),
        (5, 0.0, "same"),
    ],
)
def test_which_of_my_two_logs_is_faster(tmp_path: Path, n: int, change: float, verdict: str):
    """With 1, 2, 3 and 5 dated logs a side, made in turns on a GPU of a data center."""
    for number in range(n):
        noise = 1 + 0.001 * (number % 3 - 1)
        dated(tmp_path / f"a{number}.log", 1.67 * noise, f"{DAYS[number]} 10:00:00")
        dated(tmp_path / f"b{number}.log", 1.67 * noise * (1 + change), f"{DAYS[number]} 11:00:00")
    code = {"slower": 3, "faster": 0, "same": 0}.get(verdict, 4)
    judged = compare(tmp_path, "a*.log", "b*.log", "--device", "H100-SXM", code=code)
    assert (judged["verdict"], judged["n_a"], judged["n_b"]) == (verdict, n, n)
    assert not any("order" in why or "days" in why for why in judged["why_low"])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (DAYS[:3], DAYS[2:], "different days"),
        (DAYS[:3], ("", "", ""), "order of the runs is unknown"),
    ],
)
def test_logs_of_other_days_need_a_larger_difference(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], reason: str
):
    """Three logs per side, 1.2% apart, were `slower` whatever their days."""
    for number in range(3):
        noise = 1 + 0.0005 * (number - 1)
        days = before[0], after[-1]
        starts = [day and f"{day} 1{number}:00:00" for day in days]
        dated(tmp_path / f"a{number}.log", 1.67 * noise, starts[0])
        dated(tmp_path / f"b{number}.log", 1.67 * noise * 1.012, starts[1])
    arguments = ("a*.log", "b*.log", "--device", "H100-SXM")
    judged = compare(tmp_path, *arguments, code=4)
    assert judged["verdict"] == "undecided"
    assert any(reason in why for why in judged["why_low"])


def test_a_sequential_comparison_of_imports_uses_the_dates_of_the_logs(tmp_path: Path):
    """Imported in turns, made on different days: the time of import passed for that of the run."""
    for number in range(3):
        noise = 1 + 0.0005 * (number - 1)
        for side, day, change in (("a", DAYS[0], 1.0), ("b", DAYS[2], 1.03)):
            log = dated(tmp_path / f"{side}{number}.log", 1.67 * noise * change, f"{day} 10:00:00")
            paceline("runs", "import", log, "--tag", side, runs=tmp_path / "runs")
    done = paceline("compare", "a", "b", "--sequential", "--json", runs=tmp_path / "runs")
    judged = json.loads(done.stdout)
    assert (done.returncode, judged["verdict"]) == (4, "undecided")
    assert judged["end_reason"] == "not interleaved"
