"""The memory model beside what the native trainer allocated on one H100.

The bytes are of benchmarks/results/gpu_proof.json and gpu_proof_workloads.json.
"""

from __future__ import annotations

import pytest

from paceline.core.hardware import Cluster
from paceline.estimate.calibrate.lookup import machine_for
from paceline.estimate.estimates import estimates_of_runs
from paceline.estimate.fit.evidence import shipped
from paceline.files.recipe import load_recipe, resolve

ALONE = ("data.source=synthetic", "layout.cp=1", "layout.zero_stage=0", "training.ramp_up=null")
EIGHT_B = ("model.num_layers=4", "layout.micro_batch=1", "global_batch=4")
GPT = ("model.dropout=0", "layout.micro_batch=8", "global_batch=32")
OPT = ("layout.micro_batch=24", "global_batch=24")
FLUX = ("model.num_double_blocks=4", "model.num_single_blocks=8", "layout.micro_batch=16")


@pytest.mark.parametrize(
    ("recipe", "settings", "allocated_bytes"),
    [
        ("gpt-1b3", ("dtype=bf16", *GPT), 51058226176),
        ("gpt-1b3", ("dtype=fp8", *GPT), 47838172160),
        ("llama31-8b", ("dtype=bf16", *EIGHT_B), 42499269632),
        ("llama31-8b", ("dtype=fp8", *EIGHT_B), 38914145792),
        ("opt-350m-sft", ("dtype=bf16", *OPT), 14582161408),
        ("llama2-70b-lora", ("dtype=bf16", *EIGHT_B), 18413524480),
        ("flux1-schnell", ("dtype=bf16", "global_batch=16", *FLUX), 47983357440),
    ],
)
def test_the_allocated_memory_of_a_gpu_is_near_what_it_was(
    recipe: str, settings: tuple[str, ...], allocated_bytes: int
) -> None:
    cluster = Cluster(name="one", device="H100-SXM", devices_per_node=1)
    changes = (*ALONE, "layout.recompute=none", *settings)
    spec = resolve(load_recipe(recipe, None, changes), cluster, True, None)

    estimates = estimates_of_runs([spec], [machine_for(cluster, spec.training.dtype)], shipped())

    assert float(estimates.memory.allocated[0]) == pytest.approx(allocated_bytes, rel=0.13)
