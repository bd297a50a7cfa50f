"""Reader and writer of safetensors files.

A file has 8 bytes with the header's length, a JSON header and the tensors. The header is {name:
{dtype, shape, data_offsets}} with optional __metadata__ (huggingface/safetensors, README).
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

MAX_HEADER_BYTES = 100_000_000
"""Maximum header size that the format allows, in bytes."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ALIGNMENT = 8
"""Alignment of the first tensor in bytes."""


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset in the file in bytes."""


def parse_header(
    file: str, entries: Mapping[str, Any], start: int, end: int
) -> dict[str, TensorLocation]:
    """Return the floating-point tensors of a header whose data is at bytes `start` to `end`.

    Raise CorruptCheckpointError for a tensor outside this range. Integers, such as the masks of old
    GPT-2 files, are ignored. An invalid header raises KeyError, TypeError or ValueError.
    """
    tensors: dict[str, TensorLocation] = {}
    for name, entry in entries.items():
        if name == "__metadata__" or entry["dtype"] not in DTYPES:
            continue
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = (start + at for at in entry["data_offsets"])
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise CorruptCheckpointError(f"{file} is corrupt: {name} has no valid size"[:200])
        if not start <= first <= last <= end or last - first != prod(shape) * dtype.itemsize:
            raise CorruptCheckpointError(f"{file} is truncated or corrupt: {name}"[:200])
        if last > first:
            tensors[name] = TensorLocation(file, dtype, shape, first)
    return tensors


class SafetensorsFile:
    """The floating-point tensors of a file, mapped into memory.

    Raise CorruptCheckpointError for a file that is truncated or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        length = path.stat().st_size
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if length else b""
        header = int.from_bytes(content[:8], "little")
        if isinstance(content, bytes) or not 0 < header <= min(MAX_HEADER_BYTES, length - 8):
            raise CorruptCheckpointError(f"{path.name} is truncated or not a safetensors file")
        self.content = content
        try:
            entries = json.loads(content[8 : 8 + header])
            self.locations = parse_header(path.name, entries, 8 + header, length)
        except CorruptCheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path.name} is corrupt: {error!r}"[:200]) from error

    def tensor(self, name: str) -> Tensor:
        """Return a tensor without a copy."""
        return tensor_at(self.content, self.locations[name])


def tensor_at(content: mmap.mmap, location: TensorLocation) -> Tensor:
    """Return a tensor of a mapped file."""
    count, start = prod(location.shape), location.start
    flat = torch.frombuffer(content, dtype=location.dtype, count=count, offset=start)
    return flat.view(location.shape)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return prod(shape) * dtype.itemsize


class SafetensorsWriter:
    """A new file of tensors, mapped into memory, with its disk space allocated.

    Raise OSError when the disk is full; running out of space in a mapping would kill the process.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        names = {dtype: name for name, dtype in DTYPES.items()}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        at = 0
        # Wide dtypes first, so that all tensors are aligned to their element size.
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
            name: tensor_at(
                self.content, TensorLocation(path.name, dtype, shape, begin + starts[name])
            )
            for name, (shape, dtype) in tensors.items()
        }

    def sync(self) -> None:
        """Flush the file to the disk."""
        self.content.flush()
