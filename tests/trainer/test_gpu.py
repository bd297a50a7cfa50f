"""What the trainer does on a GPU is what it does on a CPU (`make test-gpu`; skipped without a GPU).

Small sizes, about a minute; no times are judged. Random numbers of a CPU and of a GPU differ, so
both begin with the CPU's weights.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from paceline.core.layout import Layout
from paceline.core.layout_checks import native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.files.recipe import load_recipe, recipe_names
from paceline.machines.placement import Request
from paceline.runs.plan import make_plan
from paceline.trainer.config import ConfigError, Fp8Recipe, parse_config
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import DeviceClock, HostClock, StepClock
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.model.attention import AttentionShape, attention_kernel
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.replica.assembly import DTYPES as DTYPES_OF_TORCH
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer
from tests.trainer.example import end, log, settings, steps, train_alone
from tests.trainer.gpu import CAPABILITY, DEVICE, GPUS, ON_A_GPU

pytestmark = ON_A_GPU
FLOAT8 = CAPABILITY >= (8, 9) and importlib.util.find_spec("torchao") is not None
DTYPES = ("fp32", "bf16", "fp16", "fp8")
LOSS_OFF = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 5e-3, "fp8": 3e-2}
"""Relative, of the first step's loss."""
NORM_OFF = {"fp32": 1e-2, "bf16": 5e-2, "fp16": 2e-2, "fp8": 2e-1}
ONE = {"tp": 1, "pp": 1, "cp": 1, "vp": 1, "zero_stage": 0, "sequence_parallel": "false"}
TINY = [name for name in recipe_names() if "tiny" in name]


class Events:
    """Takes the trainer's events."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.steps_done = 0

    def write(self, event: str, **values: Any) -> None:
        self.lines.append({"event": event, **values})

    def named(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def needs(dtype: str) -> None:
    if dtype == "fp8" and not FLOAT8:
        pytest.skip("fp8 needs torchao and compute capability 8.9")
    if dtype == "bf16" and CAPABILITY < (8, 0):
        pytest.skip("this GPU does not compute in bf16")


def recipe(name: str, dtype: str, step_count: int = 4) -> dict[str, Any]:
    """trainer.json of a recipe on one device, without what is dropped at random."""
    wanted = {
        **{f"layout.{axis}": size for axis, size in ONE.items()},
        "layout.schedule": "1f1b",
        "dtype": "fp32",
        "steps": step_count,
        "data.source": "synthetic",
    }
    plan = make_plan(Request(name, None, tuple(f"{k}={v}" for k, v in wanted.items()), 1, "cpu"))
    raw = json.loads(plan.job.files["trainer.json"])
    raw["training"]["dtype"] = dtype
    if raw["lora"]:
        raw["lora"]["dropout"] = 0.0
    return raw


def trained(
    raw: dict[str, Any], device: torch.device, weights: dict[str, Tensor] | None = None
) -> tuple[Events, dict[str, Tensor]]:
    """What a training in this process tells, and the weights that it began with."""
    config = parse_config({**raw, "device": device.type})
    world, mesh, events = World(0, 0, 1, device, None), Mesh(), Events()
    clock = StepClock(DeviceClock(device) if device.type == "cuda" else HostClock())
    memory = MemoryWatch(device, parts=True)
    replica, corpus = make_replica(config, world, mesh, clock), load_corpus(config)
    with torch.no_grad():
        for name, parameter in replica.named_parameters() if weights else ():
            parameter.copy_(weights[name])
    began = {name: p.detach().cpu().clone() for name, p in replica.named_parameters()}
    trainer = Trainer(config, replica, world, clock, events, memory, corpus.masked)  # type: ignore[arg-type]
    sampler = sampler_of(config, corpus.num_windows)
    loader = Loader(corpus, sampler, config, mesh, pin=device.type == "cuda")
    try:
        trainer.run(loader, {})
    finally:
        loader.close()
        gc.enable()
        gc.unfreeze()
        gc.collect()
    return events, began


@cache
def on_a_cpu(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The first step of a recipe in fp32 on a CPU, and its weights before."""
    events, weights = trained(recipe(name, "fp32", 1), torch.device("cpu"))
    return events.named("step")[0], weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY)
def test_a_recipe_s_first_step_is_the_cpu_s(name: str, dtype: str) -> None:
    needs(dtype)
    raw = recipe(name, dtype)
    sizes = ParallelRun(Layout(), load_recipe(name).model, 1, 1, dtype=dtype, device="cuda")
    refused = native_problems(sizes)
    if dtype == "fp8" and refused:
        pytest.skip(refused[0])
    wanted, weights = on_a_cpu(name)

    events, _ = trained(raw, DEVICE, weights)

    first, *rest = events.named("step")
    assert first["loss"] == pytest.approx(wanted["loss"], rel=LOSS_OFF[dtype])
    if not first.get("skipped"):
        assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=NORM_OFF[dtype])
    assert len(rest) == 3 and all(math.isfinite(line["loss"]) for line in rest)
    assert all(line["step_time_s"] > 0 for line in rest)


FP8_RECIPES = get_args(Fp8Recipe)


