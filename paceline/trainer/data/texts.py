"""Text as tokens, from the interpreter's own sources, or from a text, jsonl or token file.

Text becomes bytes: ids 0-255, and 256 ends a document.
"""

from __future__ import annotations

import json
import os
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.trainer.config import ConfigError, DataConfig

END_OF_DOCUMENT = 256
BYTE_VOCAB = 257
END = torch.tensor([END_OF_DOCUMENT], dtype=torch.int16)
PARAGRAPHS = re.compile(rb"\n\s*\n")
MAX_TEXT_TOKENS = 2**27
"""Text is stored in memory (2 bytes per token); longer runs repeat this much of it."""
TOKEN_DTYPES = {
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class Extent:
    """The part of a source to read: bytes of its file, or files of the standard library."""

    start: int = 0
    end: int | None = None
    files: tuple[Path, ...] | None = None


WHOLE_SOURCE = Extent()


def tokens_of(text: bytes) -> Tensor:
    """Return a text's tokens followed by the end mark."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else END[:0]
    return torch.cat([ids.to(torch.int16), END])


def pack(texts: Iterable[bytes], limit: int) -> Tensor:
    """Concatenate documents with their end marks, up to `limit` tokens."""
    pieces = [END[:0]]
    total = 0
    for text in texts:
        if text:
            pieces.append(tokens_of(text))
            total += len(text) + 1
        if total >= limit:
            break
    return torch.cat(pieces)[:limit]


def document_ends(tokens: Tensor) -> Tensor:
    """Return (documents,) end positions in `tokens`, each after the document's end mark."""
    return (tokens == END_OF_DOCUMENT).nonzero().flatten() + 1


def records(
    data: DataConfig, seed: int, limit: int, extent: Extent = WHOLE_SOURCE
) -> Iterator[bytes]:
    """Return the samples of a padded run: lines of jsonl, or paragraphs of texts."""
    texts = documents(data, seed, limit, extent)
    return texts if data.source == "jsonl" else (p for text in texts for p in paragraphs(text))


def paragraphs(text: bytes) -> Iterator[bytes]:
    """Split a text at blank lines."""
    return (part.strip(b"\r\n") for part in PARAGRAPHS.split(text) if part.strip())


def documents(
    data: DataConfig, seed: int, limit: int, extent: Extent = WHOLE_SOURCE
) -> Iterator[bytes]:
    """Yield the texts of a source as UTF-8 bytes; the standard library is shuffled by the seed."""
    if data.source == "stdlib":
        return _shuffled_files(stdlib_paths() if extent.files is None else extent.files, seed)
    if data.path is None:
        raise ConfigError(f"data.path: source {data.source} needs a file")
    if data.source == "text":
        return _text_file(data.path, min(limit, MAX_TEXT_TOKENS), extent)
    return _jsonl_texts(data.path, data.text_key, extent)


def map_tokens(data: DataConfig, limit: int | None) -> Tensor:
    """Map at most `limit` tokens (None: all) of a binary file into memory."""
    if data.path is None:
        raise ConfigError("data.path: source tokens needs a file")
    if data.token_dtype not in TOKEN_DTYPES:
        raise ConfigError(
            f"data.token_dtype {data.token_dtype}: use one of {', '.join(TOKEN_DTYPES)}"
        )
    dtype = TOKEN_DTYPES[data.token_dtype]
    size, remainder = divmod(Path(data.path).stat().st_size, dtype.itemsize)
    if remainder or not size:
        raise ConfigError(
            f"data.path: {data.path} is empty or not a whole number of {data.token_dtype} tokens"
        )
    count = size if limit is None else min(size, limit)
    return torch.from_file(data.path, shared=False, size=count, dtype=dtype)


def map_mask(path: str, data: DataConfig) -> Tensor:
    """Map the mask of `data`'s file; raise ConfigError unless it has one byte per token."""
    return map_bytes(path, map_tokens(data, None).numel(), str(data.path))


def map_bytes(path: str, num_tokens: int, of: str) -> Tensor:
    """Map (num_tokens,) bytes of a mask; raise ConfigError for another size."""
    size = Path(path).stat().st_size
    if size != num_tokens:
        raise ConfigError(
            f"loss_mask: {path} has {size:,} bytes, but {of} has {num_tokens:,} tokens; "
            "the mask must have one byte per token"
        )
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


@cache
def stdlib_paths() -> tuple[Path, ...]:
    """Return the source files of the interpreter's standard library."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "__pycache__"})
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return tuple(paths)


def _shuffled_files(paths: Sequence[Path], seed: int) -> Iterator[bytes]:
    order = list(paths)
    random.Random(seed).shuffle(order)
    for path in order:
        yield path.read_bytes()


def _text_file(path: str, limit: int, extent: Extent) -> Iterator[bytes]:
    """Yield the needed part of a file as one document."""
    with Path(path).open("rb") as file:
        file.seek(extent.start)
        yield file.read(limit if extent.end is None else min(limit, extent.end - extent.start))


def _jsonl_texts(path: str, key: str, extent: Extent) -> Iterator[bytes]:
    """Yield the text field of every record; raise ConfigError with the line that has none."""
    with Path(path).open("rb") as file:
        file.seek(extent.start)
        place = extent.start
        for number, line in enumerate(file, start=1):
            if extent.end is not None and place >= extent.end:
                return
            place += len(line)
            if line.strip():
                yield text_of(line, key, f"{path}:{number}" if not extent.start else path)


def text_of(line: bytes, key: str, where: str) -> bytes:
    """Return the text of a jsonl record; raise ConfigError at `where` when it has none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: the record has no text in field {key!r}")
    return text.encode()
