"""What the scripts behind published rows set, and what a step of DeepSpeed's takes by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.published import PublishedStep, read_row
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import case_of, software_of

C = coefficient_values(shipped_evidence().fit().centre)
OPT_350M = {
    "source": "Lambda 1CC DeepSpeed-Chat", "model": "opt-350m", "layers": "24", "hidden": "1024",
    "heads": "16", "vocab": "50272", "gpu": "H100-SXM-80GB", "num_gpus": "8", "gbs": "192",
    "mbs": "24", "dtype": "fp16", "zero": "0", "step_time_s": "0.2036",
}  # fmt: skip
OPT_13B = {
    **OPT_350M, "model": "opt-13b", "layers": "40", "hidden": "5120", "heads": "40", "gbs": "128",
    "mbs": "16", "step_time_s": "1.7534",
}  # fmt: skip


def read(row: dict[str, str], **changes: str) -> PublishedStep:
    return read_row({**row, **changes})


def step(case: Case) -> StepTime:
    return step_time(cases_of([case]), C)


def test_the_script_of_opt_13b_trains_adapters_beside_embeddings():
    found = read(OPT_13B)
    assert (found.kind, found.case.frozen, found.case.adapter_rank) == ("dense", True, 128)
    # 40 blocks of rank 128 on 18 h of inputs and outputs, and the tied table, of 12.9B parameters.
    trained = 40 * 128 * 18 * 5120 + 50272 * 5120
    assert found.case.trained_share == pytest.approx(trained / (40 * 12 * 5120**2 + 50272 * 5120))
    assert found.case.param_tensors == 40 * (16 + 6)
    assert not read(OPT_350M).case.frozen
    assert not read(OPT_13B, source="DeepSpeed").case.frozen


@pytest.mark.parametrize(
    ("changes", "visited"),
    [({}, True), ({"dtype": "bf16"}, False), ({"source": "pytorch/torchtitan"}, False)],
)
def test_deepspeed_visits_tensors_in_fp16(changes: dict[str, str], visited: bool):
    assert (read(OPT_350M, **changes).case.param_tensors == 24 * 16) is visited


def test_a_visited_tensor_costs_the_host_and_its_exchange_shows():
    case = read(OPT_350M).case
    plain, sharded = replace(case, param_tensors=0), replace(case, zero_stage=1)
    assert step(case).fixed - step(plain).fixed == pytest.approx(C["host_tensor_s"] * 24 * 16)
    assert step(case).optimizer == pytest.approx(step(plain).optimizer * 82 / 26)
    assert step(sharded).fixed == pytest.approx(step(plain).fixed)
    # 4 bytes a parameter for 6, all of which show.
    assert step(case).dp > step(plain).dp
    assert step(replace(case, devices=1, global_batch=24)).dp == 0


def test_scores_of_single_operations_move_more_until_hugging_face_fused_them():
    case = read(OPT_350M).case
    assert case.flash == 0 and case.implementation == "torch"
    assert read(OPT_350M, release="25.02").case.flash
    compiled = step(replace(case, compiled=True))
    assert 1.3 < step(case).attention[0] / compiled.attention[0] < 1.75


@pytest.mark.parametrize(
    ("recipe", "measured_s"), [("opt-350m-sft", 0.2036), ("opt-13b-sft", 1.7545)]
)
def test_the_published_step_lies_in_the_estimate_of_its_recipe(recipe: str, measured_s: float):
    request = EstimateRequest(recipe, "H100-SXM", 8, software="deepspeed@24.07")
    case = case_of(request.spec, request.machine, request.resolved_software)
    assert case.param_tensors and not case.flash
    assert np.log(step(case).total[0] / measured_s) == pytest.approx(0, abs=0.05)
    newest = EstimateRequest(recipe, "H100-SXM", 8, software="deepspeed")
    assert case_of(newest.spec, newest.machine, newest.resolved_software).flash


@pytest.mark.parametrize(
    ("engine", "stack", "name"),
    [
        ("deepspeed_chat", "torch", "deepspeed"),
        ("hf_trainer", "torch", "hf"),
        ("torchtitan", "torch", "torchtitan"),
        ("megatron_deepspeed", "softmax", "megatron-deepspeed"),
        ("megatron", "fused", "any"),
    ],
)
def test_engines_are_estimated_as_what_they_run(engine: str, stack: str, name: str):
    spec = EstimateRequest("opt-350m-sft", "H100-SXM", 8).spec
    found = software_of(spec.model_copy(update={"engine": engine}))
    assert (found.implementation, found.name) == (stack, name)


@pytest.mark.parametrize(
    ("layout", "published_s", "published_gib"),
    [("micro_batch=1", 29, 16), ("micro_batch=8", 28, 25), ("pp=2", 30, 10), ("pp=4", 32, 9)],
)
def test_bigsciences_engine_is_expected_as_bigscience_measured_it(
    layout: str, published_s: float, published_gib: float
):
    overrides = ("engine=megatron_deepspeed", f"layout.{layout}")
    request = EstimateRequest(
        "gpt-1b3", "V100-SXM2-32GB", 8, devices_per_node=4, overrides=overrides
    )
    found = estimates_of_runs([request.spec], [request.machine], shipped_evidence())
    assert found.step_time_s[0] == pytest.approx(published_s, rel=0.1)
    assert found.memory.device_used[0] / 2**30 == pytest.approx(published_gib, rel=0.2)


def test_adapters_alone_are_visited_where_nothing_else_trains():
    asked = EstimateRequest("llama2-70b-lora", "H100-SXM", 8, overrides=("dtype=fp16",))
    spec, machine = asked.spec, asked.machine
    spec = spec.model_copy(update={"engine": "deepspeed_chat"})
    assert spec.lora and not spec.lora.train_rest
    found = case_of(spec, machine, software_of(spec))
    assert found.param_tensors == 80 * 2 * len(spec.lora.targets)
