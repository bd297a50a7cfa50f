"""Real trials of the tiny variants: they train to their targets and are labelled as such.

That with adapters is in test_tiny_adapters.py, so that two workers train at once.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.files.recipe import load_recipe
from paceline.mlperf.result_logs import read_log
from paceline.mlperf.rules import TINY_VARIANTS, TRIAL_VARIANT
from tests import command

pytest.importorskip("torch")
WHOLE = ("llama31-8b", "flux1")
SMALL = {
    "llama31-8b": "llama31_8b_tiny",
    "llama2-70b-lora": "llama2_70b_lora_tiny",
    "flux1": "flux1_tiny",
    "gpt-oss-20b": "gpt_oss_20b_tiny",
}
FROZEN = (
    "lr=1e-30",
    "training.lr_schedule.min_lr=0",
    "steps=6",
    "training.evaluation.skip_first=0",
)
DEVIATING = {
    "llama31-8b": {"submission_benchmark", "max_sequence_length", "eval_samples", "max_steps"},
    "llama2-70b-lora": {"submission_benchmark", "lora_rank", "eval_accuracy"},
    "flux1": {"submission_benchmark", "evaluation_frequency", "eval_accuracy"},
    "gpt-oss-20b": {"submission_benchmark", "max_sequence_length", "eval_samples", "max_steps"},
}
"""Bytes are easier than tokens: the targets of the language models are below the official ones."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for runs and data."""
    return tmp_path_factory.mktemp("tiny")


def paceline(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"XDG_CACHE_HOME": str(home / "cache")}
    return command.paceline("mlperf", *words, runs=home / "runs", env=env)


def trained(home: Path, name: str, *words: str) -> dict[str, Any]:
    done = paceline(home, "run", name, "--tiny", "--trials", "1", *words, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def evaluations(answer: dict[str, Any]) -> list[float]:
    file = answer["series"]["trials"][0]["file"]
    return [loss for _, loss in read_log(Path(answer["folder"]) / file).trials[0].evaluations]


def assert_reaches_its_target(home: Path, name: str) -> None:
    """A trial succeeds, is labelled as not a result, and is not trained again."""
    answer = trained(home, name)
    small, (trial,) = TINY_VARIANTS[SMALL[name]], answer["series"]["trials"]

    assert (answer["status"], trial["status"]) == ("complete", "success"), trial
    losses = evaluations(answer)
    assert losses[-1] <= small.target < min(losses[:-1])
    assert losses[0] > 1.03 * small.target
    steps = load_recipe(small.recipe, TRIAL_VARIANT).training.steps
    assert trial["samples_to_target"] < 8 * 0.75 * steps
    score = answer["score"]
    assert (score["status"], score["official"], score["score_minutes"]) == (
        "incomplete",
        False,
        None,
    )
    assert score["label"] == answer["label"] == small.label
    assert score["label"].startswith("not an MLPerf result") and "tiny" in score["system"]

    check = json.loads(
        paceline(home, "check", answer["folder"], "--ruleset", "6.0.0", "--json").stdout
    )
    (file,) = check["files"]
    named = {finding["key"] for finding in file["findings"] if finding["key"]}
    assert file["status"] == "failed" and named == DEVIATING[name]
    by_tiny_rules = json.loads(
        paceline(home, "check", answer["folder"], "--ruleset", "tiny", "--json").stdout
    )
    assert by_tiny_rules["status"] == "passed" and by_tiny_rules["label"].startswith(
        "not an MLPerf result"
    )

    again = paceline(home, "run", name, "--tiny", "--trials", "1", "--json")
    assert (
        json.loads(again.stdout)["series"]["trials"] == [trial] and "starting" not in again.stderr
    )


def assert_misses_its_target_frozen(home: Path, name: str) -> None:
    """A model that does not learn gets nowhere."""
    changes = [word for text in FROZEN for word in ("--set", text)]
    answer = trained(home, name, *changes)
    (trial,) = answer["series"]["trials"]

    assert trial["status"] == "missed"
    losses = evaluations(answer)
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 1.03 * TINY_VARIANTS[SMALL[name]].target


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama31-8b", "gpt-oss-20b")),
        "flux1",
    ],
)
def test_a_trial_trains_to_its_target_and_says_that_it_is_no_result(home: Path, name: str):
    assert_reaches_its_target(home, name)


@pytest.mark.parametrize("name", WHOLE)
def test_a_frozen_model_does_not_reach_the_target(home: Path, name: str):
    assert_misses_its_target_frozen(home, name)


def test_a_limit_that_passes_before_run_start_stops_the_series(home: Path):
    """No program starts within a second, so the run does not count as a trial."""
    short = ("--trials", "2", "--timeout", "1", "--name", "short", "--format", "csv")
    done = paceline(home, "run", "flux1", "--tiny", *short)

    assert done.returncode == 2, done.stderr
    assert done.stdout.count("ended before run_start: the time limit of 1 s passed") == 1
    assert "not an MLPerf result" in done.stdout
    assert not [*(home / "runs" / "mlperf" / "short").glob("result_*")]


def test_random_samples_give_an_expected_time_and_no_result(home: Path):
    done = paceline(home, "run", "flux1", "--tiny", "--synthetic", "--trials", "1", "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 0 and answer["score"] is None
    assert answer["label"] == "random samples: not an MLPerf result"
    assert answer["series"]["trials"][0]["status"] == "measured"
    time = answer["expected"]
    assert 0 < time["low_minutes"] < time["minutes"] < time["high_minutes"]
    speed = time["speed"]
    seconds = (
        time["samples"] / speed["samples_per_s"] + time["num_evaluations"] * speed["evaluation_s"]
    )
    assert time["minutes"] * 60 == pytest.approx(seconds)
