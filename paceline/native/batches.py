"""Batches of a run: which windows belong to which step and rank, prepared ahead of time."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from config import ConfigError, TrainerConfig
from context import rows
from corpus import Corpus
from loss import IGNORE_INDEX
from mesh import Mesh
from weights import mixed_seed

AHEAD = 2
"""Steps that are prepared in advance."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step: (num_microbatches, micro_batch, seq_len / cp) ids each."""

    inputs: Tensor
    targets: Tensor
    counted: int
    """Targets that the loss counts."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy is queued when the memory is pinned."""
        return Batch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.counted,
        )


class Sampler:
    """Which window every sample of every step is; the global batch does not depend on the layout.

    Every epoch has its own order. A rest that fills no global batch waits for another epoch, so a
    step never meets a window twice, and ranks take disjoint parts of it.
    """

    def __init__(self, num_windows: int | None, global_batch: int, dp: int, seed: int) -> None:
        if num_windows is not None and num_windows < global_batch:
            raise ConfigError(
                f"data: {num_windows} windows of seq_len + 1 tokens are fewer than one global batch "
                f"of {global_batch}; use more text, shorter sequences or a smaller batch"
            )
        self.num_windows, self.global_batch, self.dp, self.seed = (
            num_windows,
            global_batch,
            dp,
            seed,
        )
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def windows(self, step: int, rank: int) -> list[int]:
        """Window indices of one data-parallel rank in one step (both from 0)."""
        share = self.global_batch // self.dp
        if self.num_windows is None:
            start = step * self.global_batch + rank * share
            return list(range(start, start + share))
        epoch, position = divmod(step, self.num_windows // self.global_batch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_windows, generator=generator)
        start = position * self.global_batch + rank * share
        return self._order[start : start + share].tolist()


class Loader:
    """Prepares a rank's batches on a thread of its own, a few steps ahead; `first` step from 0."""

    def __init__(
        self,
        corpus: Corpus,
        sampler: Sampler,
        config: TrainerConfig,
        mesh: Mesh,
        pin: bool,
        first: int = 0,
    ) -> None:
        self._corpus, self._sampler, self._pin = corpus, sampler, pin
        self._rank, self._rows = mesh.dp.index, rows(config.training.seq_len, mesh.cp)
        self._steps = range(first, config.training.steps)
        self._shape = (config.num_microbatches, config.layout.micro_batch, -1)
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Batch, float]:
        """(the next step's batch, seconds spent waiting for it); raises what the thread met."""
        start = time.perf_counter()
        item = self._ready.get()
        waited_s = time.perf_counter() - start
        if isinstance(item, Exception):
            raise item
        return item, waited_s

    def close(self) -> None:
        """Stop the thread; a thread inside PyTorch while the interpreter ends would crash it."""
        self._stopped.set()
        self._thread.join()

    def batch(self, step: int) -> Batch:
        """This rank's batch of a step (from 0)."""
        windows = [self._corpus.window(i) for i in self._sampler.windows(step, self._rank)]
        ids = torch.stack(windows)
        inputs = ids[:, self._rows].reshape(self._shape)
        targets = ids[:, self._rows + 1].reshape(self._shape)
        counted = int((targets != IGNORE_INDEX).sum())
        if self._pin:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return Batch(inputs, targets, counted)

    def _fill(self) -> None:
        for step in self._steps:
            item: Batch | Exception
            try:
                item = self.batch(step)
            except Exception as error:  # the step that asks for this batch raises it
                item = error
            if not self._put(item) or isinstance(item, Exception):
                return

    def _put(self, item: Batch | Exception) -> bool:
        """False when the loader was closed meanwhile."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
