"""Samples of Megatron's indexed datasets: one dataset, or several mixed by weight.

Packed samples and their order are those of Megatron-Core's GPTDataset and BlendedDataset for the
same files, weights, seed and number of samples. A split divides the documents in their order. In
padded mode every sequence is a sample, and a split shuffles and divides the sequences like other
records.

PREFIX.bin holds the tokens, and PREFIX.idx the bounds of the sequences (format: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py). The sequences of a training run are shuffled, joined and
cut into windows of seq_len + 1 tokens that overlap by one token. The windows are then shuffled too
(gpt_dataset.py there).
"""

from __future__ import annotations

import math
import mmap
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig, TrainerConfig
from paceline.trainer.data.samples import (
    Corpus,
    PaddedCorpus,
    PartCorpus,
    TokenCorpus,
    checked_ids,
    next_tokens,
    part_range,
    piece_bounds,
    require_samples,
    select_part,
    train_part,
)
from paceline.trainer.data.texts import map_bytes
from paceline.trainer.data.validation_split import nothing_left_error
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.schedule import BatchSizes

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    8: torch.uint16,
}
LAST_EPOCH_SHARE = 0.8
"""Fraction of the last epoch's samples; if fewer are needed, that epoch is shuffled separately."""
STATE_WORDS = 624
"""Number of state words of the MT19937 generator."""


@dataclass(frozen=True)
class IndexedFile:
    """One indexed dataset."""

    tokens: Tensor
    starts: Tensor
    """(sequences + 1,) start of each sequence in `tokens`, and the end of the last one."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences; most sequences are documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        """(sequences,) lengths in tokens."""
        return self.starts[1:] - self.starts[:-1]


def read_indexed(path: str) -> IndexedFile:
    """Return the dataset of a prefix; raises ConfigError if its files are invalid or truncated."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size_bytes = Path(f"{prefix}.bin").stat().st_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {prefix} is not an indexed dataset: {error}") from error
    if len(index) < HEAD.size or index[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"data: {prefix}.idx is not the index of a Megatron dataset")
    _, version, code, count, documents = HEAD.unpack(index[: HEAD.size])
    if version != 1 or code not in DTYPES:
        raise ConfigError(
            f"data: {prefix}.idx has version {version} and dtype code {code}; use version 1 and a "
            f"code of {', '.join(map(str, DTYPES))}"
        )
    if len(index) < HEAD.size + 12 * count + 8 * documents or not count:
        raise ConfigError(f"data: {prefix}.idx is truncated or empty; write it again")
    dtype = DTYPES[code]
    lengths = torch.frombuffer(index, dtype=torch.int32, count=count, offset=HEAD.size)
    places = torch.frombuffer(index, dtype=torch.int64, count=count, offset=HEAD.size + 4 * count)
    if int(lengths.min()) < 0:
        raise ConfigError(f"data: {prefix}.idx has a sequence of {int(lengths.min())} tokens")
    starts = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=starts[1:])
    if not torch.equal(starts[:-1] * dtype.itemsize, places):
        raise ConfigError(f"data: {prefix}.idx has gaps between its sequences; merge it again")
    size = int(starts[-1])
    if size * dtype.itemsize > size_bytes or not size:
        raise ConfigError(
            f"data: {prefix}.bin has {size_bytes} bytes, but its index lists tokens of "
            f"{size * dtype.itemsize} bytes"
        )
    tokens = torch.from_file(f"{prefix}.bin", shared=False, size=size, dtype=dtype)
    return IndexedFile(tokens, starts)


