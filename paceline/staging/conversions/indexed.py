"""Megatron's indexed data set: a `.bin` file of tokens and an `.idx` file that says where they lie.

PREFIX.bin: the tokens of all sequences, one after the other, and nothing else.
PREFIX.idx, all little-endian: b"MMIDIDX\\0\\0", version 1 (u64), dtype code (u8), number of
sequences (u64), number of document ends (u64), each sequence's length in tokens (i32), its place in
.bin in bytes (i64), then 0 and for each document the number of the sequence behind it (i64).
Source of the format: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

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
DTYPES = {code: np.dtype(name) for name, code in CODES.items()}
SMALL_VOCABULARY = 65500
"""Below it a token takes two bytes, as Megatron chooses."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The element type that Megatron takes for a vocabulary: uint16 or int32."""
    return np.dtype("uint16" if vocab_size < SMALL_VOCABULARY else "int32")


def prefix_of(path: Path | str) -> Path:
    """A data set's path without .bin and .idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def files_of(prefix: Path) -> tuple[Path, Path]:
    """(PREFIX.bin, PREFIX.idx); dots of the prefix stay."""
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


class IndexedWriter(AbstractContextManager["IndexedWriter"]):
    """Writes a data set; its files get their names when it is whole, the index last.

    Left by an exception it leaves nothing, killed it leaves files that end in `.part`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.num_tokens = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._num_sequences = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._parts = [Path(f"{path}.{os.getpid()}.part") for path in files_of(prefix)]
        self._bin = self._parts[0].open("wb")

    def add(self, tokens: bytes, lengths: NDArray[np.int32]) -> None:
        """Documents of a sequence each, by length; one without tokens has no sequence."""
        self._bin.write(tokens)
        self.num_tokens += len(tokens) // self.dtype.itemsize
        full = lengths > 0
        self._lengths.append(lengths[full].astype(np.int32))
        self._documents.append(self._num_sequences + np.cumsum(full, dtype=np.int64))
        self._num_sequences += int(full.sum())

    def add_documents(self, documents: Iterable[Iterable[int]]) -> None:
        """Documents of a sequence each, as token ids."""
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


@dataclass(frozen=True)
class IndexedSet:
    """A data set that was read: its tokens are mapped into memory."""

    prefix: Path
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    """(sequences,) in tokens."""
    starts: NDArray[np.int64]
    """(sequences,) where each begins in `tokens`."""
    documents: NDArray[np.int64]
    """(documents + 1,) numbers of sequences between documents."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.documents) - 1

    def sequence(self, index: int) -> NDArray[Any]:
        """(length,) tokens of a sequence."""
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]]


def read_indexed(path: Path | str) -> IndexedSet:
    """The data set of a prefix, or of one of its two files.

    Raises UserError when one is missing, is no such file, or does not fit to the other.
    """
    prefix = prefix_of(path)
    bin_path, idx_path = files_of(prefix)
    for file in (bin_path, idx_path):
        if not file.is_file():
            raise UserError(str(file), "is not a file", remedy="a data set is PREFIX.bin and .idx")
    content = idx_path.read_bytes()
    if len(content) < HEAD.size or not content.startswith(MAGIC):
        raise UserError(str(idx_path), "is no index of Megatron's indexed data sets")
    _, version, code, sequences, ends = HEAD.unpack_from(content)
    if version != VERSION or code not in DTYPES:
        raise UserError(
            str(idx_path),
            f"has version {version}, dtype code {code}",
            allowed="version 1, codes 1-8",
        )
    needed_bytes = HEAD.size + 12 * sequences + 8 * ends
    if len(content) < needed_bytes or ends < 1:
        raise UserError(str(idx_path), f"has {len(content)} bytes of {needed_bytes}: it is torn")
    lengths = np.frombuffer(content, "<i4", sequences, HEAD.size)
    places = np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", ends, HEAD.size + 12 * sequences)
    dtype = DTYPES[code]
    size_bytes = bin_path.stat().st_size
    last_bytes = int((places + lengths.astype(np.int64) * dtype.itemsize).max(initial=0))
    if last_bytes > size_bytes or size_bytes % dtype.itemsize:
        raise UserError(
            str(bin_path), f"has {size_bytes} bytes, and its index speaks of {last_bytes}"
        )
    tokens = np.memmap(bin_path, dtype, "r") if size_bytes else np.zeros(0, dtype)
    return IndexedSet(prefix, tokens, lengths, places // dtype.itemsize, documents)
