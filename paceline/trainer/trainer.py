"""The training loop and its step records."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.trainer.config import MESH_AXES, TrainerConfig
from paceline.trainer.data.batches import Loader, LocalBatch
from paceline.trainer.evaluation import Quality, evaluation_plan
from paceline.trainer.measure.clock import Lap, StepClock
from paceline.trainer.measure.event_log import EventLog, resident_bytes
from paceline.trainer.measure.machine import CoreUse
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.measure.outcome import NotFiniteError
from paceline.trainer.measure.profiler import DATA, UPDATE, Profiler
from paceline.trainer.optim import LossScaler, clip_factor, make_optimizer, scale_gradients
from paceline.trainer.parallel.collectives import all_reduce
from paceline.trainer.parallel.mesh import World
from paceline.trainer.replica.replica import Replica
from paceline.trainer.schedule import LearningRate, set_learning_rate

if TYPE_CHECKING:
    from paceline.trainer.checkpoint import Checkpoints
    from paceline.trainer.evaluation import Evaluator
    from paceline.trainer.measure.mllog import MlperfRun

STEPS_PER_COLLECTION = 100
"""Interval of Python's garbage collection, which is off otherwise so that steps have no pauses."""


@dataclass(frozen=True)
class Pending:
    """A step whose values may not have arrived from the device yet."""

    step: int
    lap: Lap
    values: Tensor
    """This rank's loss, the gradient norm, and this rank's MTP loss if it has any."""
    samples: int
    """Samples of this rank's replica; each of its ranks reports an equal share."""
    real_tokens: int
    attended_share: float | None
    data_wait_s: float
    skipped: bool
    tracked: bool
    checkpoint_s: float | None
    """Time that the step waited for its checkpoint; None without one."""
    load: tuple[list[int], Tensor] | None
    """Layers with experts, and the load of each expert; see `Replica.expert_load`."""
    cores: dict[str, float]
    """CPU time of this process during the step; see `CoreUse`."""


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
        masked: bool = False,
        profiler: Profiler | None = None,
    ) -> None:
        """Set up the optimizer; `masked` if ranks may have different numbers of valid targets."""
        self.profiler = profiler or Profiler()
        self.memory = memory or MemoryWatch(world.device, parts=False)
        self.config, self.replica, self.world = config, replica, world
        self.steps, self.events = steps, events
        self.masked = masked
        data = replica.mesh.data
        shard_state = data if data.size > 1 and config.layout.zero_stage == 1 else None
        self.adapter_lr = config.lora.lr if config.lora else None
        self.optimizer = make_optimizer(replica, config.training, shard_state, self.adapter_lr)
        self.rate = LearningRate(config.training)
        fp16 = config.training.dtype == "fp16"
        self.scaler = LossScaler(config.training.loss_scale) if fp16 else None
        self.checkpoints: Checkpoints | None = None
        self._pending: deque[Pending] = deque()
        self._quality: Quality | None = None
        self._load: tuple[list[int], Tensor] | None = None

    def watch_quality(self, evaluator: Evaluator, timed_run: MlperfRun) -> None:
        """Evaluate at the configured steps, and end the training when the target is reached."""
        plan = evaluation_plan(self.config)
        assert plan is not None, "the caller has an evaluator"
        has_target = self.config.data.source != "synthetic"
        self._quality = Quality(plan, evaluator.loss, has_target, self.events, timed_run)

    def restore(
        self, num_windows: int | None, pause_watchdog: Callable[[], AbstractContextManager[None]]
    ) -> int:
        """Set up checkpoints, load one if configured, and return the number of completed steps."""
        settings = self.config.checkpoint
        if settings.every is None and settings.resume is None:
            return 0
        from paceline.trainer.checkpoint import Checkpoints  # takes 0.1 s

        self.checkpoints = Checkpoints(
            config=self.config,
            replica=self.replica,
            optimizer=self.optimizer,
            scaler=self.scaler,
            world=self.world,
            num_windows=num_windows,
            pause_watchdog=pause_watchdog,
        )
        return self.checkpoints.restore()

    def run(self, loader: Loader, start: dict[str, Any], steps_done: int = 0) -> bool | None:
        """Write the start line and train the steps after the first `steps_done`.

        Return whether the target was reached; None without a target.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        first = {
            "first_step": steps_done + 1,
            "time_unix": time.time(),
            "monotonic_s": time.monotonic(),
        }
        self.events.write("start", **{**start, **first})
        cores = CoreUse()
        self.steps.start(steps_done + 1)
        behind = self.steps.clock.steps_behind
        for step in range(steps_done + 1, self.config.training.steps + 1):
            self.profiler.before_step(step)
            with self.profiler.range(DATA):
                batch, data_wait_s = loader.next()
            set_learning_rate(self.optimizer, self.rate.at(step - 1))
            with self.memory.step(self.replica.parts, [self.optimizer]) as is_tracked:
                values, skipped = self.step(batch.to(self.world.device))
            if is_tracked:
                self.events.write("memory", step=step, **self.memory.record())
            checkpoint_s = self._save(step, values, skipped)
            self.profiler.end_step(step)
            lap = self.steps.lap()
            self.profiler.after_step(step)
            self._pending.append(
                Pending(
                    step=step,
                    lap=lap,
                    values=values,
                    samples=batch.samples,
                    real_tokens=batch.real_tokens,
                    attended_share=batch.attended_share,
                    data_wait_s=data_wait_s,
                    skipped=skipped,
                    tracked=is_tracked,
                    checkpoint_s=checkpoint_s,
                    load=self._load,
                    cores=cores.lap(),
                )
            )
            while len(self._pending) > behind:
                self._write(self._pending.popleft())
            if step % STEPS_PER_COLLECTION == 0:
                gc.collect()
            if self._quality is not None and self._quality.plan.due(step):
                self._write_pending()
                if self._quality.evaluate(step):
                    break
                cores.lap()
                self.steps.start(step + 1)
        self._write_pending()
        target_reached = (
            self._quality.stop(self.steps.steps_done + steps_done) if self._quality else None
        )
        self.finish_checkpoint()
        return target_reached

    def _write_pending(self) -> None:
        """Write the records of all pending steps."""
        while self._pending:
            self._write(self._pending.popleft())

    def finish_checkpoint(self) -> None:
        """Wait for the last checkpoint; raise CheckpointError if it cannot be written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def _save(self, step: int, values: Tensor, skipped: bool) -> float | None:
        """Save a checkpoint if one is due; return the seconds that the training waited."""
        if self.checkpoints is None or not self.checkpoints.due(step):
            return None
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        start = time.perf_counter()
        # The norm is equal on all ranks. NaN weights end the training when the step is recorded.
        if skipped or math.isfinite(values[1].item()):
            self.checkpoints.save(step)
        return time.perf_counter() - start

    def step(self, batch: LocalBatch) -> tuple[Tensor, bool]:
        """Train one step; return (loss, gradient norm and MTP loss, if skipped).

        Ranks average gradients, so each divides its summed loss by the mean count of targets per
        rank. The result is the gradient of the mean over all targets. The reader of the logs
        averages the loss over ranks, which saves a collective.
        """
        loss_scale = self.scaler.scale if self.scaler else 1.0
        loss = self.replica.train(batch, loss_scale / self._mean_count(batch))
        norm, loss = self.replica.norm_and_loss(loss)
        mtp_loss = self.replica.take_mtp_loss()
        load = self.replica.expert_load()
        self.replica.update_choice_biases(load)
        self._load = load and (load[0], load[1].to("cpu", non_blocking=True))
        with self.profiler.range(UPDATE):
            norm, skipped = self._update(norm, loss_scale)
        values = [loss / loss_scale, norm]
        values += [] if mtp_loss is None else [mtp_loss.to(norm) / loss_scale]
        return torch.stack(values).to("cpu", non_blocking=True), skipped

    def _mean_count(self, batch: LocalBatch) -> float:
        mesh = self.replica.mesh
        if not self.masked:
            assert batch.num_valid_targets == batch.targets.numel(), "the corpus must set `masked`"
            return batch.num_valid_targets
        if mesh.data.size == 1:
            return max(float(batch.num_valid_targets), 1.0)  # avoids synchronizing with the device
        count = torch.tensor(batch.num_valid_targets, dtype=torch.float64, device=self.world.device)
        total = all_reduce(all_reduce(count, mesh.shard), mesh.replicate)
        return max(total.item(), 1.0) / mesh.data.size

    def _update(self, norm: Tensor, loss_scale: float) -> tuple[Tensor, bool]:
        """Clip and apply the gradients; return (their norm, whether fp16 overflow skipped them)."""
        # Only fp16 synchronizes with the device here, to decide whether to skip the step.
        is_applied = self.scaler is None or self.scaler.accept(norm.item())
        norm = norm / loss_scale
        if is_applied:
            factor = clip_factor(norm, self.config.training.grad_clip)
            scale_gradients(self.replica.gradients(), factor / loss_scale)
            self.optimizer.step()
        self.replica.zero_grad()
        return norm, not is_applied

    def _write(self, entry: Pending) -> None:
        """Write a step's record; raise NotFiniteError when its loss or gradient is not finite."""
        step_time_s, comm_wait_s = self.steps.read(entry.lap)
        loss, norm, *mtp_loss = entry.values.tolist()
        self._check(entry, loss, norm)
        training, mesh = self.config.training, self.replica.mesh
        peers = math.prod(getattr(mesh, axis).size for axis in MESH_AXES if axis != "dp")
        self.events.write(
            "step",
            step=entry.step,
            loss=loss,
            grad_norm=norm,
            **({"mtp_loss": mtp_loss[0]} if mtp_loss else {}),
            **self._rates(entry.step),
            tokens=entry.real_tokens / peers,
            samples=entry.samples / peers,
            global_batch=entry.samples * mesh.dp.size,
            seq_len=training.seq_len,
            step_time_s=step_time_s,
            busy_time_s=step_time_s - comm_wait_s - (entry.checkpoint_s or 0.0),
            comm_wait_s=comm_wait_s,
            **self.steps.span_seconds(entry.lap),
            data_wait_s=entry.data_wait_s,
            memory_bytes=self._memory_bytes(),
            cores=entry.cores,
            **({} if entry.load is None else {"routing": load_record(*entry.load, mesh.ep.size)}),
            **({} if entry.attended_share is None else {"attended_share": entry.attended_share}),
            **({"skipped": True} if entry.skipped else {}),
            **({"tracked": True} if entry.tracked else {}),
            **({"profiled": True} if self.profiler.is_profiled(entry.step) else {}),
            **({} if entry.checkpoint_s is None else {"checkpoint_s": entry.checkpoint_s}),
        )

    def _rates(self, step: int) -> dict[str, float]:
        """Return the learning rates of a step (from 1)."""
        rate = self.rate.at(step - 1)
        if self.adapter_lr is None:
            return {"lr": rate}
        return {"lr": rate, "lora_lr": rate * self.adapter_lr / self.rate.max_lr}

    def _check(self, entry: Pending, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss became {loss} in step {entry.step}")
        if entry.skipped:
            if self.scaler is not None and self.scaler.scale < 1:
                raise NotFiniteError(
                    f"the gradient overflows fp16 even unscaled in step {entry.step}"
                )
        elif not math.isfinite(norm):
            raise NotFiniteError(f"the gradient's norm became {norm} in step {entry.step}")

    def _memory_bytes(self) -> dict[str, int | None]:
        """Return peak memory so far: PyTorch's and the device's on CUDA, and resident memory."""
        return {**self.memory.peaks(), "resident": resident_bytes()}


def load_record(layers: list[int], rows: Tensor, ep: int = 1) -> dict[str, Any]:
    """Return how the rows (L, E) of a step are spread over the experts of each layer.

    The overload factor is the largest load over the mean load. The coefficient of variation is the
    standard deviation over the mean. A dead expert has no rows. With `ep` above 1, the overload
    factor of expert ranks is the largest load of a rank's experts over the mean load of ranks.
    """
    loads = rows.double()
    mean = loads.mean(1)
    return {
        "experts": rows.shape[1],
        "layers": layers,
        "overload": (loads.amax(1) / mean).tolist(),
        "variation": (loads.std(1, correction=0) / mean).tolist(),
        "dead": (rows == 0).sum(1).tolist(),
        **({"rank_overload": _rank_overload(loads, ep)} if ep > 1 else {}),
    }


def _rank_overload(loads: Tensor, ep: int) -> list[float]:
    """Return the overload factor of expert ranks, by layer, of loads (L, E)."""
    ranks = loads.unflatten(1, (ep, -1)).sum(2)  # (L, ep)
    return (ranks.amax(1) / ranks.mean(1)).tolist()
