"""Writer of Megatron's indexed data set: a `.bin` file of tokens and an `.idx` file of offsets.

PREFIX.bin: the concatenated tokens of all sequences, without a header.
PREFIX.idx, all little-endian: b"MMIDIDX\\0\\0", version 1 (u64), dtype code (u8), number of
sequences (u64), number of document ends (u64), the length of each sequence in tokens (i32), its
offset in .bin in bytes (i64), then 0 and the index of the sequence after each document (i64).
Source of the format: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEAD = struct.Struct("<9sQBQQ")
CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
SMALL_VOCABULARY = 65500
"""Vocabulary size below which Megatron stores a token in two bytes."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the element type that Megatron uses for a vocabulary size: uint16 or int32."""
    return np.dtype("uint16" if vocab_size < SMALL_VOCABULARY else "int32")


def prefix_of(path: Path | str) -> Path:
    """Return the path of a data set without .bin or .idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def files_of(prefix: Path) -> tuple[Path, Path]:
    """Return (PREFIX.bin, PREFIX.idx); dots in the prefix are kept."""
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def part_path(path: Path) -> Path:
    """Return a path for the partial file, unique across processes and hosts."""
    return path.with_name(f"{path.name}.{uuid4().hex}.part")


class IndexedWriter(AbstractContextManager["IndexedWriter"]):
    """Writer of a data set, whose files are renamed when they are complete, the index last.

    After an exception no file remains; a killed process leaves files that end in `.part`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.num_tokens = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._num_sequences = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._parts = [part_path(path) for path in files_of(prefix)]
        self._bin = self._parts[0].open("wb")

    def add(self, tokens: bytes, lengths: NDArray[np.int32]) -> None:
        """Add documents of one sequence each.

        `lengths` are their lengths in tokens; an empty document has no sequence.
        """
        self._bin.write(tokens)
        self.num_tokens += len(tokens) // self.dtype.itemsize
        full = lengths > 0
        self._lengths.append(lengths[full].astype(np.int32))
        self._documents.append(self._num_sequences + np.cumsum(full, dtype=np.int64))
        self._num_sequences += int(full.sum())

    def add_documents(self, documents: Iterable[Iterable[int]]) -> None:
        """Add documents of one sequence each, as token ids."""
        arrays = [np.fromiter(document, self.dtype) for document in documents]
        self.add(
            b"".join(array.tobytes() for array in arrays),
            np.array([len(array) for array in arrays], np.int32),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._bin:
                if kind is None:
                    self._finish()
        finally:
            for part in self._parts:
                part.unlink(missing_ok=True)

    def _finish(self) -> None:
        self._bin.flush()
        os.fsync(self._bin.fileno())
        with self._parts[1].open("wb") as file:
            file.writelines(self._index())
            file.flush()
            os.fsync(file.fileno())
        for part, path in zip(self._parts, files_of(self.prefix), strict=True):
            part.replace(path)

    def _index(self) -> Iterable[bytes]:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        documents = np.concatenate(self._documents)
        code = CODES[self.dtype.name]
        yield HEAD.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        yield lengths.astype("<i4").tobytes()
        yield (ends - lengths * np.int64(self.dtype.itemsize)).astype("<i8").tobytes()
        yield documents.astype("<i8").tobytes()
