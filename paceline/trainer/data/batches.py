"""Batches of a run: the samples of each step and rank, prepared ahead of time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, TrainerConfig
from paceline.trainer.data.corpus import Corpus
from paceline.trainer.data.samples import attended_share
from paceline.trainer.model.context_parallel import local_positions
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.network import derive_seed
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import ALONE, Mesh
from paceline.trainer.schedule import BatchSizes

AHEAD = 2
"""Number of steps prepared in advance."""
FURTHER_INPUTS = {"decoder": ("documents",), "mmdit": ("time", "text", "pooled")}
"""Arguments of a model in addition to its inputs and targets, in the order of `Corpus.collate`."""


@dataclass(frozen=True)
class LocalBatch:
    """One rank's share of a step; every tensor starts with (num_microbatches, micro_batch).

    For a decoder, inputs and targets are token ids with a further dimension of seq_len / cp.
    """

    inputs: Tensor
    targets: Tensor
    num_valid_targets: int
    """Number of targets that count for the loss."""
    extras: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Further arguments of the model, by name."""
    real_tokens: int = 0
    """Number of positions in the replica's samples that are not padding, over all its ranks."""
    attended_share: float | None = None
    """Fraction of the replica's query-key pairs within documents; None without document mask."""

    @property
    def samples(self) -> int:
        """Number of samples of the replica."""
        return self.inputs.shape[0] * self.inputs.shape[1]

    def to(self, device: torch.device) -> LocalBatch:
        """Return the same batch on a device; the copy is asynchronous if the memory is pinned."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            extras={n: extra.to(device, non_blocking=True) for n, extra in self.extras.items()},
        )

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield inputs, targets and further arguments of one micro-batch after the other."""
        for i, (inputs, targets) in enumerate(zip(self.inputs, self.targets, strict=True)):
            yield inputs, targets, {name: extra[i] for name, extra in self.extras.items()}


def by_argument(fields: Sequence[Tensor], kind: str) -> dict[str, Tensor]:
    """Return the result of `Corpus.collate` by the arguments of a kind of model."""
    names = ("inputs", "targets", *FURTHER_INPUTS[kind])
    return dict(zip(names, fields, strict=False))  # there may be no document bounds


def tokens_ahead(inputs: Tensor, targets: Tensor, depth: int) -> Tensor:
    """Return (B, depth, 2, T) inputs and targets of (B, T) each, moved 1 to `depth` tokens left.

    Behind the end are token 0 and a target that does not count.
    """
    ends = inputs.new_zeros(len(inputs), 1), targets.new_full((len(targets), 1), IGNORE_INDEX)
    levels: list[Tensor] = []
    for _ in range(depth):
        inputs, targets = (
            torch.cat([ids[:, 1:], end], 1)
            for ids, end in zip((inputs, targets), ends, strict=True)
        )
        levels.append(torch.stack([inputs, targets], 1))
    return torch.stack(levels, 1)


