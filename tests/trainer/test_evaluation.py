"""Evaluations come when they are due, see what training never sees, and end it at the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.files.events import read_rank
from tests.trainer import example
from tests.trainer.example import end, lines, settings, steps, train
from tests.trainer.test_randomness import dropping

EVALUATION = {"every_samples": 8, "skip_first": 0, "samples": 7, "target": None, "path": None}
MLPERF = {
    "benchmark": "llama31_8b",
    "org": "Example",
    "platform": "box",
    "division": "closed",
    "status": "Preview",
    "warmup_steps": 0,
    "cache_cleared": None,
}


def evaluated(ranks: int = 1, step_count: int = 6, **changes: Any) -> dict[str, Any]:
    """trainer.json of a training on real text that is evaluated; `changes` go to the evaluation."""
    raw = settings(ranks=ranks, steps=step_count, source="stdlib", lr=3e-3)
    raw["training"]["evaluation"] = EVALUATION | changes
    return raw


def evaluations(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """One rank's evaluations."""
    return [line for line in lines(folder, rank) if line["event"] == "eval"]


def test_an_evaluation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    often, once = evaluated(every_samples=4), evaluated(every_samples=24)

    assert train(tmp_path / "often", often) == train(tmp_path / "once", once) == 0

    assert [line["step"] for line in evaluations(tmp_path / "often")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluations(tmp_path / "once")] == [6]
    assert evaluations(tmp_path / "often")[-1]["loss"] == evaluations(tmp_path / "once")[0]["loss"]
    both = [[line["loss"] for line in steps(tmp_path / name)] for name in ("often", "once")]
    assert both[0] == both[1]


def test_batches_are_whole_and_the_first_evaluations_can_be_left_out(tmp_path: Path) -> None:
    """An evaluation after every 9 samples, 4 a step, is one after every 12."""
    assert train(tmp_path, evaluated(every_samples=9, skip_first=1, step_count=9)) == 0

    assert [(e["step"], e["samples"]) for e in evaluations(tmp_path)] == [(6, 24), (9, 36)]
    assert "reached" not in end(tmp_path), "there is no target"
    log = read_rank((tmp_path / "steps" / "rank-00000.jsonl").read_text().splitlines())
    assert [event.step for event in log.evaluations] == [6, 9] and not log.skipped_lines.lines


def test_the_target_ends_the_training_and_the_lines_say_so(tmp_path: Path) -> None:
    assert train(tmp_path, evaluated(step_count=400, target=5.0)) == 0

    found = evaluations(tmp_path)
    assert found[-1]["loss"] <= 5.0 < found[-2]["loss"]
    assert [e["reached"] for e in found] == [False] * (len(found) - 1) + [True]
    assert steps(tmp_path)[-1]["step"] == found[-1]["step"] < 400
    assert end(tmp_path)["reached"] is True and end(tmp_path)["status"] == "ok"


def test_random_samples_reach_no_target(tmp_path: Path) -> None:
    raw = evaluated(target=100.0)
    raw["data"]["source"] = "synthetic"

    assert train(tmp_path, raw) == 0

    assert [e["reached"] for e in evaluations(tmp_path)] == [False] * 3
    assert len(steps(tmp_path)) == 6


def test_two_stages_of_a_pipeline_evaluate_as_one_process(tmp_path: Path) -> None:
    """Other layouts: tests/numerics."""
    two = evaluated(ranks=2, step_count=2)
    two["layout"] |= {"pp": 2, "micro_batch": 1}
    two["dp"], two["num_microbatches"] = 1, two["training"]["global_batch"]
    one = evaluated(step_count=2)
    one["training"]["global_batch"] = two["training"]["global_batch"]
    one["num_microbatches"] = one["training"]["global_batch"] // one["layout"]["micro_batch"]

    assert train(tmp_path / "one", one) == train(tmp_path / "two", two) == 0

    single = [e["loss"] for e in evaluations(tmp_path / "one")]
    for rank in (0, 1):
        found = [e["loss"] for e in evaluations(tmp_path / "two", rank)]
        assert found == pytest.approx(single, rel=1e-5)
    assert single


def timed(folder: Path, raw: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The result lines of a training with a log."""
    assert train(folder, raw | {"mlperf": MLPERF | changes}) == 0
    texts = (folder / "mlperf" / "result.txt").read_text().splitlines()
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in texts]


def test_the_steps_before_the_clock_leave_nothing_behind(tmp_path: Path) -> None:
    """Nor do evaluations: half of what adapters read is dropped, and later numbers drop others."""
    raw = dropping(ranks=2)
    raw["training"]["evaluation"] = EVALUATION
    cold, warm = tmp_path / "cold", tmp_path / "warm"

    assert timed(cold, raw) and timed(warm, raw, warmup_steps=3)

    for rank in (0, 1):
        losses = [
            [(line["loss"], line["grad_norm"]) for line in steps(folder, rank)]
            for folder in (cold, warm)
        ]
        assert losses[0] == losses[1] and len(losses[0]) == 6
        assert [e["loss"] for e in evaluations(cold, rank)] == [
            e["loss"] for e in evaluations(warm, rank)
        ]


def test_the_clock_runs_from_before_the_data_to_the_target(tmp_path: Path) -> None:
    found = timed(tmp_path, evaluated(step_count=400, target=5.0), warmup_steps=1)

    keys = [line["key"] for line in found]
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("train_samples")
    assert keys[-1] == "run_stop" and found[-1]["metadata"]["status"] == "success"
    accuracies = [line for line in found if line["key"] == "eval_accuracy"]
    assert [line["value"] for line in accuracies] == [e["loss"] for e in evaluations(tmp_path)]
    assert found[-1]["metadata"]["samples_count"] == evaluations(tmp_path)[-1]["samples"]
    assert keys.count("block_start") == keys.count("block_stop") == keys.count("eval_stop")
    times = [line["time_ms"] for line in found]
    assert times == sorted(times)


def test_a_run_that_does_not_get_there_is_aborted(tmp_path: Path) -> None:
    found = timed(tmp_path, evaluated(target=1.0, every_samples=16))

    assert found[-1]["metadata"]["status"] == "aborted"
    assert found[-1]["metadata"]["samples_count"] == 24
    assert end(tmp_path)["reached"] is False and len(steps(tmp_path)) == 6
    assert "cache_clear" not in {line["key"] for line in found}


def test_a_run_that_fails_is_aborted(tmp_path: Path) -> None:
    raw = evaluated() | {"mlperf": MLPERF}
    raw["training"]["evaluation"]["samples"] = 10**9

    assert train(tmp_path, raw) == 1

    assert "leaves nothing" in end(tmp_path)["reason"]
    assert '"status": "aborted"' in (tmp_path / "mlperf" / "result.txt").read_text()
    assert example.log(tmp_path)
