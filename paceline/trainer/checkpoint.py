"""Sharded checkpoints: every rank writes its part, and a training in any layout can resume.

checkpoints/step-000040/   a complete checkpoint: state.json, .metadata, and files of the ranks
checkpoints/.step-000060/  an incomplete one, being written or left by an interrupted training
checkpoints/latest         the name of the last complete checkpoint

torch.distributed.checkpoint (DCP) reshards tensors for the layout that loads them. Unsharded state
is in state.json. All ranks must see the same folder. A checkpoint is renamed to its final name when
every rank's part is on the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from paceline.trainer.checkpoint_reader import CheckpointReader
from paceline.trainer.checkpoint_tensors import init_optimizer_state, state_tensors
from paceline.trainer.config import ConfigError, TrainerConfig
from paceline.trainer.measure.clock import background
from paceline.trainer.measure.outcome import CheckpointError
from paceline.trainer.model.dropout import restore_rng_states, rng_states
from paceline.trainer.optim import LossScaler
from paceline.trainer.parallel.mesh import World
from paceline.trainer.replica.replica import Replica

SCHEMA = 1
FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
MAX_CHECKPOINTS = 2
"""Number of checkpoints on the disk; older ones are deleted."""
DATA_FIELDS = ("source", "packing", "loss_on", "split", "split_part")
"""Fields of `data` that must be equal when a training resumes."""
RESUME = "checkpoint.resume"
MAX_WRITE_TIME = timedelta(hours=6)
"""Maximum wait for the other ranks' files."""
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""PyTorch's environment variable; it has no argument for this."""
REMEDIES = {
    "padded_vocab": "the vocabulary is padded to a multiple of vocab_multiple x tp, so change "
    "vocab_multiple to keep it",
}


