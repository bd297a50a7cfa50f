"""One training from start to end, and what is written about every step."""

from __future__ import annotations

import gc
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from batches import Batch, Loader, Sampler
from clock import DeviceClock, HostClock, Lap, StepClock, watch_waits
from collectives import sum_over
from config import ConfigError, TrainerConfig, config_problems
from corpus import Corpus, load_corpus
from heartbeat import Heartbeat
from limits import limit_memory
from machine import cpu_name, keep_freed_memory
from memory import MemoryWatch
from mesh import Mesh, World, join_world, make_mesh
from model import Decoder, Part, Setting
from optim import LossScaler, clip_factor, make_optimizer, scale_gradients
from outcome import CheckpointError, NotFiniteError
from parallel import DdpReplica, PipelineReplica, Replica, ShardedReplica, compile_blocks
from record import SCHEMA, EventLog, resident_bytes
from stages import stage_layers, stages_of
from tensor import Region, cut_parameters
from weights import count_parameters, init_weights

if TYPE_CHECKING:
    from checkpoint import Checkpoints

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
STEPS_PER_COLLECTION = 100
"""Python's collector is off between these steps: its pauses would look like the machine's."""


def train(config: TrainerConfig, events: EventLog, heartbeat: Heartbeat) -> None:
    """Run all steps and write the start line and one line a step.

    Raises ConfigError for what this trainer cannot do, NotFiniteError when loss or gradient is lost.
    """
    problems = config_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError("; ".join(problems))
    check_device(config.device)
    if config.device == "cpu":
        keep_freed_memory()
    heartbeat.beat("while the ranks join", waits=True)
    world = join_world(config.device)
    mesh = make_mesh(world, config.layout, config.dp)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.training.matmul_precision)
    memory = MemoryWatch(
        world.device,
        config.memory_parts,
        untracked(config),
        limited=config.memory_limit_bytes is not None,
    )
    corpus = load_corpus(config)
    sampler = Sampler(
        corpus.num_windows, config.training.global_batch, config.dp, config.training.seed
    )
    limit_memory(config.memory_limit_bytes, config.device)
    heartbeat.beat("while the model is made")
    steps = StepClock(DeviceClock(world.device) if world.device.type == "cuda" else HostClock())
    undo = watch_waits(steps) if world.size > 1 else None
    replica = make_replica(config, world, mesh, steps)
    heartbeat.follow(steps, replica.parts)
    trainer = Trainer(config, replica, world, steps, events, memory)
    done = trainer.restore(corpus.num_windows, heartbeat.paused)
    loader = Loader(corpus, sampler, config, mesh, pin=world.device.type == "cuda", first=done)
    try:
        trainer.run(loader, start_record(config, world, mesh, corpus), done)
    except NotFiniteError:
        with suppress(CheckpointError):
            trainer.finish_checkpoint()
        raise
    finally:
        loader.close()
        if undo is not None:
            undo()
    if world.size > 1:
        # A rank that went early would break the last collective of a slower one. The group itself is
        # left to the process's end: gloo's destructor can wait forever for a thread of its own.
        heartbeat.beat("at the end", waits=True)
        dist.barrier()


def untracked(config: TrainerConfig) -> str | None:
    """Why the tensors of a CPU step cannot be followed, None when they can."""
    if config.training.compile != "none":
        return "compiled blocks allocate where torch's memory tracker does not look"
    return None


def check_device(kind: str) -> None:
    """Raise ConfigError when PyTorch cannot use such a device here."""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {kind}: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device cuda: PyTorch {torch.__version__} sees no usable GPU here")


