"""The log of the full-size trainings passes the official checker, and one wrong value fails.

What is driven are the trainer's own writer and its bookkeeping of evaluations, with the recipes'
real settings; clock and losses are scripted: nothing of 70 billion parameters is trained here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.engines import native
from paceline.files.recipe import load_recipe, resolve
from paceline.mlperf.check import official_checker
from paceline.mlperf.rules import BENCHMARKS
from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.evaluation import Quality, evaluation_plan
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.mllog import MllogFile, MlperfRun, lowest_precisions, schedule
from paceline.trainer.measure.mllog import settings as logged

installed = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
RULES = {
    "llama2_70b_lora": ("llama2-70b-lora", None, 1024, 384, 3, 173, 3901),
    "llama31_8b": ("llama31-8b", "mlperf", 1_200_000, 12288, 0, 1024, 1_574_207_408),
    "flux1": ("flux1-schnell", None, 50_000, 262_144, 0, 29_696, 1_099_776),
    "gpt_oss_20b": ("gpt-oss-20b", "mlperf-trial", 1_200_000, 12288, 0, 1024, 1_574_207_408),
}
"""Recipe, variant, most steps, evaluation's interval, first ones left out, samples, training's."""
ROUNDS = {"gpt_oss_20b": "6.0.0"}
"""Rounds of the benchmarks that 5.1 does not have."""
DEVIATIONS = {
    "llama2_70b_lora": [("lora_rank", 8), ("eval_accuracy", 0.93), ("submission_division", "own")],
    "llama31_8b": [
        ("max_steps", 1024),
        ("opt_adamw_epsilon", 1e-8),
        ("max_sequence_length", 4096),
        ("eval_samples", 1023),
        ("opt_learning_rate_decay_steps", 1_200_000),
    ],
    "flux1": [
        ("evaluation_frequency", 8192),
        ("opt_name", "adam"),
        ("eval_accuracy", 0.59),
        ("opt_gradient_clip_norm", 0.3),
    ],
    "gpt_oss_20b": [
        ("eval_accuracy", 3.35),
        ("eval_samples", 512),
        ("opt_learning_rate_decay_schedule", "linear with linear warmup"),
    ],
}


def full_size(benchmark: str) -> TrainerConfig:
    """The trainer's input for a recipe of full size as the rules want it trained."""
    name, variant, most, every, skipped, samples, _ = RULES[benchmark]
    recipe = load_recipe(
        name,
        variant,
        [
            f"training.steps={most}",
            f"training.evaluation.every_samples={every}",
            f"training.evaluation.skip_first={skipped}",
            f"training.evaluation.samples={samples}",
            f"training.evaluation.target={BENCHMARKS[benchmark].target}",
            f"mlperf.benchmark={benchmark}",
            "mlperf.org=Example",
            "mlperf.platform=8xH100",
            "mlperf.cache_cleared=true",
        ],
    )
    devices = recipe.devices or 8
    cluster = Cluster(name="h", device="H100-SXM", nodes=devices // 8, devices_per_node=8)
    return parse_config(native.settings(resolve(recipe, cluster, True, variant)))


def scripted(benchmark: str, folder: Path, losses: Iterator[float], most: int = 10**9) -> Path:
    """The log of a training whose evaluations give these losses, or of its first `most` steps."""
    config, clock = full_size(benchmark), map(float, count(1_760_000_000))
    path = folder / "mlperf" / "result.txt"
    run = MlperfRun(config, MllogFile(path, lambda: next(clock)))
    run.begin()
    run.start(12.5)
    run.data(RULES[benchmark][-1], RULES[benchmark][-2])
    plan = evaluation_plan(config)
    assert plan is not None
    events = EventLog(str(folder / "steps"), 0)
    quality = Quality(plan, lambda: next(losses), True, events, run, lambda: next(clock))
    step = next(
        step for step in count(1) if step == most or (plan.due(step) and quality.evaluate(step))
    )
    quality.stop(step)
    return path


def falling(benchmark: str) -> Iterator[float]:
    """Losses that reach the target in the fourth evaluation."""
    target = BENCHMARKS[benchmark].target
    return (target + 0.003 - 0.001 * number for number in count())


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in path.read_text().splitlines()]


def spoiled(path: Path, key: str, value: Any) -> None:
    """Change every value of a key."""
    found = [{**line, "value": value} if line["key"] == key else line for line in read(path)]
    assert found != read(path), f"there is no {key} to change"
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in found))


@installed
@pytest.mark.parametrize(
    ("benchmark", "ruleset"),
    [
        (benchmark, ruleset)
        for benchmark in RULES
        for ruleset in ("5.1.0", "6.0.0", "6.1.0")
        if ruleset >= ROUNDS.get(benchmark, "5.1.0")
    ],
)
def test_the_log_of_a_full_size_recipe_passes_the_official_rules(
    benchmark: str, ruleset: str, tmp_path: Path
) -> None:
    path = scripted(benchmark, tmp_path, falling(benchmark))

    verdict = official_checker.check_copy(path, ruleset)

    assert (verdict.messages, verdict.warnings, verdict.unparsable) == ((), (), ())
    assert verdict.checker_error is None


