"""Text as tokens, from the interpreter's own sources, a text, jsonl or token file.

Text becomes bytes: ids 0-255, and 256 ends a document.
"""

from __future__ import annotations

import json
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from config import ConfigError, DataConfig

END_OF_DOCUMENT = 256
BYTE_VOCAB = 257
END = torch.tensor([END_OF_DOCUMENT], dtype=torch.int16)
PARAGRAPHS = re.compile(rb"\n\s*\n")
MOST_TEXT_TOKENS = 2**27
"""Text is held in memory (2 bytes a token); longer runs read this much and go over it again."""
TOKEN_DTYPES = {
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}


def tokens_of(text: bytes) -> Tensor:
    """A text as tokens, with its end mark."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else END[:0]
    return torch.cat([ids.to(torch.int16), END])


def records(data: DataConfig, seed: int, limit: int) -> Iterator[bytes]:
    """Samples of a padded run: lines of jsonl, or paragraphs of texts, which blank lines part."""
    texts = documents(data, seed, limit)
    if data.source == "jsonl":
        return texts
    return (
        part.strip(b"\r\n") for text in texts for part in PARAGRAPHS.split(text) if part.strip()
    )


def documents(data: DataConfig, seed: int, limit: int) -> Iterator[bytes]:
    """Texts of a source, one by one, as UTF-8 bytes."""
    if data.source == "stdlib":
        return _stdlib_files(seed)
    if data.path is None:
        raise ConfigError(f"data.path: source {data.source} needs a file")
    if data.source == "text":
        return _text_file(data.path, min(limit, MOST_TEXT_TOKENS))
    return _jsonl_texts(data.path, data.text_key)


def map_tokens(data: DataConfig, limit: int) -> Tensor:
    """At most `limit` tokens of a binary file, mapped into memory and not read."""
    if data.path is None:
        raise ConfigError("data.path: source tokens needs a file")
    if data.token_dtype not in TOKEN_DTYPES:
        raise ConfigError(
            f"data.token_dtype {data.token_dtype}: use one of {', '.join(TOKEN_DTYPES)}"
        )
    dtype = TOKEN_DTYPES[data.token_dtype]
    size, rest = divmod(Path(data.path).stat().st_size, dtype.itemsize)
    if rest or not size:
        raise ConfigError(
            f"data.path: {data.path} is empty or no whole number of {data.token_dtype}"
        )
    return torch.from_file(data.path, shared=False, size=min(size, limit), dtype=dtype)


def _stdlib_files(seed: int) -> Iterator[bytes]:
    """Sources of the running interpreter's standard library, in an order drawn from the seed."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "__pycache__"})
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    random.Random(seed).shuffle(paths)
    for path in paths:
        yield path.read_bytes()


def _text_file(path: str, limit: int) -> Iterator[bytes]:
    """The file as one document, as far as it is needed."""
    with Path(path).open("rb") as file:
        yield file.read(limit)


def _jsonl_texts(path: str, key: str) -> Iterator[bytes]:
    """The text field of every record; raises ConfigError with the line that has none."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: no JSON: {error}") from None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f"{path}:{number}: the record has no text under {key!r}")
            yield text.encode()
