"""Sharded checkpoints: every rank writes its part, and training in any layout goes on from them.

checkpoints/step-000040/   a whole checkpoint: state.json, .metadata, and files of the ranks
checkpoints/.step-000060/  one that is being written, or was when its training ended
checkpoints/latest         the name of the one that was written last

torch.distributed.checkpoint (DCP) cuts tensors anew for the layout that loads them. What all ranks
know is in state.json. All ranks must see the same folder. A checkpoint gets its name when every
rank's part is on the disk.
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
from paceline.trainer.checkpoint_tensors import make_state, tensors
from paceline.trainer.config import ConfigError, TrainerConfig
from paceline.trainer.measure.clock import aside
from paceline.trainer.measure.outcome import CheckpointError
from paceline.trainer.optim import LossScaler
from paceline.trainer.parallel.mesh import World
from paceline.trainer.randomness import restore_rng_states, rng_states
from paceline.trainer.replica.replica import Replica

SCHEMA = 1
FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
KEPT = 2
"""Older checkpoints are deleted."""
KEPT_OF_DATA = ("source", "packing", "loss_on", "split", "split_part")
RESUME = "checkpoint.resume"
SLOWEST_WRITE = timedelta(hours=6)
"""How long a rank waits for the others' files."""
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""PyTorch's variable; there is no argument for it."""
REMEDIES = {
    "padded_vocab": "the vocabulary is padded to a multiple of vocab_multiple x tp, so change "
    "vocab_multiple to keep it",
}


