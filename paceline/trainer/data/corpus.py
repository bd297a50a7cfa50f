"""Samples of a run, from tokens of text or at random.

Packed, a corpus is cut into windows of seq_len + 1 tokens that share one token with the next: the
last target of one is the first input of the other. Padded, every record is a sample of its own, cut
to seq_len + 1 tokens or filled up with end marks: a line of jsonl, or a paragraph of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig, FluxConfig, TrainerConfig
from paceline.trainer.data.latents import load_latents, load_validation_latents
from paceline.trainer.data.texts import (
    BYTE_VOCAB,
    END,
    END_OF_DOCUMENT,
    MOST_TEXT_TOKENS,
    WHOLE_SOURCE,
    Extent,
    documents,
    map_mask,
    map_tokens,
    pack,
    records,
    tokens_of,
)
from paceline.trainer.data.validation_split import (
    ValidationSize,
    split_off,
    too_little,
    validation_size,
)
from paceline.trainer.model.context_parallel import rows
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.weights import mixed_seed
from paceline.trainer.parallel.mesh import Axis
from paceline.trainer.schedule import BatchSizes

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
        ids = self.tokens[start : start + self.seq_len + 1].to(torch.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ConfigError(
                f"data: token {wrong} between {start} and {start + self.seq_len} "
                f"is outside the vocabulary of {self.vocab_size}"
            )
        return ids

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
        """Windows as inputs and targets; raises ConfigError as `window` does."""
        inputs, targets = next_tokens([self.window(i) for i in indices], cp)
        if self.mask is not None:
            starts = [index * self.seq_len for index in indices]
            counts = [self.mask[start : start + self.seq_len + 1] for start in starts]
            targets = targets.masked_fill(next_tokens(counts, cp)[1] == 0, IGNORE_INDEX)
        return inputs, targets


@dataclass(frozen=True)
class PaddedCorpus:
    """Separate records: sample i is tokens[ends[i]:ends[i + 1]] and end marks up to the length."""

    tokens: Tensor
    ends: Tensor
    """(num_windows + 1,) where records begin and end."""
    seq_len: int
    masked: bool
    """Whether targets that are padding count for nothing."""

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

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
        """Samples as inputs and targets; targets that are padding may not count."""
        windows = torch.full((len(indices), self.seq_len + 1), END_OF_DOCUMENT)
        ends = self.ends.tolist()
        padded = torch.ones(windows.shape, dtype=torch.bool)
        for i, index in enumerate(indices):
            record = self.tokens[ends[index] : ends[index + 1]]
            windows[i, : len(record)] = record
            padded[i, : len(record)] = False
        inputs, targets = next_tokens([*windows], cp)
        if self.masked:
            targets = targets.masked_fill(next_tokens([*padded], cp)[1], IGNORE_INDEX)
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
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, part))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
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

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
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

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
        """(inputs, targets, the model's other inputs) of some samples, this rank's part of each."""
        ...


def next_tokens(windows: list[Tensor], cp: Axis) -> tuple[Tensor, Tensor]:
    """(n, seq_len / cp) inputs and the tokens after them, from (seq_len + 1,) windows."""
    ids = torch.stack(windows)
    positions = rows(ids.shape[1] - 1, cp)
    return ids[:, positions], ids[:, positions + 1]


def data_record(data: DataConfig, corpus: Corpus) -> dict[str, Any]:
    """What the start line says about the data."""
    samples = range(corpus.num_windows or 1)
    return {
        "source": data.source,
        "path": data.path,
        "tokens": corpus.num_tokens,
        "windows": corpus.num_windows,
        "packing": data.packing,
        "loss_on": data.loss_on,
        "loss_mask": data.loss_mask,
        **({"split": data.split, "split_part": data.split_part} if data.split else {}),
        "real_tokens_per_sample": corpus.real_tokens(samples) / max(1, len(samples)),
    }


def load_corpus(config: TrainerConfig) -> Corpus:
    """The corpus of a run: no more of its source than the steps can use, and nothing held out.

    Raises ConfigError when the vocabulary has no room for bytes or a file is not what it should be.
    """
    data, training = config.data, config.training
    if isinstance(config.model, FluxConfig):
        return load_latents(config, config.model)
    vocab = config.model.vocab_size
    if data.source == "synthetic":
        return SyntheticCorpus(training.seq_len, vocab, training.seed)
    if data.split is not None:
        return train_part(config, part_of(config, data, data.split))
    samples = BatchSizes(training.ramp_up, training.global_batch).consumed(training.steps)
    usable = samples * training.seq_len + 1
    apart = held_out_of(config)
    if data.source == "tokens":
        tokens, mask = map_tokens(data, None if apart else usable), mask_of(data)
        if apart:
            left = tokens.numel() - apart.amount
            if left <= 0:
                raise too_little(str(data.path))
            tokens = tokens[: min(left, usable)]
        return TokenCorpus(
            tokens, training.seq_len, vocab, None if mask is None else mask[: len(tokens)]
        )
    extent = split_off(data, apart)[0] if apart else WHOLE_SOURCE
    return text_corpus(config, data, training.seed, samples, extent)


def load_validation(config: TrainerConfig) -> Corpus:
    """The samples that evaluations go over, in their order; the same ones for every seed.

    Raises ConfigError when there are fewer than asked for.
    """
    evaluation, data, training = config.training.evaluation, config.data, config.training
    assert evaluation is not None, "there is nothing to evaluate"
    if isinstance(config.model, FluxConfig):
        return load_validation_latents(config, config.model, evaluation)
    vocab = config.model.vocab_size
    if data.source == "synthetic":
        return SyntheticCorpus(training.seq_len, vocab, 0, backwards=True)
    apart, need = held_out_of(config), validation_size(config)
    masked = evaluation.loss_mask or (None if evaluation.path else data.loss_mask)
    data = replace(data, path=evaluation.path or data.path, loss_mask=masked)
    if data.split is not None:
        part = part_of(config, data, data.split)
        kept = slice(-evaluation.samples, None) if apart else slice(evaluation.samples)
        corpus: Corpus = PartCorpus(part.whole, part.indices[kept])
    elif data.source == "tokens":
        tokens, mask = map_tokens(data, None), mask_of(data)
        part = slice(-need.amount, None) if apart else slice(need.amount)
        corpus = TokenCorpus(
            tokens[part], training.seq_len, vocab, None if mask is None else mask[part]
        )
    else:
        extent = split_off(data, apart)[1] if apart else WHOLE_SOURCE
        corpus = text_corpus(config, data, 0, evaluation.samples, extent)
    if (corpus.num_windows or 0) < evaluation.samples:
        raise ConfigError(
            f"training.evaluation.samples {evaluation.samples}: {data.path or data.source} holds "
            f"{corpus.num_windows}"
        )
    return corpus


def part_of(config: TrainerConfig, data: DataConfig, split: Sequence[float]) -> PartCorpus:
    """The samples of a run's part of a source, in an order that is the same for every seed.

    The whole source's samples are shuffled once and cut in proportion to `split`, as DeepSpeed-Chat
    does it (its shuffle is NumPy's, so the samples are others). Raises ConfigError as the source.
    """
    if data.source == "tokens":
        vocab = config.model.vocab_size  # type: ignore[union-attr]
        tokens, seq_len = map_tokens(data, None), config.training.seq_len
        whole: TokenCorpus | PaddedCorpus = TokenCorpus(tokens, seq_len, vocab, mask_of(data))
    else:
        whole = text_corpus(config, data, 0, MOST_TEXT_TOKENS, WHOLE_SOURCE)
    order = torch.randperm(whole.num_windows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    ends = (sum(split[:part]) / sum(split) for part in (data.split_part, data.split_part + 1))
    start, end = (round(end * whole.num_windows) for end in ends)
    return PartCorpus(whole, order[start:end])


def train_part(config: TrainerConfig, part: PartCorpus) -> PartCorpus:
    """A part without its last samples, if these are held out for evaluations."""
    evaluation = config.training.evaluation
    if evaluation is None or evaluation.path is not None:
        return part
    if part.num_windows <= evaluation.samples:
        raise too_little(f"part {config.data.split_part} of {config.data.path or 'the data'}")
    return replace(part, indices=part.indices[: -evaluation.samples])


def mask_of(data: DataConfig) -> Tensor | None:
    """Which tokens of a file count as targets, None: all; raises ConfigError as `map_mask`."""
    return None if data.loss_mask is None else map_mask(data.loss_mask, data)


def held_out_of(config: TrainerConfig) -> ValidationSize | None:
    """What evaluation takes away from the training's own data."""
    evaluation = config.training.evaluation
    return validation_size(config) if evaluation is not None and evaluation.path is None else None


def text_corpus(
    config: TrainerConfig, data: DataConfig, seed: int, samples: int, extent: Extent
) -> TokenCorpus | PaddedCorpus:
    """At most so many samples of a text source, or of a part of it."""
    seq_len, vocab = config.training.seq_len, config.model.vocab_size  # type: ignore[union-attr]
    if vocab < BYTE_VOCAB:
        raise ConfigError(
            f"model.vocab_size {vocab}: text needs {BYTE_VOCAB}, one id per byte and one that ends "
            "a document"
        )
    if data.packing == "padded":
        texts = islice(records(data, seed, MOST_TEXT_TOKENS, extent), samples)
        return pad(texts, seq_len, MOST_TEXT_TOKENS, data.loss_on == "text")
    usable = samples * seq_len + 1
    tokens = pack(documents(data, seed, usable, extent), min(usable, MOST_TEXT_TOKENS))
    return TokenCorpus(tokens, seq_len, vocab)


def pad(texts: Iterable[bytes], seq_len: int, limit: int, masked: bool) -> PaddedCorpus:
    """Every text that is not empty as a record, no more of it than a sample holds.

    What would go beyond `limit` tokens is left out.
    """
    pieces, ends = [END], [0]
    for text in texts:
        piece = tokens_of(text[: seq_len + 1])[: seq_len + 1]
        if ends[-1] + len(piece) > limit:
            break
        if text:
            pieces.append(piece)
            ends.append(ends[-1] + len(piece))
    return PaddedCorpus(torch.cat(pieces)[len(END) :], torch.tensor(ends), seq_len, masked)
