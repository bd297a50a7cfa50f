"""Samples of Megatron's indexed data sets: one, or several mixed by weight.

Packed, samples and their order are those of Megatron-Core's GPTDataset and BlendedDataset for the
same files, weights, seed and number of samples; a split is cut through the documents in their
order. Padded, every sequence is a sample, and a split shuffles and cuts these as of other records.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.document_bounds import piece_bounds
from paceline.trainer.data.indexed import IndexedFile, ShuffledFile, read_indexed, shuffled
from paceline.trainer.data.samples import (
    Corpus,
    PaddedCorpus,
    PartCorpus,
    TokenCorpus,
    enough,
    known,
    next_tokens,
    part_of,
    part_range,
    train_part,
)
from paceline.trainer.data.texts import map_bytes
from paceline.trainer.data.validation_split import too_little
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.schedule import BatchSizes

SURPLUS = 0.005
"""More samples than needed that are made of each part of a blend, as Megatron does."""


@dataclass(frozen=True)
class IndexedCorpus:
    """A training's samples in the order in which it takes them, over all epochs."""

    parts: tuple[ShuffledFile, ...]
    chosen: Tensor
    """(samples,) the part of each sample."""
    numbers: Tensor
    """(samples,) which sample of its part each is."""
    vocab_size: int
    mask: Tensor | None = None
    """For each token of the only part, 0 where it counts for nothing as a target."""
    document_mask: bool = False
    """Whether attention keeps to documents, which are a file's sequences."""
    num_windows: None = field(default=None, init=False)

    @property
    def masked(self) -> bool:
        """Whether some targets count for nothing."""
        return self.mask is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, each time that one is used."""
        return len(self.chosen) * self.parts[0].seq_len

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.parts[0].seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Samples by their turn; raises ConfigError for an id that the model does not know."""
        windows: list[Tensor] = []
        counts: list[Tensor] = []
        lengths: list[list[int]] = []
        for index in indices:
            turn = index % len(self.chosen)
            part = self.parts[self.chosen[turn]]
            pieces = part.pieces(int(self.numbers[turn]))
            ids = [known(part.file.tokens[p], self.vocab_size, p.start) for p in pieces]
            windows.append(torch.cat(ids))
            lengths.append([len(piece) for piece in ids])
            if self.mask is not None:
                counts.append(torch.cat([self.mask[p] for p in pieces]))
        inputs, targets = next_tokens(windows, cp)
        if counts:
            targets = targets.masked_fill(next_tokens(counts, cp)[1] == 0, IGNORE_INDEX)
        if not self.document_mask:
            return inputs, targets
        return inputs, targets, piece_bounds(lengths, self.parts[0].seq_len)


def load_indexed(config: TrainerConfig, vocab_size: int) -> Corpus:
    """What is trained on; raises ConfigError for files that are none, or too short."""
    data, training = config.data, config.training
    if data.packing == "padded":
        return train_part(config, part_of(padded(config, data, vocab_size), data))
    samples = BatchSizes(training.ramp_up, training.global_batch).consumed(training.steps)
    weights = [weight for _, weight in data.blend]
    sizes = part_sizes(samples, weights, SURPLUS) if weights else [samples]
    parts: list[ShuffledFile] = []
    for path, size in zip(paths(data), sizes, strict=True):
        file = read_indexed(path)
        sequences = trained_on(config, file)
        parts.append(shuffled(file, sequences, size, training.seq_len, training.seed))
    chosen, numbers = (
        blended(sum(part_sizes(samples, weights)), weights) if weights else alone(parts)
    )
    mask = None if data.loss_mask is None else mask_of(data.loss_mask, parts[0].file)
    return IndexedCorpus(tuple(parts), chosen, numbers, vocab_size, mask, data.document_mask)


def load_validation_indexed(config: TrainerConfig, vocab_size: int) -> Corpus:
    """What evaluations go over: the first samples of a file, in its order, or of what is held out.

    Raises ConfigError when there are too few.
    """
    evaluation, data, training = config.training.evaluation, config.data, config.training
    assert evaluation is not None, "there is something to evaluate"
    held_out = evaluation.path is None
    path = evaluation.path or paths(data)[0]
    masked = evaluation.loss_mask or (data.loss_mask if held_out else None)
    data = replace(data, path=path, blend=(), loss_mask=masked)
    if data.packing == "padded":
        part = part_of(padded(config, data, vocab_size), data)
        kept = slice(-evaluation.samples, None) if held_out else slice(evaluation.samples)
        return enough(PartCorpus(part.whole, part.indices[kept]), evaluation.samples, path)
    file = read_indexed(path)
    sequences = of_split(data, file)
    first = trained_on(config, file).stop if held_out else sequences.start
    tokens = slice(int(file.starts[first]), int(file.starts[sequences.stop]))
    mask = None if masked is None else mask_of(masked, file)[tokens]
    ends = file.starts[first + 1 : sequences.stop + 1] - tokens.start
    corpus = TokenCorpus(
        file.tokens[tokens],
        training.seq_len,
        vocab_size,
        mask,
        ends if data.document_mask else None,
    )
    return enough(corpus, evaluation.samples, path)