class Checkpoints:
    """Saves and restores one training; `paused` surrounds what may take long without progress."""

    def __init__(
        self,
        config: TrainerConfig,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None,
        world: World,
        num_windows: int | None,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.config, self.replica, self.optimizer = config, replica, optimizer
        self.scaler, self.world, self.paused = scaler, world, paused
        kept = {
            name: getattr(config.training, name)
            for name in ("seed", "global_batch", "seq_len", "ramp_up")
        }
        self._facts = {
            "model": asdict(config.model),
            "training": kept,
            "data": {
                "windows": num_windows,
                "masked": config.data.loss_mask is not None,
                **{name: getattr(config.data, name) for name in KEPT_OF_DATA},
            },
        }
        self._group = make_group() if world.size > 1 else None
        self._writing: tuple[Writer, Future[Metadata]] | None = None
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def restore(self) -> int:
        """Load what `checkpoint.resume` names; the step it was saved after, 0 if it names nothing.

        Raises ConfigError when it is missing, broken, or another training's.
        """
        resume = self.config.checkpoint.resume
        if resume is None:
            return 0
        with self.paused():
            folder, state = self._agreed(Path(resume))
            make_state(self.optimizer)
            reader = CheckpointReader(folder)
            try:
                self._load(tensors(self.replica, self.optimizer, mine=False), reader)
                self._resume_random(reader, state)
            except CheckpointException as error:
                raise ConfigError(
                    f"{label(folder)}: is broken: {cause(error)}; go on from another checkpoint"
                ) from error
        if self.scaler is not None and state["loss_scale"] is not None:
            self.scaler.restore(state["loss_scale"])
        return int(state["step"])

    def _load(self, what: dict[str, Tensor], reader: CheckpointReader) -> None:
        group = self._group
        load(what, storage_reader=reader, process_group=group, no_dist=group is None)

    def due(self, step: int) -> bool:
        """Whether the state is to be saved after a step."""
        every = self.config.checkpoint.every
        return every is not None and (step % every == 0 or step == self.config.training.steps)

    def save(self, step: int) -> None:
        """Save the state after a step, once the one before is written.

        An asynchronous save returns when the state is copied. Raises CheckpointError when this
        checkpoint or the one before cannot be written.
        """
        self.wait()
        make_state(self.optimizer)
        state = {
            "schema": SCHEMA,
            "step": step,
            "steps": self.config.training.steps,
            "loss_scale": self.scaler.state() if self.scaler else None,
            **self._facts,
            "lora": asdict(self.config.lora) if self.config.lora else None,
            "layout": self.config.layout_record(),
            "torch": torch.__version__,
            "time_unix": time.time(),
        }
        writer = Writer(Path(FOLDER).absolute(), state)
        what: dict[str, Any] = {
            "state_dict": tensors(self.replica, self.optimizer, mine=True) | self._random(),
            "storage_writer": writer,
            # Every save's plan is the first one's: later ones need not be gathered and scattered.
            "planner": DefaultSavePlanner(enable_plan_caching=True),
            "process_group": self._group,
            "no_dist": self._group is None,
        }
        with self.paused():
            if not self.config.checkpoint.asynchronous:
                self._finish(writer, lambda: save(**what))
                return
            written = async_save(**what)
            assert isinstance(written, Future), "the state is copied already"
            self._writing = writer, written

    def wait(self) -> None:
        """Return when the last checkpoint is written; raises CheckpointError when it cannot be."""
        if self._writing is None:
            return
        (writer, written), self._writing = self._writing, None
        with self.paused():
            self._finish(writer, written.result)

    def _random(self) -> dict[str, Tensor]:
        """By key what random numbers come next on this rank, if its training draws any."""
        if not self.config.draws:
            return {}
        states = rng_states(self.world.device)
        return {f"random/{kind}/{self.world.rank:05d}": state for kind, state in states.items()}

    def _resume_random(self, reader: CheckpointReader, state: dict[str, Any]) -> None:
        """Draw what would have been drawn next; in another layout, ranks draw anew."""
        mine, layout = self._random(), json.loads(json.dumps(self.config.layout_record()))
        if not mine or state["layout"] != layout:
            return
        if mine.keys() <= reader.read_metadata().state_dict_metadata.keys():
            self._load(mine, reader)
            kinds = {key.split("/")[1]: value for key, value in mine.items()}
            restore_rng_states(kinds, self.world.device)

    def _finish(self, writer: Writer, finish: Callable[[], Any]) -> None:
        try:
            finish()
        except CheckpointException as error:
            if self.world.rank == 0:
                shutil.rmtree(writer.part, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {writer.whole}: cannot be written: {cause(error)}"
            ) from error
        finally:
            aside.here = False

    def _agreed(self, resume: Path) -> tuple[Path, dict[str, Any]]:
        """The checkpoint that the first rank finds and its state.json; so is its ConfigError."""
        outcome: list[Any] = [None]
        if self.world.rank == 0:
            try:
                folder = find_checkpoint(resume)
                outcome = [(folder, self._checked(folder))]
            except ConfigError as error:
                outcome = [error]
            except OSError as error:
                outcome = [ConfigError(f"{label(resume)}: cannot be read: {error.strerror}")]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], ConfigError):
            raise outcome[0]
        return outcome[0]

    def _checked(self, folder: Path) -> dict[str, Any]:
        """A checkpoint's state.json; raises ConfigError when this training cannot go on from it."""
        state, steps = read_state(folder), self.config.training.steps
        for part, mine in json.loads(json.dumps(self._facts)).items():
            for name, value in mine.items():
                # A run reads no more of its text than all its steps need.
                longer = name == "windows" and state["steps"] != steps
                if state[part].get(name, value) != value and not longer:
                    raise ConfigError(
                        f"{label(folder)}: {part}.{name} is {state[part][name]} there and {value} "
                        f"here; {REMEDIES.get(name, 'a training goes on as it began')}"
                    )
        if state["step"] >= steps:
            raise ConfigError(
                f"{label(folder)}: was saved after step {state['step']}, and training.steps {steps}"
                " counts from the first step on; ask for more steps"
            )
        return state


