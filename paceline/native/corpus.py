"""Tokens of a run: from the interpreter's own sources, a text, jsonl or token file, or at random.

A corpus is cut into windows of seq_len + 1 tokens that share one token with the next: the last
target of one is the first input of the other. Text becomes bytes: ids 0-255, and 256 ends a document.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config import ConfigError, DataConfig, TrainerConfig
from weights import mixed_seed

END_OF_DOCUMENT = 256
BYTE_VOCAB = 257
MOST_TEXT_TOKENS = 2**27
"""Text is held in memory (2 bytes a token); longer runs read this much and go over it again."""
TOKEN_DTYPES = {
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class TokenCorpus:
    """Windows of one long line of tokens."""

    tokens: Tensor
    seq_len: int
    vocab_size: int
    masked: bool = False
    """Whether some targets count for nothing."""

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


@dataclass(frozen=True)
class SyntheticCorpus:
    """Endless windows of random ids, each made from its own seed."""

    seq_len: int
    vocab_size: int
    seed: int
    num_tokens: None = None
    num_windows: None = None
    masked: bool = False

    def window(self, index: int) -> Tensor:
        """(seq_len + 1,) token ids, the same for an index on every rank."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, index))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)


Corpus = TokenCorpus | SyntheticCorpus


def load_corpus(config: TrainerConfig) -> Corpus:
    """The corpus of a run: no more of its source than the steps can use.

    Raises ConfigError when the vocabulary has no room for bytes or a file is not what it should be.
    """
    data, training = config.data, config.training
    vocab = config.model.vocab_size
    if data.source == "synthetic":
        return SyntheticCorpus(training.seq_len, vocab, training.seed)
    usable = training.steps * training.global_batch * training.seq_len + 1
    if data.source == "tokens":
        return TokenCorpus(map_tokens(data, usable), training.seq_len, vocab)
    if vocab < BYTE_VOCAB:
        raise ConfigError(
            f"model.vocab_size {vocab}: text needs {BYTE_VOCAB}, one id per byte and one that ends "
            "a document"
        )
    tokens = pack(documents(data, training.seed, usable), min(usable, MOST_TEXT_TOKENS))
    return TokenCorpus(tokens, training.seq_len, vocab)


def pack(texts: Iterable[bytes], limit: int) -> Tensor:
    """At most `limit` tokens: documents one after the other, each followed by its end mark."""
    end = torch.tensor([END_OF_DOCUMENT], dtype=torch.int16)
    pieces = [end[:0]]
    total = 0
    for text in texts:
        if text:
            piece = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            pieces += [piece.to(torch.int16), end]
            total += len(text) + 1
        if total >= limit:
            break
    return torch.cat(pieces)[:limit]


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