class NumpyShuffle:
    """Shuffle like numpy.random.RandomState(seed), built on the standard library's generator.

    Both generators are MT19937. They differ in how a seed becomes a state and how a state becomes a
    number below a bound. This class follows NumPy: Knuth's recurrence (1812433253), and bits drawn
    until they are in range.
    """

    def __init__(self, seed: int) -> None:
        words: list[int] = []
        word = seed & 0xFFFFFFFF
        for number in range(1, STATE_WORDS + 1):
            words.append(word)
            word = (1812433253 * (word ^ (word >> 30)) + number) & 0xFFFFFFFF
        self._random = random.Random()
        self._random.setstate((3, (*words, STATE_WORDS), None))

    def shuffle(self, values: array[int]) -> None:
        """Shuffle in place; takes about 0.3 us per value."""
        bits = self._random.getrandbits
        for last in range(len(values) - 1, 0, -1):
            mask = (1 << last.bit_length()) - 1
            while (other := bits(32) & mask) > last:
                pass
            values[last], values[other] = values[other], values[last]


@dataclass(frozen=True)
class ShuffledFile:
    """Windows of a dataset's sequences in the order of a training run."""

    file: IndexedFile
    seq_len: int
    order: Tensor
    """(epochs x sequences,) sequence at each position."""
    ends: Tensor
    """(epochs x sequences,) cumulative tokens up to the end of each position."""
    windows: Tensor
    """(samples,) window of the joined sequences that is each sample."""

    @property
    def num_samples(self) -> int:
        """Number of samples over all epochs."""
        return len(self.windows)

    def pieces(self, sample: int) -> list[slice]:
        """Return the slices of the file that hold the seq_len + 1 tokens of a sample."""
        start = int(self.windows[sample]) * self.seq_len
        end = start + self.seq_len + 1
        first = int(torch.searchsorted(self.ends, start, right=True))
        pieces: list[slice] = []
        while start < end:
            sequence, stop = int(self.order[first]), int(self.ends[first])
            shift = int(self.file.starts[sequence + 1]) - stop
            pieces.append(slice(start + shift, min(end, stop) + shift))
            start, first = min(end, stop), first + 1
        return pieces