class Sampler:
    """Order in which steps take samples; the global batch does not depend on the layout.

    Steps take samples in sequence from an endless series of epochs, each in an order of its own. A
    step may therefore start in one epoch and end in the next, however few windows there are.
    """

    def __init__(
        self,
        num_windows: int | None,
        global_batch: int,
        dp: int,
        seed: int,
        ramp_up: Sequence[Sequence[int]] = (),
    ) -> None:
        if num_windows == 0:
            raise ConfigError(
                "data: not enough for one sample; "
                "a packed sample has seq_len + 1 tokens, so use more text or shorter sequences"
            )
        self.num_windows, self.dp, self.seed = num_windows, dp, seed
        self.sizes = BatchSizes(ramp_up, global_batch)
        self._orders: dict[int, Tensor] = {}

    def windows(self, step: int, rank: int) -> list[int]:
        """Return the window indices of one data-parallel rank in one step (both from 0)."""
        share = self.sizes.batch(step) // self.dp
        start = self.sizes.samples_before(step) + rank * share
        samples = range(start, start + share)
        if self.num_windows is None:
            return list(samples)
        first, last = start // self.num_windows, samples[-1] // self.num_windows
        # Loaders that share a sampler may be at different epochs.
        self._orders = orders = {epoch: self._order(epoch) for epoch in range(first, last + 1)}
        return [
            int(orders[sample // self.num_windows][sample % self.num_windows]) for sample in samples
        ]

    def _order(self, epoch: int) -> Tensor:
        order = self._orders.get(epoch)
        if order is not None:
            return order
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        return torch.randperm(self.num_windows or 0, generator=generator)


def sampler_of(config: TrainerConfig, num_windows: int | None) -> Sampler:
    """Return the sampler of a training run."""
    training = config.training
    return Sampler(num_windows, training.global_batch, config.dp, training.seed, training.ramp_up)


class Loader:
    """Loader that prepares a rank's batches on a thread, a few steps ahead; `first` step from 0."""

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
        self._device = torch.cuda.current_device() if pin else None
        self._rank, self._cp = mesh.dp.index, mesh.cp
        self._steps = range(first, config.training.steps)
        self._micro_batch = config.layout.micro_batch
        self._model = config.model
        self._ready: queue.Queue[LocalBatch | Exception] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)
        self._thread.start()

    def next(self) -> tuple[LocalBatch, float]:
        """Return (batch of the next step, seconds spent waiting); raises errors of the thread."""
        start = time.perf_counter()
        item = self._ready.get()
        waited_s = time.perf_counter() - start
        if isinstance(item, Exception):
            raise item
        return item, waited_s

    def close(self) -> None:
        """Stop the thread, which would crash the interpreter if it ran PyTorch code at exit."""
        self._stopped.set()
        self._thread.join()

    def batch(self, step: int) -> LocalBatch:
        """Return this rank's batch of a step (from 0)."""
        indices = self._sampler.windows(step, self._rank)
        fields, share = self._fields(indices), None
        if isinstance(self._model, ModelConfig) and "documents" in fields:
            share = attended_share(fields["documents"], self._model)
        for name, whole in fields.items():
            parts = whole.unflatten(0, (-1, self._micro_batch))
            fields[name] = parts.pin_memory() if self._pin else parts
        inputs, targets = fields.pop("inputs"), fields.pop("targets")
        num_valid_targets = int((targets != IGNORE_INDEX).sum())
        real_tokens = self._corpus.real_tokens(indices)
        return LocalBatch(inputs, targets, num_valid_targets, fields, real_tokens, share)

    def _fields(self, indices: list[int]) -> dict[str, Tensor]:
        """Return this rank's part of some samples, by argument of the model."""
        depth = self._model.mtp_layers if isinstance(self._model, ModelConfig) else 0
        if not depth:
            return by_argument(self._corpus.collate(indices, self._cp), self._model.kind)
        fields = by_argument(self._corpus.collate(indices, ALONE), self._model.kind)
        inputs, targets = fields["inputs"], fields["targets"]
        ahead = tokens_ahead(inputs, targets, depth)
        positions = local_positions(inputs.shape[1], self._cp)
        tokens = {"inputs": inputs, "targets": targets, "ahead": ahead}
        return fields | {name: ids[..., positions] for name, ids in tokens.items()}

    def _fill(self) -> None:
        # A second OpenMP team for this thread would oversubscribe the cores, and GNU's threads
        # then sleep instead of spinning: Flux on two threads took up to twice as long.
        torch.set_num_threads(1)
        if self._device is not None:
            # A thread starts on device 0, where pinning would create a context for every rank.
            torch.cuda.set_device(self._device)
        for step in self._steps:
            item: LocalBatch | Exception
            try:
                item = self.batch(step)
            except Exception as error:  # the step that takes this batch raises it
                item = error
            if not self._put(item) or isinstance(item, Exception):
                return

    def _put(self, item: LocalBatch | Exception) -> bool:
        """Put an item into the queue; return False if the loader was closed meanwhile."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
