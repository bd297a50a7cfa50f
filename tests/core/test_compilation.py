"""Compiling pays when all steps together save more than it costs, where gains were measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.core.compilation import CPU_GAINS, GPU_GAINS, CompileGain, Work, saving
from paceline.core.hardware import Dtype
from paceline.files.recipe import load_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CORES = 2
"""Of the machine that peers.json is from."""
NAMED = {"Llama": "llama", "LoRA": "lora", "GPT": "gpt", "OPT": "opt", "Flux": "flux"}
RECIPES = {
    "tiny-llama": "llama",
    "tiny-gpt": "gpt",
    "opt-350m-sft-tiny": "opt",
    "llama2-70b-lora-tiny": "lora",
    "flux1-schnell-tiny": "flux",
}


def work(recipe: str = "tiny-llama", dtype: Dtype = "bf16", steps: int = 60) -> Work:
    whole = load_recipe(recipe)
    training = whole.training
    batch = float(training.batch_per_device or 1)
    return Work(whole.model, whole.lora, dtype, training.seq_len, batch, steps)


def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_gains_on_cpus_are_those_of_the_benchmark_and_opt_has_none_in_fp32():
    gains: dict[tuple[str, str], CompileGain] = {}
    for row in stored("peers.json")["rows"]:
        if "experts" in row["shape"]:
            continue  # what compiling them costs is unknown
        plain = row["sides"]["native"]
        speedup = 1 / plain["ratio"]["median"]
        reached = plain["tokens_per_s"]["median"] * row["flops_per_token"] / CORES
        name: str = row["shape"].replace(",", "").split()[0]
        gains[NAMED[name], row["dtype"]] = CompileGain(speedup, reached, 0.0)
    assert {kind for kind, _ in gains} == set(NAMED.values())
    for key, gain in CPU_GAINS.items():
        assert gain.speedup == pytest.approx(gains[key].speedup, rel=0.01)
        assert gain.throughput == pytest.approx(gains[key].throughput, rel=0.02)
    assert max(gain.speedup for key, gain in gains.items() if key not in CPU_GAINS) < 1.07


def test_the_gain_on_a_gpu_is_that_of_the_benchmark():
    rows = {
        row["compile"]: row
        for row in stored("gpu_proof.json")["rows"]
        if row["case"].startswith("Llama") and row["side"] == "native" and row["dtype"] == "bf16"
    }
    gain = GPU_GAINS["llama", "bf16"]
    plain, compiled = rows["none"], rows["blocks"]
    ratio = compiled["tokens_per_s"] / plain["tokens_per_s"]
    assert gain.speedup == pytest.approx(ratio, rel=0.001)
    assert gain.compile_s >= compiled["first_steps_s"] - plain["first_steps_s"]


def test_what_compiling_costs_is_what_the_benchmark_took_or_a_little_more():
    rows = {RECIPES[row["recipe"]]: row for row in stored("compile_cache.json")["rows"]}
    for (kind, _), gain in CPU_GAINS.items():
        assert 1.0 <= gain.compile_s / rows[kind]["cold"]["median"] < 1.6
    assert median(row["ratio"]["median"] for row in rows.values()) < 0.5


def test_few_steps_stay_as_they_are_and_many_pay():
    short, long = saving(work(), threads=1), saving(work(steps=5000), threads=1)
    assert short and long and not short.pays and long.pays
    assert long.saved_s == pytest.approx(short.saved_s * 5000 / 60)


def test_more_cores_and_a_faster_device_save_less_time():
    one, four = (saving(work(steps=1000), threads=count) for count in (1, 4))
    slow, fast = (saving(work(steps=1000), peak=peak) for peak in (312e12, 989.5e12))
    assert one and four and slow and fast
    assert one.saved_s == pytest.approx(4 * four.saved_s)
    assert slow.saved_s == pytest.approx(fast.saved_s * 989.5 / 312)


@pytest.mark.parametrize(("recipe", "dtype"), [("tiny-opt", "fp32"), ("gemma3-4b-tiny", "bf16")])
def test_what_nobody_measured_is_not_known(recipe: str, dtype: Dtype):
    assert saving(work(recipe, dtype, steps=10**6), threads=1) is None


def test_a_device_without_a_known_rate_is_not_known():
    assert saving(work(steps=10**6), peak=None) is None
    assert saving(work("flux1-schnell-tiny", steps=10**6), peak=1e15) is None
    assert saving(work(dtype="fp16", steps=10**6), threads=1) is None