@installed
@pytest.mark.parametrize(
    ("benchmark", "key", "value"),
    [(benchmark, *change) for benchmark, changes in DEVIATIONS.items() for change in changes],
)
def test_one_value_that_deviates_fails(
    benchmark: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = scripted(benchmark, tmp_path, falling(benchmark))
    spoiled(path, key, value)

    verdict = official_checker.check_copy(path, ROUNDS.get(benchmark, "5.1.0"))

    assert verdict.messages or verdict.checker_error


@pytest.mark.parametrize(
    ("training", "layout", "expected"),
    [
        ({"dtype": "bf16"}, {"zero_stage": 3}, ("bfloat16", "bfloat16", "bfloat16")),
        ({"dtype": "bf16"}, {"zero_stage": 1}, ("bfloat16", "bfloat16", "fp32")),
        ({"dtype": "mxfp8"}, {"tp": 2}, ("fp8", "bfloat16", "bfloat16")),
        ({"dtype": "fp32", "matmul_precision": "high"}, {"tp": 2}, ("tf32", "tf32", "fp32")),
        ({"dtype": "fp32", "matmul_precision": "highest"}, {}, ("fp32", "fp32", "fp32")),
        ({"dtype": "fp32", "matmul_precision": "medium"}, {}, ("tf32", "tf32", "fp32")),
    ],
)
def test_the_lowest_precisions_are_those_of_the_layout(
    training: dict[str, Any], layout: dict[str, Any], expected: tuple[str, ...]
) -> None:
    config = full_size("llama31_8b")
    alone = replace(config.layout, tp=1, pp=1, cp=1, ep=1, zero_stage=1)
    config = replace(
        config,
        training=replace(config.training, **training),
        layout=replace(alone, **layout),
        device="cuda",
    )
    assert tuple(lowest_precisions(config).values()) == expected


def test_lines_have_the_form_of_the_rules(tmp_path: Path) -> None:
    first = scripted("llama31_8b", tmp_path, falling("llama31_8b")).read_text().splitlines()[0]

    record = json.loads(first.removeprefix(":::MLLOG "))
    assert first.startswith(':::MLLOG {"namespace": "", "time_ms": 1760000000000, "event_type": ')
    assert [*record] == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
    assert record["metadata"].keys() == {"file", "lineno"}


def test_the_first_evaluations_come_when_the_rules_say(tmp_path: Path) -> None:
    """Four of 384 samples at 8 a step: the first three of llama2_70b_lora are left out."""
    lines = read(scripted("llama2_70b_lora", tmp_path, falling("llama2_70b_lora")))

    counts = [x["metadata"]["samples_count"] for x in lines if x["key"] == "eval_accuracy"]
    assert counts == [1536, 1920, 2304, 2688]
    assert lines[-1]["metadata"]["status"] == "success"


def test_the_end_of_all_steps_is_aborted_inside_a_block(tmp_path: Path) -> None:
    lines = read(scripted("llama2_70b_lora", tmp_path, falling("llama2_70b_lora"), most=100))

    assert [line["key"] for line in lines[-2:]] == ["block_stop", "run_stop"]
    assert lines[-1]["metadata"]["status"] == "aborted"


def test_a_run_that_ends_before_its_clock_has_no_end(tmp_path: Path) -> None:
    config = full_size("flux1")
    run = MlperfRun(config, MllogFile(tmp_path / "log.txt"))
    run.begin()

    run.stop(reached=False)

    assert "run_stop" not in (tmp_path / "log.txt").read_text()


def test_a_lost_loss_is_no_number_in_json(tmp_path: Path) -> None:
    losses = iter([float("nan"), *[3.0] * 5])

    lines = read(scripted("llama31_8b", tmp_path, losses))

    assert [x["value"] for x in lines if x["key"] == "eval_accuracy"] == [None, 3.0]


def test_what_is_logged_is_what_the_run_does() -> None:
    config = full_size("llama2_70b_lora")
    training = replace(config.training, seed=77, lr=1.5e-4, grad_clip=0.0)

    found = logged(replace(config, training=training, num_microbatches=3))

    assert (found["seed"], found["opt_base_learning_rate"]) == (77, 1.5e-4)
    assert (found["opt_gradient_clip_norm"], found["gradient_accumulation_steps"]) == (0.0, 3)
    assert (found["lora_rank"], found["lora_alpha"], found["target_accuracy"]) == (16, 32, 0.925)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, (8e-5, 128, 1_199_872, "cosine with linear warmup")),
        ({"unit": "samples", "warmup": 4096, "decay": None}, (8e-5, 128, 872, "cosine")),
        ({"kind": "constant", "warmup": 0, "decay": None}, (8e-4, 0, 1000, "constant")),
    ],
)
def test_the_schedule_is_told_in_steps(changes: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    plan = replace(full_size("llama31_8b").training.lr_schedule, **changes)

    end, warmup, decay, kind, _ = schedule(plan, 8e-4, 1000, 32).values()

    assert (end, warmup, decay) == wanted[:3] and str(kind).startswith(wanted[3])


def test_the_log_of_a_start_before_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        MllogFile(tmp_path / "result.txt").write("POINT_IN_TIME", "seed", number)
    names = ("result.txt.1", "result.txt.2", "result.txt")
    kept = [json.loads((tmp_path / name).read_text().partition(" ")[2]) for name in names]
    assert [line["value"] for line in kept] == [0, 1, 2]