def make_replica(config: TrainerConfig, world: World, mesh: Mesh, steps: StepClock) -> Replica:
    """The model with its initial weights, spread over the world as the layout says.

    It is made without memory first: a wrong parameter count is found before anything is allocated.
    """
    layout, setting = config.layout, setting_of(config, mesh)
    with torch.device("meta"):
        whole = Decoder(config.model, setting)
        parts = [Decoder(config.model, setting, part) for part in parts_of(config, mesh)]
    found = count_parameters(whole)
    if found != config.expected_parameters:
        raise ConfigError(
            f"expected_parameters {config.expected_parameters:,}: the model has {found:,} parameters"
        )
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    sharded = mesh.data.size > 1 and layout.zero_stage >= 2
    for part in parts:
        if setting.dtype == torch.float64:
            part.double()
        cut_parameters(part, mesh.tp, mesh.states["tp"] if sharded and mesh.states else None)
        if config.training.compile == "blocks":
            compile_blocks(part)
    replica = ShardedReplica(parts, mesh, layout.zero_stage) if sharded else Replica(parts, mesh)
    for part in parts:
        part.to_empty(device=world.device)
        init_weights(part, shapes, config.training.seed, mesh)
    if mesh.pp.size > 1:
        # Its package takes a second to import, which only pipelines should pay.
        from pipeline import PipelineRunner

        runner = PipelineRunner(parts, mesh.pp, config, world.device)
        return PipelineReplica(parts, mesh, runner, sharded)
    if mesh.data.size > 1 and not sharded:
        return DdpReplica(parts, mesh, world, steps)
    return replica


def setting_of(config: TrainerConfig, mesh: Mesh) -> Setting:
    """How this rank's decoder computes."""
    layout = config.layout
    return Setting(
        seq_len=config.training.seq_len,
        dtype=DTYPES[config.training.dtype],
        recompute=layout.recompute,
        region=Region(mesh.tp, layout.sequence_parallel),
        cp=mesh.cp,
        cp_exchange=layout.cp_exchange,
    )


def parts_of(config: TrainerConfig, mesh: Mesh) -> list[Part]:
    """The pipeline stages that this rank holds."""
    if mesh.pp.size == 1:
        return [Part(range(config.model.num_layers))]
    pp, vp = mesh.pp, config.layout.vp
    layers = stage_layers(config.model.num_layers, pp.size, vp)
    last = pp.size * vp - 1
    return [
        Part(layers[stage], first=stage == 0, last=stage == last)
        for stage in stages_of(pp.index, pp.size, vp)
    ]


def start_record(config: TrainerConfig, world: World, mesh: Mesh, corpus: Corpus) -> dict[str, Any]:
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
        "num_parameters": config.expected_parameters,
        "trainable_parameters": config.expected_parameters,
        "layout": {**config.layout_record(), "coordinates": mesh.coordinates},
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
    tracked: bool
    checkpoint_s: float | None
    """How long the step waited for its checkpoint, None without one."""