class Checkpoints:
    """Saves and restores one training; the watchdog counts no time inside `pause_watchdog`."""

    def __init__(
        self,
        config: TrainerConfig,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None,
        world: World,
        num_windows: int | None,
        pause_watchdog: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.config, self.replica, self.optimizer = config, replica, optimizer
        self.scaler, self.world, self.pause_watchdog = scaler, world, pause_watchdog
        self._fingerprint = {
            "model": asdict(config.model),
            "training": {
                name: getattr(config.training, name)
                for name in ("seed", "global_batch", "seq_len", "ramp_up")
            },
            "data": {
                "windows": num_windows,
                "masked": config.data.loss_mask is not None,
                **{name: getattr(config.data, name) for name in DATA_FIELDS},
            },
        }
        self._group = make_group() if world.size > 1 else None
        self._writing: tuple[Writer, Future[Metadata]] | None = None
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def restore(self) -> int:
        """Load the checkpoint of `checkpoint.resume`; return its step, 0 without one.

        Raise ConfigError when it is missing, corrupt, or from another training.
        """
        resume = self.config.checkpoint.resume
        if resume is None:
            return 0
        with self.pause_watchdog():
            folder, state = self._find_on_rank0(Path(resume))
            init_optimizer_state(self.optimizer)
            reader = CheckpointReader(folder)
            try:
                self._load(state_tensors(self.replica, self.optimizer, to_save=False), reader)
                self._resume_random(reader, state)
            except CheckpointException as error:
                raise ConfigError(
                    f"{label(folder)}: is corrupt: {failure_reason(error)}; resume from another "
                    "checkpoint"
                ) from error
        if self.scaler is not None and state["loss_scale"] is not None:
            self.scaler.restore(state["loss_scale"])
        return int(state["step"])

    def _load(self, state: dict[str, Tensor], reader: CheckpointReader) -> None:
        group = self._group
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint follows a step."""
        every = self.config.checkpoint.every
        return every is not None and (step % every == 0 or step == self.config.training.steps)

    def save(self, step: int) -> None:
        """Save the state after a step, once the previous checkpoint is complete.

        An asynchronous save returns when the state is copied. Raise CheckpointError when this
        checkpoint or the previous one cannot be written.
        """
        self.wait()
        init_optimizer_state(self.optimizer)
        state = {
            "schema": SCHEMA,
            "step": step,
            "steps": self.config.training.steps,
            "loss_scale": self.scaler.state() if self.scaler else None,
            **self._fingerprint,
            "lora": asdict(self.config.lora) if self.config.lora else None,
            "layout": self.config.layout_record(),
            "torch": torch.__version__,
            "time_unix": time.time(),
        }
        writer = Writer(Path(FOLDER).absolute(), state)
        arguments: dict[str, Any] = {
            "state_dict": state_tensors(self.replica, self.optimizer, to_save=True)
            | self._random(),
            "storage_writer": writer,
            # All saves share the first one's plan, so it is exchanged only once.
            "planner": DefaultSavePlanner(enable_plan_caching=True),
            "process_group": self._group,
            "no_dist": self._group is None,
        }
        with self.pause_watchdog():
            if not self.config.checkpoint.asynchronous:
                self._finish(writer, lambda: save(**arguments))
                return
            future = async_save(**arguments)
            assert isinstance(future, Future)
            self._writing = writer, future

    def wait(self) -> None:
        """Wait for the last checkpoint; raise CheckpointError if it cannot be written."""
        if self._writing is None:
            return
        (writer, future), self._writing = self._writing, None
        with self.pause_watchdog():
            self._finish(writer, future.result)

    def _random(self) -> dict[str, Tensor]:
        """Return this rank's generator states by key; empty if the training uses no dropout."""
        if not self.config.uses_dropout:
            return {}
        states = rng_states(self.world.device)
        return {f"random/{kind}/{self.world.rank:05d}": state for kind, state in states.items()}

    def _resume_random(self, reader: CheckpointReader, state: dict[str, Any]) -> None:
        """Restore the random number generators, unless the layout has changed."""
        to_save, layout = self._random(), json.loads(json.dumps(self.config.layout_record()))
        if not to_save or state["layout"] != layout:
            return
        if to_save.keys() <= reader.read_metadata().state_dict_metadata.keys():
            self._load(to_save, reader)
            kinds = {key.split("/")[1]: value for key, value in to_save.items()}
            restore_rng_states(kinds, self.world.device)

    def _finish(self, writer: Writer, finish: Callable[[], Any]) -> None:
        try:
            finish()
        except CheckpointException as error:
            if self.world.rank == 0:
                shutil.rmtree(writer.incomplete, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {writer.complete}: cannot be written: {failure_reason(error)}"
            ) from error
        finally:
            background.active = False

    def _find_on_rank0(self, resume: Path) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint that rank 0 finds and its state.json, or raise its ConfigError."""
        outcome: list[Any] = [None]
        if self.world.rank == 0:
            try:
                folder = find_checkpoint(resume)
                outcome = [(folder, self._read_compatible_state(folder))]
            except ConfigError as error:
                outcome = [error]
            except OSError as error:
                outcome = [ConfigError(f"{label(resume)}: cannot be read: {error.strerror}")]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], ConfigError):
            raise outcome[0]
        return outcome[0]

    def _read_compatible_state(self, folder: Path) -> dict[str, Any]:
        """Return a checkpoint's state.json; raise ConfigError when this training cannot resume."""
        state, steps = read_state(folder), self.config.training.steps
        for part, values in json.loads(json.dumps(self._fingerprint)).items():
            for name, value in values.items():
                # The number of windows depends on the steps, because no more text is read.
                longer = name == "windows" and state["steps"] != steps
                if state[part].get(name, value) != value and not longer:
                    raise ConfigError(
                        f"{label(folder)}: {part}.{name} is {state[part][name]} in the checkpoint, "
                        f"but {value} in this run; {REMEDIES.get(name, 'use the same value')}"
                    )
        if state["step"] >= steps:
            raise ConfigError(
                f"{label(folder)}: was saved after step {state['step']}, but training.steps {steps}"
                " includes those steps; set more steps"
            )
        return state


class Writer(FileSystemWriter):
    """Writes to `incomplete`, which is renamed to `complete` when all ranks have written."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        name = f"step-{state['step']:06d}"
        self.folder, self.state = folder, state
        self.incomplete, self.complete = folder / f".{name}", folder / name
        super().__init__(self.incomplete)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to CPU memory; DCP's own copy fails for a rank with an empty shard."""
        self.per_thread_copy_ahead = 0  # disables copying from a GPU while writing
        return {key: tensor.to("cpu", copy=True) for key, tensor in state_dict.items()}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Mark the writing thread before its first communication with other ranks."""
        background.active = True
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove incomplete checkpoints of earlier trainings (on rank 0, before any write)."""
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)
        self.incomplete.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write this rank's part; raise the OSError of a full disk, not torch.save's next error."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            root = error.__context__
            while root is not None and not isinstance(root, OSError):
                root = root.__context__
            raise root or error from None

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Rename the complete checkpoint and delete old ones (on rank 0, after all writes)."""
        super().finish(metadata, results)
        write_synced(self.incomplete / STATE, json.dumps(self.state, indent=2) + "\n")
        sync(self.incomplete)
        if self.complete.exists():
            self.complete.rename(self.folder / f".{self.complete.name}.replaced")
        self.incomplete.rename(self.complete)
        marker = self.folder / f".{LATEST}"
        write_synced(marker, self.complete.name + "\n")
        marker.rename(self.folder / LATEST)
        sync(self.folder)
        checkpoints = [file.parent for file in self.folder.glob(f"step-*/{STATE}")]
        checkpoints.sort(key=lambda path: (path / STATE).stat().st_mtime_ns)
        for old in checkpoints[:-MAX_CHECKPOINTS]:
            # Rename before deletion, so that an interrupted deletion leaves no valid name.
            old.rename(self.folder / f".{old.name}.old")
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)


def make_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks for DCP, whose ranks connect on first use.

    Saving runs concurrently with the training's collectives, so it needs its own group; its data is
    in CPU memory, so it uses gloo. By default gloo connects every pair of ranks, but all of DCP's
    communication goes through rank 0.
    """
    previous = os.environ.get(LAZY_GLOO)
    os.environ[LAZY_GLOO] = "1"
    try:
        group = dist.new_group(backend="gloo", timeout=MAX_WRITE_TIME)
    finally:
        os.environ.pop(LAZY_GLOO)
        if previous is not None:
            os.environ[LAZY_GLOO] = previous
    assert isinstance(group, dist.ProcessGroup)
    return group