class Writer(FileSystemWriter):
    """Writes `part`, which becomes `whole` when all ranks have written."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        name = f"step-{state['step']:06d}"
        self.folder, self.state = folder, state
        self.part, self.whole = folder / f".{name}", folder / name
        super().__init__(self.part)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy in main memory; DCP's own fails for a rank without a row of a sharded tensor."""
        self.per_thread_copy_ahead = 0  # for copying from a GPU while writing
        return {key: tensor.to("cpu", copy=True) for key, tensor in state_dict.items()}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called before the first exchange with other ranks, on the thread that writes."""
        aside.here = True
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on the first rank before any rank writes: remove what ended trainings left."""
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left)
        self.part.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write this rank's part; a full disk is told as such, not as torch.save's next failure."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            before = error.__context__
            while before is not None and not isinstance(before, OSError):
                before = before.__context__
            raise before or error from None

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Called on the first rank when all have written: name the folder, and delete old ones."""
        super().finish(metadata, results)
        write_synced(self.part / STATE, json.dumps(self.state, indent=2) + "\n")
        sync(self.part)
        if self.whole.exists():
            self.whole.rename(self.folder / f".{self.whole.name}.replaced")
        self.part.rename(self.whole)
        marker = self.folder / f".{LATEST}"
        write_synced(marker, self.whole.name + "\n")
        marker.rename(self.folder / LATEST)
        sync(self.folder)
        written = [file.parent for file in self.folder.glob(f"step-*/{STATE}")]
        written.sort(key=lambda path: (path / STATE).stat().st_mtime_ns)
        for old in written[:-KEPT]:
            # Under its own name, half of it would be left by a kill, and taken for a checkpoint.
            old.rename(self.folder / f".{old.name}.old")
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left)


def make_group() -> dist.ProcessGroup:
    """All ranks' group for what DCP exchanges; its ranks connect when they first have to.

    One of its own, because saving goes on beside the training's collectives; gloo, because what is
    exchanged lies in main memory. Left alone, gloo connects every rank with every other, for
    exchanges that all go through the first rank.
    """
    before = os.environ.get(LAZY_GLOO)
    os.environ[LAZY_GLOO] = "1"
    try:
        group = dist.new_group(backend="gloo", timeout=SLOWEST_WRITE)
    finally:
        os.environ.pop(LAZY_GLOO)
        if before is not None:
            os.environ[LAZY_GLOO] = before
    assert isinstance(group, dist.ProcessGroup)
    return group


def find_checkpoint(path: Path, field: str = RESUME) -> Path:
    """The checkpoint that a path names: itself, or the latest of a run or of a checkpoints folder.

    Raises ConfigError when there is none.
    """
    for place in (path, path / FOLDER):
        if (place / STATE).is_file():
            return place
        if (place / LATEST).is_file():
            return place / Path((place / LATEST).read_text().strip()).name
    what = "holds no whole checkpoint" if path.exists() else "is missing"
    raise ConfigError(f"{field} {path}: {what}; name a run's folder or a {FOLDER}/step-... in one")


def read_state(folder: Path, field: str = RESUME) -> dict[str, Any]:
    """A checkpoint's state.json; raises ConfigError when it is none of this version's."""
    try:
        state = json.loads((folder / STATE).read_text())
        parts = [state[name] for name in ("model", "training", "data")]
        scale = state["loss_scale"]
        whole = state["schema"] == SCHEMA and 0 < state["step"] <= state["steps"]
        whole = whole and all(isinstance(part, dict) for part in parts)
        whole = whole and (scale is None or math.isfinite(scale["scale"] + scale["good"]))
    except (ValueError, KeyError, TypeError):
        whole, state = False, {}
    if not whole:
        what = "is broken or of another version; go on from another checkpoint"
        raise ConfigError(f"{field} {folder}: {STATE} {what}")
    return state


def label(path: Path) -> str:
    """How an error about what is resumed begins."""
    return f"{RESUME} {path}"


def cause(error: CheckpointException) -> str:
    """The first failing rank and its reason; DCP's own text is its stack."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    text = str(reason)
    if isinstance(reason, OSError) and reason.strerror:
        text = f"{reason.strerror} ({reason.filename})" if reason.filename else reason.strerror
    return f"rank {rank}: {' '.join(text.split())[:300] or type(reason).__name__}"


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk afterwards."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Return when a folder's entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
