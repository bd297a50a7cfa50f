"""Follows one optimizer step on tensors without memory.

Run as python -m paceline.trainer.offline.memory_trace '{"trainer": {...}, ...}'.

The question is {"trainer": trainer.json, "size": ranks, "ranks": [those that are followed]}. The
process takes each rank's place in a world in which nothing is sent, builds the trainer's own model
and trains two steps, the second under torch's memory tracker. A JSON line a rank: {"event":
"trace", "rank", "torch", "kernels", "num_microbatches", "peak_bytes", "parts_bytes",
"at_peak_bytes"}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, cast

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, LocalBatch, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.offline.fakes import substitutes
from paceline.trainer.parallel.mesh import Mesh, World, make_mesh
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer

ENOUGH = 2
"""Micro-batches of a step outside pipelines: each more needs what the second did."""
ROUNDS = (2, 3)
"""Followed micro-batches of longer steps per pipeline rank: from there on memory grows evenly."""
SYNTHETIC = {"source": "synthetic", "loss_mask": None, "document_mask": False}
NO_CHECKPOINT = {"every": None, "resume": None, "asynchronous": False}


def main(question: dict[str, Any]) -> None:
    """Follow every rank that is asked for."""
    raw, size = question["trainer"], int(question["size"])
    problems = config_problems(settings(raw, raw["num_microbatches"]), size)
    if problems:
        raise ConfigError("; ".join(problems))
    counts = traced_counts(raw["layout"]["pp"], raw["num_microbatches"])
    for rank in question["ranks"]:
        traces = [trace(settings(raw, count), rank, size) for count in counts]
        whole = grown(traces, raw["num_microbatches"]) if len(traces) > 1 else traces[0]
        print(json.dumps({"event": "trace", **whole}), flush=True)


def traced_counts(pp: int, num_microbatches: int) -> list[int]:
    """Numbers of micro-batches that tell what a step of so many needs."""
    if pp == 1:
        return [min(num_microbatches, ENOUGH)]
    rounds = [count * pp for count in ROUNDS]
    return rounds if num_microbatches > rounds[-1] else [num_microbatches]


def grown(traces: list[dict[str, Any]], num_microbatches: int) -> dict[str, Any]:
    """What a longer step needs, each figure on the line through those of two shorter ones."""
    first, last = traces
    counts = [trace["num_microbatches"] for trace in traces]
    more = (num_microbatches - counts[1]) / (counts[1] - counts[0])

    def at(shorter: int, longer: int) -> int:
        return round(longer + more * (longer - shorter))

    parts = {
        key: {name: at(first[key][name] or 0, value or 0) for name, value in last[key].items()}
        for key in ("parts_bytes", "at_peak_bytes")
    }
    return {**last, **parts, "peak_bytes": at(first["peak_bytes"], last["peak_bytes"])}


def settings(raw: dict[str, Any], count: int) -> TrainerConfig:
    """The run's own settings on synthetic data, with `count` micro-batches a step.

    Compiled blocks are followed uncompiled: the tracker does not see into them.
    """
    batch = count * raw["layout"]["micro_batch"] * raw["dp"]
    overrides = {
        "global_batch": batch,
        "ramp_up": [],
        "compile": "none",
        "evaluation": None,
        "initial_weights": None,
    }
    return parse_config(
        {
            **raw,
            "training": {**raw["training"], **overrides},
            "data": {**raw["data"], **SYNTHETIC},
            "num_microbatches": count,
            "checkpoint": NO_CHECKPOINT,
            "mlperf": None,
        }
    )


def trace(config: TrainerConfig, rank: int, size: int) -> dict[str, Any]:
    """What one rank's second step needs."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = World(rank, 0, size, torch.device("cpu"), "fake")
        mesh = make_mesh(world, config.layout, config.dp)
        with substitutes(as_cuda=config.device == "cuda"):
            return {
                "rank": rank,
                "torch": torch.__version__,
                "kernels": config.device,
                "num_microbatches": config.num_microbatches,
                **memory_of_step(replace(config, device="cpu"), world, mesh),
            }
    finally:
        dist.destroy_process_group()


def memory_of_step(config: TrainerConfig, world: World, mesh: Mesh) -> dict[str, Any]:
    """The memory record of the watched step, as far as it is of tensors."""
    (batch, masked), steps = first_batch(config, mesh), StepClock(HostClock())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        replica = make_replica(config, world, mesh, steps)
        memory = MemoryWatch(world.device)
        # A trace writes nothing: no step of it is a step of a run.
        trainer = Trainer(config, replica, world, steps, cast(EventLog, None), memory, masked)
        fake = LocalBatch(
            mode.from_tensor(batch.inputs),
            mode.from_tensor(batch.targets),
            batch.counted,
            tuple(mode.from_tensor(extra) for extra in batch.extras),
            batch.real_tokens,
        )
        # The first step is there for the optimizer's state, for which one micro-batch is enough.
        for step in (fake if mesh.pp.size > 1 else first_of(fake), fake):
            with memory.step(replica.parts, [trainer.optimizer]):
                trainer.step(step)
    record = memory.record()
    parts = {name: size for name, size in record["parts_bytes"].items() if name != "context"}
    return {
        "peak_bytes": record["peak_bytes"]["tracked"],
        "parts_bytes": parts,
        "at_peak_bytes": record["at_peak_bytes"],
    }


def first_of(batch: LocalBatch) -> LocalBatch:
    """The first micro-batch alone."""
    extras = tuple(extra[:1] for extra in batch.extras)
    inputs, targets = batch.inputs[:1], batch.targets[:1]
    return replace(batch, inputs=inputs, targets=targets, counted=targets.numel(), extras=extras)


def first_batch(config: TrainerConfig, mesh: Mesh) -> tuple[LocalBatch, bool]:
    """A batch as the run's first steps have it, and whether it masks targets."""
    corpus = load_corpus(config)
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, mesh, pin=False)
    try:
        return loader.next()[0], corpus.masked
    finally:
        loader.close()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except (ConfigError, NotImplementedError) as error:  # PyTorch's, for what it cannot follow
        sys.exit(f"memory_trace: {type(error).__name__}: {error}")
