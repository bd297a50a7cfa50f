"""The modified rules for tiny variants: only the checks listed in one table are replaced."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.files.recipe import load_recipe
from paceline.mlperf.check.compliance import (
    BASE_RULESET,
    BEST,
    REPLACED_CHECKS,
    VALUE,
    replaced_rules,
)
from paceline.mlperf.check.official_checker import check_copy
from paceline.mlperf.rules import TINY_VARIANTS, TRIAL_VARIANT
from tests.mlperf.samples import line

yaml = pytest.importorskip("yaml")
mlperf_logging = pytest.importorskip("mlperf_logging")


def official_rules(file: str) -> dict[str, dict[str, Any]]:
    spec = find_spec("mlperf_logging")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "compliance_checker"
    text = (folder / f"training_{BASE_RULESET}" / f"{file}.yaml").read_text()
    entries = yaml.load(text, Loader=yaml.BaseLoader)
    return {entry["KEY"]["NAME"]: entry["KEY"] for entry in entries if "KEY" in entry}


@pytest.mark.parametrize(
    ("file", "key", "field"),
    [
        (file, key, field)
        for file, keys in REPLACED_CHECKS.items()
        for key, (field, _) in keys.items()
    ],
)
def test_every_exchanged_check_is_a_check_of_a_value(file: str, key: str, field: str):
    rule = official_rules(file)[key]

    assert field in (VALUE, BEST)
    assert isinstance(rule[field], str) and "v['value']" in rule[field]
    assert "s[" not in rule[field] and "metadata" not in rule[field]


@pytest.mark.parametrize("name", TINY_VARIANTS)
def test_the_exchanged_values_are_those_of_the_recipe(name: str):
    small = TINY_VARIANTS[name]
    recipe = load_recipe(small.recipe, TRIAL_VARIANT)
    evaluation, training = recipe.training.evaluation, recipe.training
    assert evaluation is not None and recipe.mlperf is not None
    assert evaluation.target == small.target and recipe.mlperf.benchmark == name
    values_of_recipe = {
        "max_sequence_length": training.seq_len,
        "eval_samples": evaluation.samples,
        "max_steps": training.steps,
        "evaluation_frequency": evaluation.every_samples,
        "lora_rank": recipe.lora and recipe.lora.rank,
    }
    for key, (field, check) in REPLACED_CHECKS[f"closed_{small.tiny_variant_of}"].items():
        value = evaluation.target if key == "eval_accuracy" else values_of_recipe[key]
        assert eval(check, {}, {"v": {"value": value}})
        assert not eval(check, {}, {"v": {"value": (value or 0) + 1}}), (key, field)


def log(**changed: Any) -> str:
    """A log of the small Flux that keeps all rules, with values changed and None left out."""
    values: dict[str, Any] = {
        "cache_clear": False,
        "init_start": None,
        "submission_benchmark": "flux1_tiny",
        "submission_org": "nobody",
        "submission_platform": "tiny",
        "submission_division": "closed",
        "submission_status": "rdi",
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "evaluation_frequency": 24,
        "opt_name": "adamw",
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.95,
        "opt_adamw_epsilon": 1e-8,
        "opt_adamw_weight_decay": 0.1,
        "opt_base_learning_rate": 1e-3,
        "opt_learning_rate_warmup_steps": 4,
        "opt_gradient_clip_norm": 1.0,
        "init_stop": None,
        "run_start": None,
        "train_samples": 9,
        "eval_samples": 9,
        "block_start": None,
        "block_stop": None,
        "eval_start": None,
        "eval_accuracy": TINY_VARIANTS["flux1_tiny"].target,
        "eval_stop": None,
        "run_stop": None,
    }
    gone = {key for key, value in changed.items() if value is None}
    lines = [
        line(key, value, 1e12 + at, samples_count=24, status="success")
        for at, (key, value) in enumerate((values | changed).items())
        if key not in gone
    ]
    return "\n".join(lines) + "\n"


def objections(tmp_path: Path, text: str) -> str:
    copy = tmp_path / "log.txt"
    copy.write_text(text)
    verdict = check_copy(copy, BASE_RULESET, replaced_rules())
    assert verdict.checker_error is None
    return "\n".join(verdict.messages)


def test_a_log_of_a_small_sibling_passes(tmp_path: Path):
    assert objections(tmp_path, log()) == ""


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"submission_benchmark": "flux1"}, "submission_benchmark"),
        ({"evaluation_frequency": 262144}, "evaluation_frequency"),
        ({"eval_accuracy": 0.9}, "eval_accuracy"),
        ({"opt_name": "sgd"}, "opt_name"),
        ({"cache_clear": None}, "cache_clear"),
        ({"opt_adamw_weight_decay": None}, "opt_adamw_weight_decay"),
        ({"init_stop": None}, "run_start"),
    ],
)
def test_every_other_rule_still_holds(tmp_path: Path, changed: dict[str, Any], key: str):
    assert key in objections(tmp_path, log(**changed))


def test_a_check_that_the_official_rules_do_not_have_is_an_answer(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(log())
    changes = {"replacements": {"closed_flux1": {"no_such_key": (VALUE, "True")}}, "names": {}}

    verdict = check_copy(copy, BASE_RULESET, changes)

    assert verdict.checker_error is not None and "no_such_key" in verdict.checker_error


def test_the_official_rules_name_every_key_that_deviates(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(log())

    verdict = check_copy(copy, BASE_RULESET, {"also": "flux1"})

    text = "\n".join(verdict.messages)
    for key in ("submission_benchmark", "evaluation_frequency", "eval_accuracy"):
        assert key in text
    assert "CHECK for 'opt_" not in text


def test_the_document_has_todays_targets():
    document = (Path(__file__).parents[3] / "docs" / "reference" / "mlperf.md").read_text()
    names = ("llama31_8b_tiny", "llama2_70b_lora_tiny", "flux1_tiny", "gpt_oss_20b_tiny")

    assert f"| {'; '.join(f'{TINY_VARIANTS[name].target:g}' for name in names)} |" in document
