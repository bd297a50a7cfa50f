"""Whatever is wrong with a folder of runs has its own message and status; nothing changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mlperf.submissions import contents, ten_runs, whole_trial
from tests.mlperf.test_cli import paceline

Change = Callable[[Path], object]


def of(number: int, text: Callable[[str], str]) -> Change:
    """Changes one log."""

    def change(folder: Path) -> None:
        path = folder / f"result_{number}.txt"
        path.write_text(text(path.read_text()))

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def cut_behind(word: str) -> Callable[[str], str]:
    """A log that ends in the middle of a line, as one of a killed program does."""
    return lambda text: text[: text.index(word) + len(word)]


def packed_and_cut(folder: Path) -> None:
    path = folder / "result_2.txt"
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes())[:-60])
    path.unlink()


WITHOUT_STOP = cut_behind('"key": "run_stop", "val')
CASES: dict[str, tuple[Change, int, str, str]] = {
    "two benchmarks": (
        lambda f: (f / "result_5.txt").write_text(whole_trial(5, submission_benchmark="flux1")),
        1,
        "error",
        "contains runs of 2 benchmarks (flux1: result_5.txt; llama2_70b_lora: ",
    ),
    "a missing run": (
        lambda f: (f / "result_5.txt").unlink(),
        4,
        "incomplete",
        "9 of the 10 runs that llama2_70b_lora needs; missing: number 5",
    ),
    "a run that is there twice": (
        lambda f: (f / "result_5.txt").write_text((f / "result_4.txt").read_text()),
        4,
        "incomplete",
        "9 of the 10 runs that llama2_70b_lora needs; 1 duplicate",
    ),
    "one run without run_stop": (of(3, WITHOUT_STOP), 0, "ok", "no run_stop line"),
    "two runs without run_stop": (
        both(of(3, WITHOUT_STOP), of(4, WITHOUT_STOP)),
        3,
        "invalid",
        "2 of 10 runs did not converge; only 1 may be dropped",
    ),
    "a packed log that is damaged": (
        both(packed_and_cut),
        0,
        "ok",
        "result_2.txt.gz: the compressed file is damaged",
    ),
    "an empty log": (of(3, lambda _: ""), 0, "ok", "no run_start line"),
    "a placeholder": (
        of(3, lambda text: text.replace('"Example"', '"SUBMISSION_ORG_PLACEHOLDER"')),
        0,
        "ok",
        "submission_org is still a placeholder",
    ),
    "a run that stopped before its target": (
        of(3, lambda text: text.replace('"success"', '"aborted"')),
        0,
        "ok",
        "run_stop reports status aborted",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_its_message_and_status(tmp_path: Path, case: str):
    change, code, status, words = CASES[case]
    change(ten_runs(tmp_path))
    before = contents(tmp_path)

    done = paceline("score", tmp_path, "--json")

    assert done.returncode == code, done.stderr
    assert words in (done.stderr if status == "error" else done.stdout)
    if status != "error":
        answer = json.loads(done.stdout)
        assert answer["status"] == status and answer["official"] is False
        assert (answer["score_minutes"] is None) == (status != "ok")
        assert answer["reason"] is None or status != "ok"
    assert contents(tmp_path) == before


def test_a_run_without_run_stop_is_aborted_and_the_dropped_one(tmp_path: Path):
    of(3, WITHOUT_STOP)(ten_runs(tmp_path))
    runs = json.loads(paceline("score", tmp_path, "--json").stdout)["runs"]

    assert (runs[3]["status"], runs[3]["part"], runs[3]["minutes"]) == ("aborted", "slowest", None)


@pytest.mark.parametrize("verb", ["score", "check", "compare"])
def test_a_wrong_ruleset_is_refused_by_every_verb(tmp_path: Path, verb: str):
    if verb == "check":
        pytest.importorskip("mlperf_logging")
    done = paceline(verb, ten_runs(tmp_path), "--ruleset", "5.2.0")

    assert (done.returncode, done.stdout) == (1, "")
    assert "--ruleset 5.2.0: is not known" in done.stderr


def test_a_round_that_lacks_the_benchmark_is_refused(tmp_path: Path):
    runs = ten_runs(tmp_path, submission_benchmark="flux1")
    done = paceline("score", runs, "--ruleset", "4.1.0")

    assert done.returncode == 1 and "--ruleset 4.1.0: has no flux1; allowed: 5.1.0" in done.stderr


@pytest.mark.parametrize(
    ("engine", "told"),
    [("nemoo", "engine 'nemoo': is unknown; allowed: "), ("nemo", "allowed: native, mlperf\n")],
)
def test_an_engine_that_makes_no_trials_is_named_before_any_layout(engine: str, told: str):
    cluster = ("--cluster", "lambda-gb300-nvl72")
    done = paceline("run", "llama31-8b", "--engine", engine, *cluster, "--dry-run")
    assert done.returncode == 1 and told in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--tiny", "--name", "../series"],
            "--name ../series: is not a valid name of a series; allowed: ",
        ),
        (["--tiny", "--validation", "x"], "--validation: is for the official benchmark"),
        (["--tiny", "--synthetic", "--data", "x"], "--data: has no effect with --synthetic"),
    ],
)
def test_what_a_series_has_no_use_for_is_refused_by_its_name(words: list[str], told: str):
    done = paceline("run", "llama31-8b", *words, "--dry-run")
    assert (done.returncode, done.stdout) == (1, "") and told in done.stderr
