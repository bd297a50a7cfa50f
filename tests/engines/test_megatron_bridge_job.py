"""Megatron-Bridge's performance recipes by their command line, with a program that stands in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.engines import engine
from paceline.machines.slurm.script import batch_script
from paceline.runs import flow
from paceline.runs.plan import Plan
from tests.engines.batch_site import site, spec_of

CHECKOUT = {"checkout": "/opt/Megatron-Bridge"}
FAKE_BRIDGE = Path(__file__).with_name("fake_bridge.py")
OF_70B = """
 --model_family_name llama --model_recipe_name llama3_70b --task pretrain --num_gpus 64
 --gpus_per_node 8 --gpu h100 --compute_dtype bf16 --data mock --max_steps 50
 --global_batch_size 128 --micro_batch_size 1 --seq_length 8192 --tensor_model_parallel_size 4
 --pipeline_model_parallel_size 4 --context_parallel_size 2
 --virtual_pipeline_model_parallel_size 5 --expert_model_parallel_size 1 --use_megatron_fsdp false
"""


def bridge(
    of: str = "llama31-70b", /, *overrides: str, cluster: Cluster | None = None, **own: Any
) -> RunSpec:
    return spec_of(
        "megatron_bridge",
        of,
        cluster or site(8, 8, "H100-SXM", container_image="/images/nemo.sqsh"),
        {**CHECKOUT, **own},
        None,
        *overrides,
    )


def words(spec: RunSpec) -> list[str]:
    assert engine("megatron_bridge").unsupported(spec) == []
    program = engine("megatron_bridge").job(spec, "x").program
    return list(program[program.index("{python}") :])


def test_a_recipe_is_asked_for_with_its_layout_batch_and_steps() -> None:
    python, unbuffered, entry, *options = words(bridge())
    assert (python, unbuffered) == ("{python}", "-u")
    assert entry == "scripts/performance/bootstrap.py" and options == OF_70B.split()


def test_it_works_in_the_checkout_of_the_image_once_a_device() -> None:
    job = engine("megatron_bridge").job(bridge(), "x")
    assert job.env["PACELINE_WORKING_FOLDER"] == "/opt/Megatron-Bridge"
    assert (job.ranks_per_node, job.nodes) == (8, 8)
    assert "--container-image=/images/nemo.sqsh" in batch_script(job)


def test_other_precisions_variants_and_models_are_named() -> None:
    eight = ("--model_recipe_name", "llama3_8b")
    told = words(bridge("llama31-8b", "dtype=fp8", "layout.zero_stage=3", variant="v1"))
    pairs = list(pairwise(told))
    assert eight in pairs and ("--compute_dtype", "fp8_cs") in pairs
    assert ("--config_variant", "v1") in pairs and ("--use_megatron_fsdp", "true") in pairs
    own: dict[str, Any] = {"family": "qwen", "recipe": "qwen3_30b_a3b", "entry": "run_script.py"}
    told = words(bridge("llama31-8b", "dtype=fp8", precision="fp8_sc", **own))
    assert told[2] == "scripts/performance/run_script.py"
    assert {"qwen", "qwen3_30b_a3b", "fp8_sc"} <= set(told)


FORCED = "training.routing=forced"
"""What performance recipes do to experts."""


def test_deepseek_is_known_and_each_part_of_its_pipeline_is_recomputed_whole() -> None:
    rack = site(128, 8, "H100-SXM")
    (problem,) = engine("megatron_bridge").unsupported(bridge("deepseek-v3", cluster=rack))
    assert problem.startswith(
        "training.routing learned is not supported: performance recipes force"
    )
    pairs = list(pairwise(words(bridge("deepseek-v3", FORCED, cluster=rack))))
    assert ("--model_family_name", "deepseek") in pairs
    assert ("--model_recipe_name", "deepseek_v3") in pairs
    assert ("--expert_model_parallel_size", "64") in pairs
    assert ("--recompute_num_layers", "61") in pairs
    cut = ("layout.pp=8", "layout.vp=2", "global_batch=16384", FORCED)
    pairs = list(pairwise(words(bridge("deepseek-v3", *cut, cluster=rack))))
    assert ("--recompute_num_layers", "4") in pairs, "61 layers in 16 parts"


def test_kimi_k2_has_the_layers_of_deepseek_and_a_recipe_of_its_own() -> None:
    rack = site(128, 8, "H100-SXM")
    kimi = bridge("kimi-k2", FORCED, cluster=rack)
    assert engine("megatron_bridge").unsupported(kimi) == []
    pairs = list(pairwise(words(kimi)))
    assert ("--model_family_name", "kimi") in pairs
    assert ("--model_recipe_name", "kimi_k2") in pairs


def test_a_pipeline_that_a_recipe_cannot_split_is_refused() -> None:
    rack = site(1152, 8, "H100-SXM")
    whole = bridge("llama31-405b", cluster=site(128, 8, "H100-SXM"))
    assert engine("megatron_bridge").unsupported(whole) == [], "126 + 2 layers over 8 x 8"
    for of, cut, sentence in (
        ("llama31-405b", ("layout.pp=9", "layout.vp=7"), "128 layers with embedding and head"),
        ("llama31-70b", ("layout.pp=2", "layout.vp=41"), "80 layers cannot be split over pp 2 x"),
        (
            "deepseek-v3",
            ("layout.pp=8", "layout.vp=4", "layout.ep=64", "global_batch=18432"),
            "pp 8 x vp 4: ",
        ),
    ):
        problems = engine("megatron_bridge").unsupported(bridge(of, *cut, cluster=rack))
        assert any(problem.startswith(sentence) for problem in problems), problems


def test_a_model_without_a_performance_recipe_is_one_of_the_library() -> None:
    named = {"family": "gpt_oss", "recipe": "gpt_oss_20b", "library": True}
    told = words(bridge("gpt-oss-20b", cluster=site(1, 8, "B200"), **named))
    asked = told[told.index("--model_recipe_name") :]
    assert asked[:4] == ["--model_recipe_name", "gpt_oss_20b", "--use_recipes", "--task"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (bridge(checkout=None), "engine_settings.checkout must be the absolute path"),
        (bridge(checkout="code"), "engine_settings.checkout must be the absolute path"),
        (bridge(family="qwen"), "family and recipe belong together"),
        (bridge(library="yes"), "engine_settings.library yes must be true or false"),
        (bridge(library=True, variant="v1"), "library needs bootstrap.py and has no"),
        (
            bridge("llama31-8b", "dtype=fp8", library=True),
            "training.dtype fp8: library recipes train in bf16",
        ),
        (bridge(entry="train.py"), "entry train.py must be bootstrap.py or run_script.py"),
        (
            bridge(precision="fp8_mx"),
            "training.dtype bf16 does not match engine_settings.precision fp8_mx",
        ),
        (bridge("tiny-opt"), "tiny-opt has no known performance recipe (llama3_8b"),
        (bridge(cluster=site(8, 8, "A100-SXM-80GB")), "device A100-SXM-80GB has no performance"),
    ],
)
def test_what_it_cannot_be_asked_for_is_told(spec: RunSpec, sentence: str) -> None:
    assert any(sentence in problem for problem in engine("megatron_bridge").unsupported(spec))


def run(folder: Path, **env: str) -> Any:
    """A run of two ranks on this machine, which stands in for one with two H100."""
    scripts = folder / "bridge" / "scripts" / "performance"
    scripts.mkdir(parents=True)
    shutil.copy(FAKE_BRIDGE, scripts / "bootstrap.py")
    cluster = Cluster(name="here", device="H100-SXM", nodes=1, devices_per_node=2)
    layout = ("layout.tp=1", "steps=20", "layout.cp=1", "flops_convention=full-attention")
    spec = bridge("llama31-8b", *layout, cluster=cluster, checkout=str(folder / "bridge"))
    program = engine("megatron_bridge")
    assert (program.unsupported(spec), program.missing(spec)) == ([], None)
    job = program.job(spec, "x")
    plan = Plan(spec, replace(job, env={**job.env, **env}), {})
    return flow.run(plan, folder / "runs", ["test"], lambda _: None, probe=False).result


def test_its_two_ranks_log_is_one_result(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert (result.status, result.steps_done) == ("ok", 20), result.reason
    assert result.metrics["step_time_s"].value == pytest.approx(5.7)
    (log,) = tmp_path.glob("runs/*/logs/rank-00000.log")
    told = json.loads(log.read_text().splitlines()[0])
    rate = result.metrics["tokens_per_s"].value
    assert rate == pytest.approx(8192 * told["global_batch_size"] / 5.7, rel=1e-3)
    (ratio,) = [warning for warning in result.warnings if "tflops_per_device" in warning]
    assert "the log prints 1,186 TFLOP/s" in ratio, "in the first rank's line, and causal"


def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    result = run(tmp_path, FAILS="1")
    assert result.status == "oom" and "CUDA out of memory" in str(result.reason)