def paths(data: DataConfig) -> list[str]:
    """The data sets of a training; raises ConfigError when it names none."""
    names = [path for path, _ in data.blend] or ([data.path] if data.path else [])
    if not names:
        raise ConfigError("data.path: source indexed needs a path or a blend")
    return names


def padded(config: TrainerConfig, data: DataConfig, vocab_size: int) -> PaddedCorpus:
    """Every sequence of the only file as a sample."""
    if data.blend:
        raise ConfigError("data.blend: padded samples are of one data set; use data.path")
    file = read_indexed(paths(data)[0])
    mask = None if data.loss_mask is None else mask_of(data.loss_mask, file)
    masked = data.loss_on == "text" or mask is not None
    seq_len = config.training.seq_len
    return PaddedCorpus(file.tokens, file.starts, seq_len, masked, vocab_size, mask)


def of_split(data: DataConfig, file: IndexedFile) -> range:
    """The sequences of a run's part of a file, cut as Megatron's `--split` cuts them."""
    everything = range(file.num_sequences)
    if data.split is None:
        return everything
    return everything[part_range(data.split, data.split_part, len(everything))]


def trained_on(config: TrainerConfig, file: IndexedFile) -> range:
    """The same without the last sequences, if evaluations need their tokens."""
    sequences, evaluation = of_split(config.data, file), config.training.evaluation
    if evaluation is None or evaluation.path is not None:
        return sequences
    if config.data.blend:
        raise ConfigError("training.evaluation.path: a blend is evaluated on a file of its own")
    needed = evaluation.samples * config.training.seq_len + 1
    last_start = int(file.starts[sequences.stop]) - needed
    kept = int(torch.searchsorted(file.starts, last_start, right=True)) - 1
    if kept <= sequences.start:
        raise too_little(str(config.data.path))
    return range(sequences.start, kept)


def part_sizes(samples: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """Samples of each part of a blend: its share, rounded up, and some more."""
    shares = normalized(weights)
    return [math.ceil(math.ceil(samples * share) * (1 + surplus)) for share in shares]


def normalized(weights: Sequence[float]) -> list[float]:
    """Shares of 1, rounded as NumPy rounds them: a tie of shares decides whose turn it is."""
    total = numpy_sum(weights)
    return [weight / total for weight in weights]


def numpy_sum(values: Sequence[float]) -> float:
    """numpy.sum of float64, bit by bit: eight partial sums, halves of what is longer than 128.

    Source: NumPy, pairwise summation in loops_utils.h.src.
    """
    count = len(values)
    if count > 128:
        half = count // 2 - count // 2 % 8
        return numpy_sum(values[:half]) + numpy_sum(values[half:])
    total, rest = 0.0, values
    if count >= 8:
        even = count - count % 8
        lanes = list(values[:8])
        for at in range(8, even):
            lanes[at % 8] += values[at]
        pairs = [lanes[at] + lanes[at + 1] for at in range(0, 8, 2)]
        total, rest = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]), values[even:]
    for value in rest:
        total += value
    return total


def blended(samples: int, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(part, number in its part) of each sample: always the part that lags most behind its share.

    Of parts that lag alike the first, as Megatron's build_blending_indices. It normalizes weights a
    second time, which moves their last bits.
    """
    shares = normalized(normalized(weights))
    taken = [0] * len(shares)
    chosen, numbers = array("q"), array("q")
    for sample in range(samples):
        lags = [share * max(sample, 1) - count for share, count in zip(shares, taken, strict=True)]
        part = lags.index(max(lags))
        chosen.append(part)
        numbers.append(taken[part])
        taken[part] += 1
    return torch.tensor(chosen), torch.tensor(numbers)


def alone(parts: Sequence[ShuffledFile]) -> tuple[Tensor, Tensor]:
    """The same of one data set."""
    count = parts[0].num_samples
    return torch.zeros(count, dtype=torch.int64), torch.arange(count)


def mask_of(path: str, file: IndexedFile) -> Tensor:
    """One byte for each token of a file; raises ConfigError for another number."""
    return map_bytes(path, len(file.tokens), "the data set")
