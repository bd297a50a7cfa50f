"""Benchmarks of round 6.1: the official checker and our score read the same logs alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.check import official_checker
from paceline.mlperf.check.compliance import check
from paceline.mlperf.rules import FIRST_EVALUATIONS, find_benchmark, first_evaluation
from paceline.mlperf.score.run_set import score
from tests.mlperf.complete_logs import COMMON, complete_log, hyperparameters

pytestmark = pytest.mark.skipif(
    "6.1.0" not in official_checker.checker_rulesets("dlrmv4"),
    reason="mlperf-logging 4.1.68 is not installed",
)
RULESET = "6.1.0"
BATCHES = {
    "gpt_oss_20b": 16,
    "deepseekv3_671b": 15_360,
    "qwen35_397b_grpo": 512,
    "dlrmv4": 16_384,
}


def first(benchmark: str, batch: int) -> int:
    return first_evaluation(benchmark, RULESET, batch) or 12_288


def reached(benchmark: str) -> float:
    rules = find_benchmark(benchmark, "")
    return rules.target + (0.001 if rules.more_is_better else -0.001)


def findings(folder: Path, text: str) -> list[tuple[int | None, str]]:
    (folder / "result_0.txt").write_text(text)
    (file,) = check(folder, RULESET).files
    return [(finding.line, finding.message) for finding in file.findings]


def warnings(folder: Path) -> str:
    return " ".join(score(folder, RULESET).warnings)


@pytest.mark.parametrize(("benchmark", "batch"), list(BATCHES.items()))
def test_a_complete_log_passes(benchmark: str, batch: int, tmp_path: Path):
    text = complete_log(benchmark, batch, {first(benchmark, batch): reached(benchmark)})

    assert findings(tmp_path, text) == []
    (run,) = score(tmp_path, RULESET).runs
    assert (run.status, run.samples_to_target) == ("success", first(benchmark, batch))
    assert "first evaluation" not in warnings(tmp_path)


def test_the_first_evaluations_are_those_of_the_rules():
    assert first("deepseekv3_671b", 16_384) == 16_384 * 43
    assert first("qwen35_397b_grpo", 512) == 512 * 10
    # Blocks of 0.1% of the samples, as the comment of the rules counts them.
    for batch, block in ((8192, 25), (16_384, 31), (32_768, 41)):
        interval = -(-2_290_836 // batch) * batch
        assert first("dlrmv4", batch) == block * interval
    assert first_evaluation("deepseekv3_671b", "6.0.0", 16_384) is None
    assert first_evaluation("gpt_oss_20b", RULESET, 16) is None


@pytest.mark.parametrize(
    ("benchmark", "steps"), list(zip(FIRST_EVALUATIONS, (-1, 1, -1), strict=True))
)
def test_another_first_evaluation_is_found_by_both(benchmark: str, steps: int, tmp_path: Path):
    batch = BATCHES[benchmark]
    samples = first(benchmark, batch) + steps * batch

    found = findings(tmp_path, complete_log(benchmark, batch, {samples: reached(benchmark)}))

    assert any(f'"samples_count": {samples}' in message for _, message in found)
    expected = f"result_0.txt ({samples:,} instead of {first(benchmark, batch):,} samples)"
    assert expected in warnings(tmp_path)


@pytest.mark.parametrize("benchmark", ["gpt_oss_20b", "qwen35_397b_grpo"])
def test_a_missed_target_is_found_by_both(benchmark: str, tmp_path: Path):
    batch, rules = BATCHES[benchmark], find_benchmark(benchmark, "")
    missed = rules.target + (-0.001 if rules.more_is_better else 0.001)

    found = findings(tmp_path, complete_log(benchmark, batch, {first(benchmark, batch): missed}))

    assert [message for _, message in found if "Failed checks for eval_accuracy" in message]
    assert score(tmp_path, RULESET).runs[0].status == "failed"


@pytest.mark.parametrize("benchmark", ["qwen35_397b_grpo", "dlrmv4"])
def test_an_evaluation_at_the_target_counts_as_in_the_rules(benchmark: str, tmp_path: Path):
    batch, target = BATCHES[benchmark], find_benchmark(benchmark, "").target

    found = findings(tmp_path, complete_log(benchmark, batch, {first(benchmark, batch): target}))

    assert bool(found) == (benchmark == "qwen35_397b_grpo")
    assert score(tmp_path, RULESET).runs[0].status == ("failed" if found else "success")


WITHOUT_A_CHECK = {"opt_end_learning_rate", "max_steps", "train_samples", "seed"}
FREE = {
    "opt_base_learning_rate": {"gpt_oss_20b"},
    "opt_learning_rate_warmup_steps": {"gpt_oss_20b"},
}


def fixed(benchmark: str) -> list[str]:
    keys = hyperparameters(benchmark, 16_384)
    unchecked = WITHOUT_A_CHECK - ({"max_steps"} if benchmark == "gpt_oss_20b" else set())
    return [k for k in keys if k not in unchecked and benchmark not in FREE.get(k, ())]


@pytest.mark.parametrize("benchmark", BATCHES)
def test_every_wrong_hyperparameter_is_found_on_its_line(benchmark: str, tmp_path: Path):
    batch = BATCHES[benchmark]
    values, keys = hyperparameters(benchmark, batch), fixed(benchmark)
    wrong = {
        k: "other" if isinstance(v := values[k], str) else v * 2 + at
        for at, k in enumerate(keys, 1)
    }
    # The number of prompts is compared with the batch on the line of the generations.
    wrong.pop("num_prompts_per_step", None)
    text = complete_log(benchmark, batch, {first(benchmark, batch): reached(benchmark)}, **wrong)

    found = {line for line, _ in findings(tmp_path, text)}

    lines = dict(enumerate(text.splitlines(), 1))
    assert found == {n for n, row in lines.items() if any(f'"key": "{k}"' in row for k in wrong)}


def test_every_key_of_all_benchmarks_is_required(tmp_path: Path):
    keys = [key for key in COMMON if key != "seed" and not key.startswith("submission")]
    text = complete_log("gpt_oss_20b", 16, {12_288: 3.3}, without=keys)

    found = " ".join(message for _, message in findings(tmp_path, text))
    assert [key for key in keys if f"'{key}'" not in found] == []


@pytest.mark.parametrize("benchmark", ["llama31_405b", "dlrm_dcnv2"])
def test_a_benchmark_that_left_is_refused(benchmark: str, tmp_path: Path):
    text = complete_log("gpt_oss_20b", 16, {12_288: 3.3}, submission_benchmark=benchmark)

    assert any("submission_benchmark" in message for _, message in findings(tmp_path, text))
    assert RULESET not in official_checker.checker_rulesets(benchmark)
