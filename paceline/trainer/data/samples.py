"""What samples are: windows of a line of tokens, separate records, random ids, or a part of those.

Packed, a corpus is cut into windows of seq_len + 1 tokens that share one token with the next: the
last target of one is the first input of the other. Padded, every record is a sample of its own, cut
to seq_len + 1 tokens or filled up with its last one, which is an end mark: a line of jsonl, a
paragraph of a text, or a document of an indexed data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.document_bounds import window_bounds
from paceline.trainer.data.validation_split import too_little
from paceline.trainer.model.context_parallel import local_positions
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.network import derive_seed
from paceline.trainer.parallel.mesh import MeshAxis

SPLIT_SEED = 1234
"""Of the order that parts are cut from: the same for all phases of a training."""


@dataclass(frozen=True)
class TokenCorpus:
    """Windows of one long line of tokens."""

    tokens: Tensor
    seq_len: int
    vocab_size: int
    mask: Tensor | None = None
    """For each token, 0 where it counts for nothing as a target."""
    ends: Tensor | None = None
    """Where documents end in `tokens`, in order, if attention keeps to them."""

    @property
    def masked(self) -> bool:
        """Whether some targets count for nothing."""
        return self.mask is not None

    @property
    def num_tokens(self) -> int:
        """Tokens at hand."""
        return self.tokens.numel()

    @property
    def num_windows(self) -> int:
        """Whole windows."""
        return max(0, (self.num_tokens - 1) // self.seq_len)

    def window(self, index: int) -> Tensor:
        """(seq_len + 1,) token ids; raises ConfigError for an id that the model does not know."""
        start = index * self.seq_len
        return known(self.tokens[start : start + self.seq_len + 1], self.vocab_size, start)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Windows as inputs, targets and bounds; raises ConfigError as `window` does."""
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
    """Separate records: sample i is tokens[ends[i]:ends[i + 1]] and end marks up to the length."""

    tokens: Tensor
    ends: Tensor
    """(num_windows + 1,) where records begin and end."""
    seq_len: int
    masked: bool
    """Whether targets that are padding, or that the mask leaves out, count for nothing."""
    vocab_size: int | None = None
    """Ids below it are known; None where all are."""
    mask: Tensor | None = None
    """For each token, 0 where it counts for nothing as a target."""

    @property
    def num_tokens(self) -> int:
        """Tokens at hand, padding left out."""
        return self.tokens.numel()

    @property
    def num_windows(self) -> int:
        """Records."""
        return self.ends.numel() - 1

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Inputs of some samples that are text."""
        chosen = torch.tensor([*indices], dtype=torch.int64)
        lengths = self.ends[chosen + 1] - self.ends[chosen]
        return int(lengths.clamp(max=self.seq_len).sum())

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Samples as inputs and targets; targets that are padding may not count."""
        windows = torch.zeros((len(indices), self.seq_len + 1), dtype=torch.int64)
        ignored = torch.ones(windows.shape, dtype=torch.bool)
        for i, index in enumerate(indices):
            start, end = self.ends[index : index + 2].tolist()
            end = min(end, start + self.seq_len + 1)
            record = known(self.tokens[start:end], self.vocab_size, start)
            if end > start:
                windows[i] = record[-1]
            windows[i, : end - start] = record
            ignored[i, : end - start] = False if self.mask is None else self.mask[start:end] == 0
        inputs, targets = next_tokens([*windows], cp)
        if self.masked:
            targets = targets.masked_fill(next_tokens([*ignored], cp)[1], IGNORE_INDEX)
        return inputs, targets


@dataclass(frozen=True)
class SyntheticCorpus:
    """Endless windows of random ids, each made from its own seed; `backwards` makes other ones."""

    seq_len: int
    vocab_size: int
    seed: int
    backwards: bool = False
    num_tokens: None = None
    num_windows: None = None
    masked: bool = False

    def window(self, index: int) -> Tensor:
        """(seq_len + 1,) token ids, the same for an index on every rank."""
        part = -1 - index if self.backwards else index
        generator = torch.Generator().manual_seed(derive_seed(self.seed, part))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Windows as inputs and targets."""
        return next_tokens([self.window(i) for i in indices], cp)


@dataclass(frozen=True)
class PartCorpus:
    """Some of the samples of another corpus."""

    whole: TokenCorpus | PaddedCorpus
    indices: Tensor
    """(num_windows,) which ones, in their order here."""

    @property
    def masked(self) -> bool:
        """Whether some targets count for nothing."""
        return self.whole.masked

    @property
    def num_windows(self) -> int:
        """Samples of the part."""
        return self.indices.numel()

    @property
    def num_tokens(self) -> int:
        """Inputs of the part's samples, padding left out."""
        return self.real_tokens(range(self.num_windows))

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Input positions of some samples that are no padding."""
        return self.whole.real_tokens(self._there(indices))

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Samples as the whole corpus has them."""
        return self.whole.collate(self._there(indices), cp)

    def _there(self, indices: Sequence[int]) -> list[int]:
        return self.indices[[*indices]].tolist()


class Corpus(Protocol):
    """Samples by index; every rank makes the same sample from the same index."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens at hand; None without end."""
        ...

    @property
    def num_windows(self) -> int | None:
        """Samples at hand; None without end."""
        ...

    @property
    def masked(self) -> bool:
        """Whether some targets count for nothing, so that ranks may count different numbers."""
        ...

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Input positions of some samples that are no padding."""
        ...

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """(inputs, targets, the model's other inputs) of some samples, this rank's part of each."""
        ...


def known(ids: Tensor, vocab_size: int | None, start: int) -> Tensor:
    """Tokens, the first of which is number `start`, as int64.

    Raises ConfigError for one that the model does not know.
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
    """(n, seq_len / cp) inputs and the tokens after them, from (seq_len + 1,) windows."""
    ids = torch.stack(windows)
    positions = local_positions(ids.shape[1] - 1, cp)
    return ids[:, positions], ids[:, positions + 1]


def part_of(whole: TokenCorpus | PaddedCorpus, data: DataConfig) -> PartCorpus:
    """The samples of a run's part of a source, in an order that is the same for every seed.

    The whole source's samples are shuffled once and cut in proportion to `split`, as DeepSpeed-Chat
    does it (its shuffle is NumPy's, so the samples are others); without one the part is all.
    """
    if data.split is None:
        return PartCorpus(whole, torch.arange(whole.num_windows))
    order = torch.randperm(whole.num_windows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return PartCorpus(whole, order[part_range(data.split, data.split_part, whole.num_windows)])


def part_range(split: Sequence[float], part: int, count: int) -> slice:
    """Which of `count` things a part of a split has."""
    start, end = (round(sum(split[:end]) / sum(split) * count) for end in (part, part + 1))
    return slice(start, end)


def train_part(config: TrainerConfig, part: PartCorpus) -> PartCorpus:
    """A part without its last samples, if these are held out for evaluations."""
    evaluation = config.training.evaluation
    if evaluation is None or evaluation.path is not None:
        return part
    if part.num_windows <= evaluation.samples:
        raise too_little(f"part {config.data.split_part} of {config.data.path or 'the data'}")
    return replace(part, indices=part.indices[: -evaluation.samples])


def enough(corpus: Corpus, samples: int, where: str) -> Corpus:
    """A corpus that evaluations go over; raises ConfigError when it holds less than `samples`."""
    if (corpus.num_windows or 0) < samples:
        raise ConfigError(
            f"training.evaluation.samples {samples}: {where} holds {corpus.num_windows}"
        )
    return corpus