@pytest.mark.parametrize("narrow", [*FP8_RECIPES, "mxfp8", "nvfp4"])
def test_low_precision_by_every_recipe_is_near_the_cpu_s(narrow: str) -> None:
    needs("fp8")
    raw = recipe("tiny-llama", "fp8" if narrow in FP8_RECIPES else narrow)
    raw["training"]["fp8_recipe"] = narrow if narrow in FP8_RECIPES else "tensorwise"
    wanted, weights = on_a_cpu("tiny-llama")
    if narrow not in FP8_RECIPES and CAPABILITY < (10, 0):
        with pytest.raises(ConfigError, match=rf"{narrow}: .*use training.dtype=fp8"):
            trained(raw, DEVICE, weights)
        return

    try:
        events, _ = trained(raw, DEVICE, weights)
    except ConfigError as error:
        pytest.skip(str(error))

    first, *rest = events.named("step")
    assert first["loss"] == pytest.approx(wanted["loss"], rel=LOSS_OFF["fp8"])
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=NORM_OFF["fp8"])
    assert len(rest) == 3 and all(math.isfinite(line["loss"]) for line in rest)


def test_memory_adds_up_and_grows_with_the_batch() -> None:
    peaks: list[int] = []
    for micro_batch in (2, 8):
        raw = recipe("tiny-llama", "fp32", 6)
        raw["layout"]["micro_batch"] = micro_batch
        raw["num_microbatches"] = raw["training"]["global_batch"] // micro_batch
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        events, weights = trained(raw, DEVICE)
        told = [line["memory_bytes"] for line in events.named("step")]
        for kind in ("allocated", "reserved", "device_used"):
            figures = [memory[kind] for memory in told]
            assert figures == sorted(figures) and figures[0] > 0
        last, (watched,) = told[-1], events.named("memory")
        peak = watched["peak_bytes"]
        assert peak["allocated"] <= peak["reserved"] <= peak["device_used"]
        assert sum(watched["at_peak_bytes"].values()) <= last["allocated"]
        parts = watched["parts_bytes"]
        assert (
            parts["weights"] == parts["gradients"] == sum(4 * w.numel() for w in weights.values())
        )
        assert all(size >= 0 for size in watched["at_peak_bytes"].values())
        peaks.append(last["allocated"])
    assert peaks[0] < peaks[1]


def test_compiled_blocks_train_alike() -> None:
    plain, weights = trained(recipe("tiny-llama", "fp32"), DEVICE)
    raw = recipe("tiny-llama", "fp32")
    raw["training"]["compile"] = "blocks"

    compiled, _ = trained(raw, DEVICE, weights)

    losses = [[line["loss"] for line in events.named("step")] for events in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_recorded_attention_kernel_is_one_that_runs(dtype: str) -> None:
    needs(dtype)
    shape = AttentionShape(512, heads=8, kv_heads=2, width=64, causal=True)

    name = attention_kernel(shape, DTYPES_OF_TORCH[dtype], DEVICE)

    fused = {"cudnn_attention", "flash_attention"} if dtype == "bf16" else {"efficient_attention"}
    assert name in fused


def test_running_out_of_memory_is_a_result(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    samples = int(free / 2e5 / 256)  # a token of this model needs more than twice as much
    raw = settings(
        device="cuda",
        dtype="bf16",
        source="synthetic",
        seq_len=256,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=16,
        num_layers=8,
        ffn_size=4096,
        micro_batch=samples,
        global_batch=samples,
    )

    assert train_alone(tmp_path, raw) == 1
    assert end(tmp_path)["status"] == "oom", log(tmp_path)
    assert "out of memory" in end(tmp_path)["reason"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    raw = settings(device="cuda", dtype="fp32", steps=6, source="synthetic")
    raw["checkpoint"] = {"every": 3, "resume": None, "asynchronous": asynchronous}
    assert train_alone(tmp_path / "whole", raw) == 0, log(tmp_path / "whole")
    raw["checkpoint"]["resume"] = str(tmp_path / "whole" / "checkpoints" / "step-000003")

    assert train_alone(tmp_path / "rest", raw) == 0, log(tmp_path / "rest")

    whole, rest = (steps(tmp_path / name) for name in ("whole", "rest"))
    assert [line["step"] for line in rest] == [4, 5, 6]
    wanted = [line["loss"] for line in whole[3:]]
    assert [line["loss"] for line in rest] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.skipif(GPUS < 2, reason="NCCL needs two GPUs")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_all_gpus_together_train_as_one(tmp_path: Path, zero_stage: int) -> None:
    both: list[list[float]] = []
    for ranks in (1, GPUS):
        raw = settings(
            ranks=ranks,
            device="cuda",
            dtype="fp32",
            steps=4,
            source="synthetic",
            micro_batch=1,
            global_batch=2 * GPUS,
            zero_stage=zero_stage,
        )
        folder = tmp_path / str(ranks)
        assert train_alone(folder, raw) == 0, log(folder)
        lines = [[line["loss"] for line in steps(folder, rank)] for rank in range(ranks)]
        both.append([sum(step) / ranks for step in zip(*lines, strict=True)])
    assert both[1] == pytest.approx(both[0], rel=1e-3)
