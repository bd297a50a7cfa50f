"""safetensors files: 8 bytes that say how long the header is, a JSON header, then the tensors.

The header is {name: {dtype, shape, data_offsets}}, and may say more under __metadata__
(huggingface/safetensors, README).
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.trainer.checkpoint_reader import CorruptCheckpointError

LARGEST_HEADER = 100_000_000
"""Bytes, the format's own limit."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ALIGNMENT = 8
"""Bytes, of the first tensor."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file."""


def stored_tensors(
    file: str, entries: Mapping[str, Any], start: int, end: int
) -> dict[str, Stored]:
    """Tensors of floats in a file whose bytes from `start` to `end` hold them, by its header.

    Raises CorruptCheckpointError for one that lies elsewhere; integers, as the masks of old GPT-2
    files, are left out. A header of another form raises KeyError, TypeError or ValueError.
    """
    tensors: dict[str, Stored] = {}
    for name, entry in entries.items():
        if name == "__metadata__" or entry["dtype"] not in DTYPES:
            continue
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = (start + at for at in entry["data_offsets"])
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise CorruptCheckpointError(f"{file} is broken: {name} has no size"[:200])
        if not start <= first <= last <= end or last - first != prod(shape) * dtype.itemsize:
            raise CorruptCheckpointError(f"{file} is torn: {name}"[:200])
        if last > first:
            tensors[name] = Stored(file, dtype, shape, first)
    return tensors


class SafetensorsFile:
    """The tensors of floats in a file, which is mapped into memory.

    Raises CorruptCheckpointError for a file that is torn or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        length = path.stat().st_size
        with path.open("rb") as file:
            # A file of no bytes cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if length else b""
        header = int.from_bytes(content[:8], "little")
        if isinstance(content, bytes) or not 0 < header <= min(LARGEST_HEADER, length - 8):
            raise CorruptCheckpointError(f"{path.name} is no safetensors file, or is torn")
        self.content = content
        try:
            entries = json.loads(content[8 : 8 + header])
            self.stored = stored_tensors(path.name, entries, 8 + header, length)
        except CorruptCheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path.name} is broken: {error!r}"[:200]) from error

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file, without a copy."""
        return mapped(self.content, self.stored[name])


def mapped(content: mmap.mmap, stored: Stored) -> Tensor:
    """A tensor in a file's bytes."""
    count, start = prod(stored.shape), stored.start
    flat = torch.frombuffer(content, dtype=stored.dtype, count=count, offset=start)
    return flat.view(stored.shape)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What a tensor takes in a file."""
    return prod(shape) * dtype.itemsize


class WrittenFile:
    """A file of tensors to be filled, mapped into memory; all its room is taken at once.

    Raises OSError where there is not enough: a mapped file that runs out of disk ends the process.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        names = {dtype: name for name, dtype in DTYPES.items()}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        at = 0
        # Wide elements first, so that all lie at multiples of their size.
        for name in sorted(tensors, key=lambda name: -tensors[name][1].itemsize):
            shape, dtype = tensors[name]
            end = at + bytes_of(shape, dtype)
            entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [at, end]}
            starts[name], at = at, end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        begin = 8 + len(header)
        with path.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, begin + at)
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            self.content = mmap.mmap(file.fileno(), begin + at)
        self.bytes = begin + at
        self.tensors = {
            name: mapped(self.content, Stored(path.name, dtype, shape, begin + starts[name]))
            for name, (shape, dtype) in tensors.items()
        }

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        self.content.flush()
