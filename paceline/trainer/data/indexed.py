"""Megatron's indexed data sets, mapped into memory, and the order in which Megatron reads them.

PREFIX.bin holds tokens, PREFIX.idx where sequences begin and end (the format is laid out in
NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py). A training's sequences are shuffled,
joined, cut into windows of seq_len + 1 tokens that share one with the next, and the windows
shuffled (gpt_dataset.py there): same files, seed and number of samples give the same samples.
"""

from __future__ import annotations

import mmap
import random
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError
from paceline.trainer.wording import counted

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
"""Of the last epoch's samples: where fewer are needed, it is shuffled by itself behind the rest."""
STATE_WORDS = 624
"""Of the generator MT19937."""


@dataclass(frozen=True)
class IndexedFile:
    """A data set."""

    tokens: Tensor
    starts: Tensor
    """(sequences + 1,) where each begins in `tokens`, and where the last one ends."""

    @property
    def num_sequences(self) -> int:
        """Sequences, which mostly are documents."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        """(sequences,) in tokens."""
        return self.starts[1:] - self.starts[:-1]


def read_indexed(path: str) -> IndexedFile:
    """The data set of a prefix; raises ConfigError when it is none, or is torn."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    try:
        with Path(f"{prefix}.idx").open("rb") as file:
            index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size_bytes = Path(f"{prefix}.bin").stat().st_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {prefix} is no indexed data set: {error}") from error
    if len(index) < HEAD.size or index[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"data: {prefix}.idx is no index of Megatron's indexed data sets")
    _, version, code, count, documents = HEAD.unpack(index[: HEAD.size])
    if version != 1 or code not in DTYPES:
        raise ConfigError(f"data: {prefix}.idx has version {version} and dtype code {code}")
    if len(index) < HEAD.size + 12 * count + 8 * documents or not count:
        raise ConfigError(f"data: {prefix}.idx is torn or empty; write it again")
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
            f"data: {prefix}.bin has {size_bytes} bytes of {size * dtype.itemsize} that its index "
            "speaks of"
        )
    tokens = torch.from_file(f"{prefix}.bin", shared=False, size=size, dtype=dtype)
    return IndexedFile(tokens, starts)


class NumpyShuffle:
    """numpy.random.RandomState(seed).shuffle, of the standard library's generator.

    Both are MT19937 and differ in how a seed becomes a state and a state a number below a bound;
    this is NumPy's way: Knuth's recurrence (1812433253), and bits that are drawn until they fit.
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
        """Shuffle in place; takes about 0.3 us a value."""
        bits = self._random.getrandbits
        for last in range(len(values) - 1, 0, -1):
            mask = (1 << last.bit_length()) - 1
            while (chosen := bits(32) & mask) > last:
                pass
            values[last], values[chosen] = values[chosen], values[last]


@dataclass(frozen=True)
class ShuffledFile:
    """Windows of a data set's sequences in a training's order."""

    file: IndexedFile
    seq_len: int
    order: Tensor
    """(epochs x sequences,) which sequence comes when."""
    ends: Tensor
    """(epochs x sequences,) tokens up to the end of each."""
    windows: Tensor
    """(samples,) which window of the joined sequences a sample is."""

    @property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return len(self.windows)

    def pieces(self, sample: int) -> list[slice]:
        """Where the seq_len + 1 tokens of a sample lie in the file, piece by piece."""
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


def shuffled(
    file: IndexedFile, sequences: range, num_samples: int, seq_len: int, seed: int
) -> ShuffledFile:
    """At least `num_samples` samples of some of a file's sequences, as Megatron takes them.

    So many epochs as it takes are shuffled together, the last one by itself where little of it is
    needed. Raises ConfigError when the sequences are too short for one sample.
    """
    tokens = int(file.starts[sequences.stop] - file.starts[sequences.start])
    if tokens == 0 or num_samples == 0:
        raise ConfigError("data: there is not one sample; use more documents")
    epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    apart = epochs > 1 and num_samples - before_last < int(
        LAST_EPOCH_SHARE * ((tokens - 1) // seq_len)
    )
    whole = [epochs - 1, 1] if apart else [epochs]
    generator = NumpyShuffle(seed)
    order = _joined([array("i", sequences) * count for count in whole], generator)
    # As 4-byte integers, and summed in place: a large data set has 10^8 sequences.
    lengths = file.lengths.to(torch.int32).index_select(0, order)
    ends = lengths.to(torch.int64).cumsum_(0)
    total = (epochs * tokens - 1) // seq_len
    cuts = [0, before_last, total] if apart else [0, total]
    parts = [array("q", range(*cut)) for cut in pairwise(cuts)]
    windows = _joined(parts, generator)
    if not len(windows):
        raise ConfigError(
            f"data: there is not one sample: {counted(tokens, 'token')} in all, and one takes "
            "seq_len + 1"
        )
    return ShuffledFile(file, seq_len, order, ends, windows)


def _joined(parts: Sequence[array[int]], generator: NumpyShuffle) -> Tensor:
    """Parts, each shuffled, one after the other, in integers of their own size."""
    for part in parts:
        generator.shuffle(part)
    dtype = torch.int32 if parts[0].itemsize == 4 else torch.int64
    filled = [torch.frombuffer(part, dtype=dtype) for part in parts if part]
    return filled[0] if len(filled) == 1 else torch.cat([torch.empty(0, dtype=dtype), *filled])
