"""One training from start to end, and what is written about every step."""

from __future__ import annotations

import gc
import math
import os
import platform
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from batches import Batch, Loader, Sampler
from clock import DeviceClock, HostClock, Lap, StepClock, watch_waits
from config import ConfigError, TrainerConfig, config_problems
from corpus import Corpus, load_corpus
from machine import cpu_name, keep_freed_memory
from model import Decoder
from optim import LossScaler, clip_factor, gradient_norm, make_optimizer, scale_gradients
from outcome import NotFiniteError
from parallel import DdpReplica, Replica, ShardedReplica, World, join_world
from record import SCHEMA, EventLog, resident_bytes
from weights import count_parameters, init_weights

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
STEPS_PER_COLLECTION = 100
"""Python's collector is off between these steps: its pauses would look like the machine's."""


def train(config: TrainerConfig, events: EventLog) -> None:
    """Run all steps and write the start line and one line a step.

    Raises ConfigError for what this trainer cannot do, NotFiniteError when loss or gradient is lost.
    """
    problems = config_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError("; ".join(problems))
    check_device(config.device)
    if config.device == "cpu":
        keep_freed_memory()
    world = join_world(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    corpus = load_corpus(config)
    sampler = Sampler(
        corpus.num_windows, config.training.global_batch, config.dp, config.training.seed
    )
    steps = StepClock(DeviceClock(world.device) if world.device.type == "cuda" else HostClock())
    undo = watch_waits(steps) if world.size > 1 else None
    trainer = Trainer(config, make_replica(config, world, steps), world, steps, events)
    loader = Loader(corpus, sampler, config, world.rank, pin=world.device.type == "cuda")
    try:
        trainer.run(loader, start_record(config, world, corpus, trainer.num_parameters))
    finally:
        loader.close()
        if undo is not None:
            undo()
    if world.size > 1:
        # A rank that went early would break the last collective of a slower one. The group itself is
        # left to the process's end: gloo's destructor can wait forever for a thread of its own.
        dist.barrier()


def check_device(kind: str) -> None:
    """Raise ConfigError when PyTorch cannot use such a device here."""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {kind}: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device cuda: PyTorch {torch.__version__} sees no usable GPU here")


def make_replica(config: TrainerConfig, world: World, steps: StepClock) -> Replica:
    """The model with its initial weights, spread over the world as the layout says.

    It is made without memory first: a wrong parameter count is found before anything is allocated.
    """
    layout, training = config.layout, config.training
    with torch.device("meta"):
        model = Decoder(config.model, training.seq_len, DTYPES[training.dtype], layout.recompute)
    if training.dtype == "fp64":
        model.double()
    found = count_parameters(model)
    if found != config.expected_parameters:
        raise ConfigError(
            f"expected_parameters {config.expected_parameters:,}: the model has {found:,} parameters"
        )
    sharded = world.size > 1 and layout.zero_stage >= 2
    replica = ShardedReplica(model, world, layout) if sharded else Replica(model)
    model.to_empty(device=world.device)
    init_weights(model, training.seed)
    if world.size > 1 and not sharded:
        replica = DdpReplica(model, world, steps)
    return replica


def start_record(
    config: TrainerConfig, world: World, corpus: Corpus, num_parameters: int
) -> dict[str, Any]:
    """What the start line says about the program, the machine and the model."""
    cuda = world.device.type == "cuda"
    return {
        "schema": SCHEMA,
        "rank": world.rank,
        "world_size": world.size,
        "local_rank": world.local_rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "time_unix": time.time(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "backend": world.backend,
        "device_name": torch.cuda.get_device_name(world.device) if cuda else cpu_name(),
        "num_parameters": num_parameters,
        "trainable_parameters": num_parameters,
        "layout": config.layout_record(),
        "dtype": config.training.dtype,
        "matmul_precision": config.training.matmul_precision,
        "threads": torch.get_num_threads(),
        "data": {
            "source": config.data.source,
            "path": config.data.path,
            "tokens": corpus.num_tokens,
            "windows": corpus.num_windows,
        },
    }


@dataclass(frozen=True)
class Pending:
    """A step whose figures may still be on their way from the device."""

    step: int
    lap: Lap
    loss_and_norm: Tensor
    data_wait_s: float
    skipped: bool


class Trainer:
    """The training loop and its records."""

    def __init__(
        self,
        config: TrainerConfig,
        replica: Replica,
        world: World,
        steps: StepClock,
        events: EventLog,
    ) -> None:
        self.config, self.replica, self.world = config, replica, world
        self.steps, self.events = steps, events
        self.num_parameters = count_parameters(replica.model)
        shard_state = world.size > 1 and config.layout.zero_stage == 1
        self.optimizer = make_optimizer(replica, config.training, shard_state)
        self.scaler = LossScaler() if config.training.dtype == "fp16" else None
        self._pending: deque[Pending] = deque()

    def run(self, loader: Loader, start: dict[str, Any]) -> None:
        """Write the start line and train all steps; the first step begins with that line."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self.events.write("start", **{**start, "time_unix": time.time()})
        self.steps.start()
        behind = self.steps.clock.steps_behind
        for step in range(1, self.config.training.steps + 1):
            batch, data_wait_s = loader.next()
            values, skipped = self.step(batch.to(self.world.device))
            self._pending.append(Pending(step, self.steps.lap(), values, data_wait_s, skipped))
            while len(self._pending) > behind:
                self._write(self._pending.popleft())
            if step % STEPS_PER_COLLECTION == 0:
                gc.collect()
        while self._pending:
            self._write(self._pending.popleft())

    def step(self, batch: Batch) -> tuple[Tensor, bool]:
        """Train one step; (this rank's loss and the global gradient norm, whether it was skipped).

        The mean loss over ranks is the reader's to compute: no collective is spent on it.
        """
        loss_scale = self.scaler.scale if self.scaler else 1.0
        scale = loss_scale / self.config.tokens_per_rank
        loss = torch.zeros((), device=self.world.device)
        last = len(batch.inputs) - 1
        for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
            loss = loss + self.replica.train(inputs, targets, scale, last=i == last)
        loss = loss / loss_scale
        norm, skipped = self._update(loss_scale)
        return torch.stack([loss, norm.to(loss.dtype)]).to("cpu", non_blocking=True), skipped

    def _update(self, loss_scale: float) -> tuple[Tensor, bool]:
        """Clip and apply the gradients; (their norm, whether an fp16 overflow skipped them)."""
        gradients = self.replica.gradients()
        norm = gradient_norm(gradients, self.replica.sharded)
        # fp16 alone asks the device at once: whether the step counts decides what runs next.
        accepted = self.scaler is None or self.scaler.accept(norm.item())
        norm = norm / loss_scale
        if accepted:
            factor = clip_factor(norm, self.config.training.grad_clip)
            scale_gradients(gradients, factor / loss_scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, not accepted

    def _write(self, done: Pending) -> None:
        """Write a step's line; raises NotFiniteError instead when its loss or gradient is lost."""
        step_time_s, comm_wait_s = self.steps.read(done.lap)
        loss, norm = done.loss_and_norm.tolist()
        self._check(done, loss, norm)
        training = self.config.training
        self.events.write(
            "step",
            step=done.step,
            loss=loss,
            grad_norm=norm,
            tokens=self.config.tokens_per_rank,
            samples=self.config.num_microbatches * self.config.layout.micro_batch,
            global_batch=training.global_batch,
            seq_len=training.seq_len,
            step_time_s=step_time_s,
            busy_time_s=step_time_s - comm_wait_s,
            comm_wait_s=comm_wait_s,
            data_wait_s=done.data_wait_s,
            memory_bytes=self._memory_bytes(),
            **({"skipped": True} if done.skipped else {}),
        )

    def _check(self, done: Pending, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss became {loss} in step {done.step}")
        if done.skipped:
            if self.scaler is not None and self.scaler.scale < 1:
                raise NotFiniteError(
                    f"the gradient overflows fp16 even unscaled in step {done.step}"
                )
        elif not math.isfinite(norm):
            raise NotFiniteError(f"the gradient's norm became {norm} in step {done.step}")

    def _memory_bytes(self) -> dict[str, int | None]:
        """Peaks so far: allocated and reserved by PyTorch on CUDA, resident on the host."""
        cuda = self.world.device.type == "cuda"
        return {
            "allocated": torch.cuda.max_memory_allocated(self.world.device) if cuda else None,
            "reserved": torch.cuda.max_memory_reserved(self.world.device) if cuda else None,
            "resident": resident_bytes(),
        }
