"""Kinds of samples: windows of a token sequence, separate records, random ids, or a part of those.

In packed mode a corpus is cut into windows of seq_len + 1 tokens that overlap by one token: the
last target of one is the first input of the next. In padded mode every record is a sample,
truncated to seq_len + 1 tokens or padded with its last token, which is an end mark. A record is a
line of jsonl, a paragraph of a text, or a document of an indexed dataset.

Bounds of the documents in n packed samples are (n, D + 1) ordered positions from 0 to seq_len:
document i of a sample has the inputs from bound i up to bound i + 1. Samples with fewer than D
documents repeat their last bound. A batch thus carries one integer tensor, and no device has to be
synchronized for sizes. A document split by a window counts as a separate document in each window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.validation_split import nothing_left_error
from paceline.trainer.model.context_parallel import local_positions
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.network import derive_seed
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import MeshAxis


def window_bounds(ends: Tensor, starts: Sequence[int], seq_len: int) -> Tensor:
    """Return the bounds of windows starting at `starts`; documents end at (documents,) `ends`."""
    inner: list[Tensor] = []
    for start in starts:
        span = torch.tensor([start, start + seq_len], dtype=ends.dtype)
        first, last = torch.searchsorted(ends, span, right=True).tolist()
        inner.append(ends[first:last] - start)
    return _pad_bounds(inner, seq_len)


def piece_bounds(lengths: Sequence[Sequence[int]], seq_len: int) -> Tensor:
    """Return the bounds of samples joined from document pieces of these lengths."""
    return _pad_bounds([torch.tensor([*accumulate(sample)]) for sample in lengths], seq_len)


def _pad_bounds(inner: Sequence[Tensor], seq_len: int) -> Tensor:
    ends = pad_sequence([*inner], batch_first=True, padding_value=seq_len).clamp(max=seq_len)
    edge = ends.new_zeros(len(ends), 1)
    return torch.cat([edge, ends, edge + seq_len], dim=1).to(torch.int32)


def attended_share(bounds: Tensor, model: ModelConfig) -> float:
    """Return the fraction of query-key pairs within documents, averaged over samples and layers.

    A document of l tokens has l^2 pairs without a causal mask. In a layer with a window of w < l
    tokens it has l (2 w - 1) - w (w - 1) pairs, as the harness counts them (core/flops.py).
    """
    seq_len = bounds[:, -1:].double()
    windows = [model.window(layer) for layer in range(model.num_layers)]
    document_pairs, all_pairs = (
        sum(float(_pairs(lengths, window).sum()) for window in windows)
        for lengths in (bounds.diff(dim=1).double(), seq_len)
    )
    return document_pairs / all_pairs


def _pairs(lengths: Tensor, window: int | None) -> Tensor:
    if window is None:
        return lengths.square()
    w = lengths.clamp(max=window)
    return lengths * (2 * w - 1) - w * (w - 1)


SPLIT_SEED = 1234
"""Seed of the order that splits are cut from, the same for all phases of a training run."""


@dataclass(frozen=True)
class TokenCorpus:
    """Windows of one long sequence of tokens."""

    tokens: Tensor
    seq_len: int
    vocab_size: int
    mask: Tensor | None = None
    """Loss mask over the tokens; a target with 0 does not count."""
    ends: Tensor | None = None
    """Ordered end positions of documents in `tokens`, if attention is limited to documents."""

    @property
    def masked(self) -> bool:
        """True if some targets do not count."""
        return self.mask is not None

    @property
    def num_tokens(self) -> int:
        """Number of available tokens."""
        return self.tokens.numel()

    @property
    def num_windows(self) -> int:
        """Number of complete windows."""
        return max(0, (self.num_tokens - 1) // self.seq_len)

    def window(self, index: int) -> Tensor:
        """Return (seq_len + 1,) token ids; raises ConfigError for an id outside the vocabulary."""
        start = index * self.seq_len
        return checked_ids(self.tokens[start : start + self.seq_len + 1], self.vocab_size, start)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens; every position is one."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return windows as inputs, targets and document bounds; raises ConfigError as `window`."""
        inputs, targets = next_tokens([self.window(i) for i in indices], cp)
        starts = [index * self.seq_len for index in indices]
        if self.mask is not None:
            counts = [self.mask[start : start + self.seq_len + 1] for start in starts]
            targets = targets.masked_fill(next_tokens(counts, cp)[1] == 0, IGNORE_INDEX)
        if self.ends is None:
            return inputs, targets
        return inputs, targets, window_bounds(self.ends, starts, self.seq_len)


@dataclass(frozen=True)
class PaddedCorpus:
    """Separate records: sample i is tokens[ends[i]:ends[i + 1]], padded with end marks."""

    tokens: Tensor
    ends: Tensor
    """(num_windows + 1,) bounds of the records."""
    seq_len: int
    masked: bool
    """True if targets that are padding or masked do not count."""
    vocab_size: int | None = None
    """Upper bound of valid ids; None if all are valid."""
    mask: Tensor | None = None
    """Loss mask over the tokens; a target with 0 does not count."""

    @property
    def num_tokens(self) -> int:
        """Number of available tokens, without padding."""
        return self.tokens.numel()

    @property
    def num_windows(self) -> int:
        """Number of records."""
        return self.ends.numel() - 1

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of input positions of some samples that are text."""
        index = torch.tensor([*indices], dtype=torch.int64)
        lengths = self.ends[index + 1] - self.ends[index]
        return int(lengths.clamp(max=self.seq_len).sum())

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return samples as inputs and targets; padding targets may be ignored."""
        windows = torch.zeros((len(indices), self.seq_len + 1), dtype=torch.int64)
        ignore_mask = torch.ones(windows.shape, dtype=torch.bool)
        for i, index in enumerate(indices):
            start, end = self.ends[index : index + 2].tolist()
            end = min(end, start + self.seq_len + 1)
            record = checked_ids(self.tokens[start:end], self.vocab_size, start)
            if end > start:
                windows[i] = record[-1]
            windows[i, : end - start] = record
            ignore_mask[i, : end - start] = (
                False if self.mask is None else self.mask[start:end] == 0
            )
        inputs, targets = next_tokens([*windows], cp)
        if self.masked:
            targets = targets.masked_fill(next_tokens([*ignore_mask], cp)[1], IGNORE_INDEX)
        return inputs, targets