def shuffle_file(
    file: IndexedFile, sequences: range, num_samples: int, seq_len: int, seed: int
) -> ShuffledFile:
    """Return at least `num_samples` samples of some of a file's sequences, in Megatron's order.

    As many epochs as needed are shuffled together; the last one is shuffled separately if little of
    it is needed. Raises ConfigError when the sequences are too short for one sample.
    """
    tokens = int(file.starts[sequences.stop] - file.starts[sequences.start])
    if tokens == 0 or num_samples == 0:
        raise ConfigError("data: not enough for one sample; use more documents")
    epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    separate_last = epochs > 1 and num_samples - before_last < int(
        LAST_EPOCH_SHARE * ((tokens - 1) // seq_len)
    )
    whole = [epochs - 1, 1] if separate_last else [epochs]
    generator = NumpyShuffle(seed)
    order = _shuffle_and_join([array("i", sequences) * count for count in whole], generator)
    # 4-byte integers, summed in place: a large dataset has 10^8 sequences.
    lengths = file.lengths.to(torch.int32).index_select(0, order)
    ends = lengths.to(torch.int64).cumsum_(0)
    total = (epochs * tokens - 1) // seq_len
    cuts = [0, before_last, total] if separate_last else [0, total]
    parts = [array("q", range(*bounds)) for bounds in pairwise(cuts)]
    windows = _shuffle_and_join(parts, generator)
    if not len(windows):
        raise ConfigError(
            f"data: not enough for one sample: the documents have {tokens:,} tokens, and a sample "
            "needs seq_len + 1"
        )
    return ShuffledFile(file, seq_len, order, ends, windows)


def _shuffle_and_join(parts: Sequence[array[int]], generator: NumpyShuffle) -> Tensor:
    """Shuffle each part and concatenate them, in their own integer size."""
    for part in parts:
        generator.shuffle(part)
    dtype = torch.int32 if parts[0].itemsize == 4 else torch.int64
    tensors = [torch.frombuffer(part, dtype=dtype) for part in parts if part]
    return tensors[0] if len(tensors) == 1 else torch.cat([torch.empty(0, dtype=dtype), *tensors])


SURPLUS = 0.005
"""Relative surplus of samples created for each part of a blend, as in Megatron."""


@dataclass(frozen=True)
class IndexedCorpus:
    """Samples of a training run in the order of their use, over all epochs."""

    parts: tuple[ShuffledFile, ...]
    part_ids: Tensor
    """(samples,) the part of each sample."""
    numbers: Tensor
    """(samples,) sample number within its part."""
    vocab_size: int
    mask: Tensor | None = None
    """Loss mask over the tokens of the only part; a target with 0 does not count."""
    document_mask: bool = False
    """True if attention is limited to documents, which are the file's sequences."""
    num_windows: None = field(default=None, init=False)

    @property
    def masked(self) -> bool:
        """True if some targets do not count."""
        return self.mask is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all samples, counted at each use."""
        return len(self.part_ids) * self.parts[0].seq_len

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens; every position is one."""
        return len(indices) * self.parts[0].seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return samples by their position in the run's order.

        Raises ConfigError for a token id outside the vocabulary.
        """
        windows: list[Tensor] = []
        counts: list[Tensor] = []
        lengths: list[list[int]] = []
        for index in indices:
            turn = index % len(self.part_ids)
            part = self.parts[self.part_ids[turn]]
            pieces = part.pieces(int(self.numbers[turn]))
            ids = [checked_ids(part.file.tokens[p], self.vocab_size, p.start) for p in pieces]
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
    """Return the training samples; raises ConfigError for files that are invalid or too short."""
    data, training = config.data, config.training
    if data.packing == "padded":
        return train_part(config, select_part(padded_corpus(config, data, vocab_size), data))
    samples = BatchSizes(training.ramp_up, training.global_batch).samples_before(training.steps)
    weights = [weight for _, weight in data.blend]
    sizes = part_sizes(samples, weights, SURPLUS) if weights else [samples]
    parts: list[ShuffledFile] = []
    for path, size in zip(dataset_paths(data), sizes, strict=True):
        file = read_indexed(path)
        sequences = train_sequences(config, file)
        parts.append(shuffle_file(file, sequences, size, training.seq_len, training.seed))
    part_ids, numbers = (
        blending_indices(sum(part_sizes(samples, weights)), weights)
        if weights
        else single_file_indices(parts)
    )
    mask = None if data.loss_mask is None else read_mask(data.loss_mask, parts[0].file)
    return IndexedCorpus(tuple(parts), part_ids, numbers, vocab_size, mask, data.document_mask)


def load_validation_indexed(config: TrainerConfig, vocab_size: int) -> Corpus:
    """Return the evaluation samples: the first ones of a file, or of the held-out part.

    Raises ConfigError when there are too few.
    """
    evaluation, data, training = config.training.evaluation, config.data, config.training
    assert evaluation is not None, "evaluation is configured"
    held_out = evaluation.path is None
    path = evaluation.path or dataset_paths(data)[0]
    loss_mask = evaluation.loss_mask or (data.loss_mask if held_out else None)
    data = replace(data, path=path, blend=(), loss_mask=loss_mask)
    if data.packing == "padded":
        part = select_part(padded_corpus(config, data, vocab_size), data)
        selection = slice(-evaluation.samples, None) if held_out else slice(evaluation.samples)
        return require_samples(
            PartCorpus(part.whole, part.indices[selection]), evaluation.samples, path
        )
    file = read_indexed(path)
    sequences = split_sequences(data, file)
    first = train_sequences(config, file).stop if held_out else sequences.start
    tokens = slice(int(file.starts[first]), int(file.starts[sequences.stop]))
    mask = None if loss_mask is None else read_mask(loss_mask, file)[tokens]
    ends = file.starts[first + 1 : sequences.stop + 1] - tokens.start
    corpus = TokenCorpus(
        file.tokens[tokens],
        training.seq_len,
        vocab_size,
        mask,
        ends if data.document_mask else None,
    )
    return require_samples(corpus, evaluation.samples, path)


def dataset_paths(data: DataConfig) -> list[str]:
    """Return the datasets' paths of a training run; raises ConfigError if there are none."""
    names = [path for path, _ in data.blend] or ([data.path] if data.path else [])
    if not names:
        raise ConfigError("data.path: source indexed needs a path or a blend")
    return names


def padded_corpus(config: TrainerConfig, data: DataConfig, vocab_size: int) -> PaddedCorpus:
    """Return every sequence of the only file as a sample."""
    if data.blend:
        raise ConfigError("data.blend: padded samples come from one dataset; use data.path")
    file = read_indexed(dataset_paths(data)[0])
    mask = None if data.loss_mask is None else read_mask(data.loss_mask, file)
    masked = data.loss_on == "text" or mask is not None
    seq_len = config.training.seq_len
    return PaddedCorpus(file.tokens, file.starts, seq_len, masked, vocab_size, mask)


def split_sequences(data: DataConfig, file: IndexedFile) -> range:
    """Return the sequences of a run's part of a file, divided like Megatron's `--split`."""
    everything = range(file.num_sequences)
    if data.split is None:
        return everything
    return everything[part_range(data.split, data.split_part, len(everything))]


def train_sequences(config: TrainerConfig, file: IndexedFile) -> range:
    """Return the sequences of a run's part, without the last ones if evaluations need them."""
    sequences, evaluation = split_sequences(config.data, file), config.training.evaluation
    if evaluation is None or evaluation.path is not None:
        return sequences
    if config.data.blend:
        raise ConfigError(
            "training.evaluation.path: a blend needs a separate evaluation file; set the path"
        )
    held_out_tokens = evaluation.samples * config.training.seq_len + 1
    last_start = int(file.starts[sequences.stop]) - held_out_tokens
    end = int(torch.searchsorted(file.starts, last_start, right=True)) - 1
    if end <= sequences.start:
        raise nothing_left_error(str(config.data.path))
    return range(sequences.start, end)


def part_sizes(samples: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """Return the number of samples of each part of a blend: its share and surplus, rounded up."""
    shares = normalize(weights)
    return [math.ceil(math.ceil(samples * share) * (1 + surplus)) for share in shares]


def normalize(weights: Sequence[float]) -> list[float]:
    """Return the weights as fractions of 1.

    They are rounded like NumPy's, because rounding decides ties in `blending_indices`.
    """
    total = numpy_sum(weights)
    return [weight / total for weight in weights]


def numpy_sum(values: Sequence[float]) -> float:
    """Return numpy.sum of float64 values, bit by bit.

    It uses eight partial sums, and halves for more than 128 values. Source: NumPy, pairwise
    summation in loops_utils.h.src.
    """
    count = len(values)
    if count > 128:
        half = count // 2 - count // 2 % 8
        return numpy_sum(values[:half]) + numpy_sum(values[half:])
    total, remainder = 0.0, values
    if count >= 8:
        even = count - count % 8
        lanes = list(values[:8])
        for at in range(8, even):
            lanes[at % 8] += values[at]
        pairs = [lanes[at] + lanes[at + 1] for at in range(0, 8, 2)]
        total, remainder = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]), values[even:]
    for value in remainder:
        total += value
    return total


def blending_indices(samples: int, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return (part, number in its part) of each sample, from the part furthest below its share.

    Ties go to the first part, as in Megatron's build_blending_indices. That function normalizes the
    weights a second time, which changes their last bits.
    """
    shares = normalize(normalize(weights))
    counts = [0] * len(shares)
    part_ids, numbers = array("q"), array("q")
    for sample in range(samples):
        lags = [share * max(sample, 1) - count for share, count in zip(shares, counts, strict=True)]
        part = lags.index(max(lags))
        part_ids.append(part)
        numbers.append(counts[part])
        counts[part] += 1
    return torch.tensor(part_ids), torch.tensor(numbers)


def single_file_indices(parts: Sequence[ShuffledFile]) -> tuple[Tensor, Tensor]:
    """Return (part, number in its part) of each sample of a single dataset."""
    count = parts[0].num_samples
    return torch.zeros(count, dtype=torch.int64), torch.arange(count)


def read_mask(path: str, file: IndexedFile) -> Tensor:
    """Return one byte per token of a file; raises ConfigError for another size."""
    return map_bytes(path, len(file.tokens), "the dataset")