def find_checkpoint(path: Path, field: str = RESUME) -> Path:
    """Return the checkpoint at a path, or the latest one of a run or of a checkpoints folder.

    Raise ConfigError when there is none.
    """
    for folder in (path, path / FOLDER):
        if (folder / STATE).is_file():
            return folder
        if (folder / LATEST).is_file():
            return folder / Path((folder / LATEST).read_text().strip()).name
    problem = "has no complete checkpoint" if path.exists() else "is missing"
    raise ConfigError(
        f"{field} {path}: {problem}; set it to a run's folder or to a {FOLDER}/step-... in one"
    )


def read_state(folder: Path, field: str = RESUME) -> dict[str, Any]:
    """Return a checkpoint's state.json; raise ConfigError when it is invalid or outdated."""
    try:
        state = json.loads((folder / STATE).read_text())
        parts = [state[name] for name in ("model", "training", "data")]
        scale = state["loss_scale"]
        valid = state["schema"] == SCHEMA and 0 < state["step"] <= state["steps"]
        valid = valid and all(isinstance(part, dict) for part in parts)
        valid = valid and (scale is None or math.isfinite(scale["scale"] + scale["good"]))
    except (ValueError, KeyError, TypeError):
        valid, state = False, {}
    if not valid:
        raise ConfigError(
            f"{field} {folder}: {STATE} is corrupt or has another version; resume from another "
            "checkpoint"
        )
    return state


def label(path: Path) -> str:
    """Return the start of an error message about a resumed checkpoint."""
    return f"{RESUME} {path}"


def failure_reason(error: CheckpointException) -> str:
    """Return the first failing rank and its reason; DCP's own text is a stack trace."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    text = str(reason)
    if isinstance(reason, OSError) and reason.strerror:
        text = f"{reason.strerror} ({reason.filename})" if reason.filename else reason.strerror
    return f"rank {rank}: {' '.join(text.split())[:300] or type(reason).__name__}"


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
