"""Trainings that benchmarks/gpu_proof.py measures on one GPU, and their tiny variants."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.files.recipe import load_recipe, resolve

WARMUP = {"cuda": 5, "cpu": 3}
"""Steps before those that count: compilation, the watched step, the allocator's growth."""
ALONE = (
    "data.source=synthetic",
    *("layout.tp=1", "layout.pp=1", "layout.cp=1", "layout.vp=1", "layout.zero_stage=0"),
    *("layout.sequence_parallel=false", "layout.schedule=1f1b", "training.ramp_up=null"),
)


@dataclass(frozen=True)
class Case:
    """A shape with its batch, in the variants that are trained of it."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    micro_batch: int
    micro_batches: int
    peer: str = "transformers"
    variants: tuple[tuple[str, str], ...] = (("bf16", "blocks"),)
    """(dtype, compile) of the native trainer."""
    tiny: tuple[str, ...] = field(default=())
    """Recipe and overrides of the same case on a CPU."""
    steps: int = 14


CASES = (
    Case(
        "GPT 1.3B at 2048",
        "gpt-1b3",
        ("layout.recompute=none", "data.packing=packed", "model.dropout=0"),
        8,
        4,
        variants=(("bf16", "none"), ("bf16", "blocks"), ("fp8", "blocks")),
        tiny=("gpt-1b3-tiny", "layout.recompute=none", "model.dropout=0"),
        steps=11,
    ),
    Case(
        "Llama 3.1 8B's blocks at 8192, 4 layers",
        "llama31-8b",
        ("model.num_layers=4", "layout.recompute=none"),
        1,
        4,
        variants=(("bf16", "none"), ("bf16", "blocks"), ("fp8", "blocks")),
        tiny=("llama31-8b-tiny", "layout.recompute=none"),
    ),
    Case(
        "OPT-350M SFT at 512",
        "opt-350m-sft",
        ("layout.recompute=none",),
        24,
        1,
        tiny=("opt-350m-sft-tiny", "layout.recompute=none"),
        steps=25,
    ),
    Case(
        "LoRA on Llama 2 70B's blocks at 8192, 4 layers",
        "llama2-70b-lora",
        ("model.num_layers=4", "layout.recompute=none"),
        1,
        4,
        tiny=("llama2-70b-lora-tiny", "layout.recompute=none"),
    ),
    Case(
        "Mixtral 8x7B's blocks at 4096, 2 layers",
        "mixtral-8x7b",
        ("model.num_layers=2", "layout.recompute=none"),
        2,
        2,
        variants=(("bf16", "none"), ("bf16", "blocks")),
        tiny=("mixtral-8x7b-tiny", "layout.recompute=none"),
    ),
    Case(
        "Flux.1's blocks at 256 x 256, 4 double and 8 single",
        "flux1-schnell",
        ("model.num_double_blocks=4", "model.num_single_blocks=8"),
        16,
        1,
        peer="diffusers",
        tiny=("flux1-schnell-tiny",),
        steps=20,
    ),
)


def spec_of(case: Case, device: str, dtype: str, compile_: str) -> RunSpec:
    """Return the run of a case in one variant on a catalog device; on `cpu`, its tiny variant."""
    recipe, overrides = case.recipe, case.overrides
    micro_batch, micro_batches = case.micro_batch, case.micro_batches
    if device == "cpu":
        recipe, *tiny_overrides = case.tiny
        overrides, micro_batch, micro_batches = tuple(tiny_overrides), 2, 2
    changes = (
        *ALONE,
        *overrides,
        f"dtype={dtype}",
        f"compile={compile_}",
        f"steps={WARMUP['cpu'] + 3 if device == 'cpu' else case.steps}",
        f"layout.micro_batch={micro_batch}",
        f"global_batch={micro_batch * micro_batches}",
    )
    threads = os.cpu_count() if device == "cpu" else None
    cluster = Cluster(name="here", device=device, devices_per_node=1, threads_per_device=threads)
    return resolve(load_recipe(recipe, None, changes), cluster, True, None)