@dataclass(frozen=True)
class SyntheticCorpus:
    """Endless windows of random ids, each from its own seed; `backwards` uses different seeds."""

    seq_len: int
    vocab_size: int
    seed: int
    backwards: bool = False
    num_tokens: None = None
    num_windows: None = None
    masked: bool = False

    def window(self, index: int) -> Tensor:
        """Return (seq_len + 1,) token ids, the same for an index on every rank."""
        part = -1 - index if self.backwards else index
        generator = torch.Generator().manual_seed(derive_seed(self.seed, part))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens; every position is one."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return windows as inputs and targets."""
        return next_tokens([self.window(i) for i in indices], cp)


@dataclass(frozen=True)
class PartCorpus:
    """Some of the samples of another corpus."""

    whole: TokenCorpus | PaddedCorpus
    indices: Tensor
    """(num_windows,) indices of the samples in the whole corpus."""

    @property
    def masked(self) -> bool:
        """True if some targets do not count."""
        return self.whole.masked

    @property
    def num_windows(self) -> int:
        """Number of samples of the part."""
        return self.indices.numel()

    @property
    def num_tokens(self) -> int:
        """Number of input positions of the part's samples, without padding."""
        return self.real_tokens(range(self.num_windows))

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of input positions of some samples that are not padding."""
        return self.whole.real_tokens(self._whole_indices(indices))

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return samples in the form of the whole corpus."""
        return self.whole.collate(self._whole_indices(indices), cp)

    def _whole_indices(self, indices: Sequence[int]) -> list[int]:
        return self.indices[[*indices]].tolist()


class Corpus(Protocol):
    """Samples by index; every rank gets the same sample for the same index."""

    @property
    def num_tokens(self) -> int | None:
        """Number of available tokens; None if endless."""
        ...

    @property
    def num_windows(self) -> int | None:
        """Number of available samples; None if endless."""
        ...

    @property
    def masked(self) -> bool:
        """True if some targets do not count, so that ranks may count different numbers."""
        ...

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of input positions of some samples that are not padding."""
        ...

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return (inputs, targets, further inputs) of some samples, this rank's part of each."""
        ...


def checked_ids(ids: Tensor, vocab_size: int | None, start: int) -> Tensor:
    """Return token ids as int64; raises ConfigError for an id outside the vocabulary.

    `start` is the position of the first one in the corpus.
    """
    ids = ids.to(torch.int64)
    if vocab_size is None or not len(ids):
        return ids
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"data: token {low if low < 0 else high} between {start} and {start + len(ids) - 1} "
            f"is outside the vocabulary of {vocab_size}"
        )
    return ids


def next_tokens(windows: list[Tensor], cp: MeshAxis) -> tuple[Tensor, Tensor]:
    """Return (n, seq_len / cp) inputs and their next tokens, from (seq_len + 1,) windows."""
    ids = torch.stack(windows)
    positions = local_positions(ids.shape[1] - 1, cp)
    return ids[:, positions], ids[:, positions + 1]


def select_part(whole: TokenCorpus | PaddedCorpus, data: DataConfig) -> PartCorpus:
    """Return the samples of a run's part of a source, in an order that is the same for every seed.

    All samples of the source are shuffled once and divided in proportion to `split`, as in
    DeepSpeed-Chat (its shuffle is NumPy's, so the samples differ). Without a split the part is
    everything.
    """
    if data.split is None:
        return PartCorpus(whole, torch.arange(whole.num_windows))
    order = torch.randperm(whole.num_windows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return PartCorpus(whole, order[part_range(data.split, data.split_part, whole.num_windows)])


def part_range(split: Sequence[float], part: int, count: int) -> slice:
    """Return the slice of `count` items that a part of a split gets."""
    start, end = (round(sum(split[:end]) / sum(split) * count) for end in (part, part + 1))
    return slice(start, end)


def train_part(config: TrainerConfig, part: PartCorpus) -> PartCorpus:
    """Return a part without its last samples, if evaluations need them."""
    evaluation = config.training.evaluation
    if evaluation is None or evaluation.path is not None:
        return part
    if part.num_windows <= evaluation.samples:
        raise nothing_left_error(
            f"part {config.data.split_part} of {config.data.path or 'the data'}"
        )
    return replace(part, indices=part.indices[: -evaluation.samples])


def require_samples(corpus: Corpus, samples: int, where: str) -> Corpus:
    """Return the corpus of the evaluations; raises ConfigError if it has fewer than `samples`."""
    if (corpus.num_windows or 0) < samples:
        raise ConfigError(
            f"training.evaluation.samples {samples}: {where} has only {corpus.num_windows} samples"
        )
    return corpus