class Trainer:
    """The training loop and its records."""

    def __init__(
        self,
        config: TrainerConfig,
        replica: Replica,
        world: World,
        steps: StepClock,
        events: EventLog,
        memory: MemoryWatch | None = None,
    ) -> None:
        self.memory = memory or MemoryWatch(world.device, parts=False)
        self.config, self.replica, self.world = config, replica, world
        self.steps, self.events = steps, events
        self.masked = False
        """Whether ranks may count different numbers of targets."""
        data = replica.mesh.data
        shard_state = data if data.size > 1 and config.layout.zero_stage == 1 else None
        self.optimizer = make_optimizer(replica, config.training, shard_state)
        self.scaler = LossScaler() if config.training.dtype == "fp16" else None
        self.checkpoints: Checkpoints | None = None
        self._pending: deque[Pending] = deque()

    def restore(
        self, num_windows: int | None, paused: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """Get ready for checkpoints, and load one if asked to; the steps it has behind it."""
        wanted = self.config.checkpoint
        if wanted.every is None and wanted.resume is None:
            return 0
        from checkpoint import Checkpoints  # takes 0.1 s

        self.checkpoints = Checkpoints(
            self.config, self.replica, self.optimizer, self.scaler, self.world, num_windows, paused
        )
        return self.checkpoints.restore()

    def run(self, loader: Loader, start: dict[str, Any], done: int = 0) -> None:
        """Write the start line and train the steps after `done`; the first begins with that line."""
        gc.collect()
        gc.freeze()
        gc.disable()
        first = {"first_step": done + 1, "time_unix": time.time()}
        self.events.write("start", **{**start, **first})
        self.steps.start(done + 1)
        behind = self.steps.clock.steps_behind
        for step in range(done + 1, self.config.training.steps + 1):
            batch, data_wait_s = loader.next()
            with self.memory.step(self.replica.parts, [self.optimizer]) as tracked:
                values, skipped = self.step(batch.to(self.world.device))
            if tracked:
                self.events.write("memory", step=step, **self.memory.record())
            checkpoint_s = self._save(step, values, skipped)
            lap = self.steps.lap()
            self._pending.append(
                Pending(step, lap, values, data_wait_s, skipped, tracked, checkpoint_s)
            )
            while len(self._pending) > behind:
                self._write(self._pending.popleft())
            if step % STEPS_PER_COLLECTION == 0:
                gc.collect()
        while self._pending:
            self._write(self._pending.popleft())
        self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Return when the last checkpoint is written; raises CheckpointError when it cannot be."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def _save(self, step: int, values: Tensor, skipped: bool) -> float | None:
        """Save a checkpoint if one is due; how long that kept the training waiting."""
        if self.checkpoints is None or not self.checkpoints.due(step):
            return None
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        start = time.perf_counter()
        # Every rank knows the same norm. Lost weights end the training when the step is written.
        if skipped or math.isfinite(values[1].item()):
            self.checkpoints.save(step)
        return time.perf_counter() - start

    def step(self, batch: Batch) -> tuple[Tensor, bool]:
        """Train one step; (this rank's loss and the global gradient norm, whether it was skipped).

        Ranks average gradients, so the sum of a rank's losses is divided by the mean count of
        targets: the result is the mean over all targets. The mean loss over ranks is the reader's
        to compute, which costs no collective.
        """
        loss_scale = self.scaler.scale if self.scaler else 1.0
        loss = self.replica.train(batch, loss_scale / self._mean_count(batch))
        norm, loss = self.replica.norm_and_loss(loss)
        norm, skipped = self._update(norm, loss_scale)
        return torch.stack([loss / loss_scale, norm]).to("cpu", non_blocking=True), skipped

    def _mean_count(self, batch: Batch) -> float:
        data = self.replica.mesh.data
        if not self.masked or data.size == 1:
            return batch.counted
        count = torch.tensor(batch.counted, dtype=torch.float64, device=self.world.device)
        return sum_over(count, data).item() / data.size

    def _update(self, norm: Tensor, loss_scale: float) -> tuple[Tensor, bool]:
        """Clip and apply the gradients; (their norm, whether an fp16 overflow skipped them)."""
        # fp16 alone asks the device at once: whether the step counts decides what runs next.
        accepted = self.scaler is None or self.scaler.accept(norm.item())
        norm = norm / loss_scale
        if accepted:
            factor = clip_factor(norm, self.config.training.grad_clip)
            scale_gradients(self.replica.gradients(), factor / loss_scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, not accepted

    def _write(self, done: Pending) -> None:
        """Write a step's line; raises NotFiniteError instead when its loss or gradient is lost."""
        step_time_s, comm_wait_s = self.steps.read(done.lap)
        loss, norm = done.loss_and_norm.tolist()
        self._check(done, loss, norm)
        training, mesh = self.config.training, self.replica.mesh
        peers = mesh.tp.size * mesh.pp.size * mesh.cp.size
        share = self.config.num_microbatches * self.config.layout.micro_batch / peers
        self.events.write(
            "step",
            step=done.step,
            loss=loss,
            grad_norm=norm,
            tokens=share * training.seq_len,
            samples=share,
            global_batch=training.global_batch,
            seq_len=training.seq_len,
            step_time_s=step_time_s,
            busy_time_s=step_time_s - comm_wait_s - (done.checkpoint_s or 0.0),
            comm_wait_s=comm_wait_s,
            data_wait_s=done.data_wait_s,
            memory_bytes=self._memory_bytes(),
            **({"skipped": True} if done.skipped else {}),
            **({"tracked": True} if done.tracked else {}),
            **({} if done.checkpoint_s is None else {"checkpoint_s": done.checkpoint_s}),
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
        """Peaks so far: PyTorch's and the device's on CUDA, resident on the host."""
        return {**self.memory.peaks(), "resident": resident_bytes()}
