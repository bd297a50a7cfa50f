# pyright: reportUnknownMemberType=false
"""Token windows for training in another framework; needs torch and the standard library only.

Text is tokenized to bytes: ids 0-255, and 256 at the end of a document, as in Paceline's trainer.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END_OF_DOCUMENT = 256
MAX_TEXT_TOKENS = 2**27


class TokenWindows(torch.utils.data.Dataset[Tensor]):
    """Dataset with all samples of a training, each of `length` token ids; repeats the corpus.

    `data` has source (synthetic, stdlib, text or tokens), path and token_dtype. Raises ValueError
    if the corpus is shorter than one sample, and for an id outside the vocabulary.
    """

    def __init__(
        self, data: Mapping[str, Any], length: int, vocab_size: int, samples: int, seed: int
    ) -> None:
        self._length, self._vocab_size, self._samples = length, vocab_size, samples
        self._seed = seed
        self._tokens = None
        if data["source"] != "synthetic":
            self._tokens = corpus(data, samples * length, seed)
            if self._tokens.numel() < length:
                raise ValueError(
                    f"data: {data['path'] or data['source']} has {self._tokens.numel()} tokens, "
                    f"but one sample needs {length}"
                )

    def __len__(self) -> int:
        """Return the number of samples in the whole training."""
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        """Return (length,) token ids, the same for an index on every rank."""
        if self._tokens is None:
            generator = torch.Generator().manual_seed(self._seed * 2**32 + index)
            return torch.randint(self._vocab_size, (self._length,), generator=generator)
        start = index % (self._tokens.numel() // self._length) * self._length
        window = self._tokens[start : start + self._length].to(torch.int64)
        if not 0 <= int(window.min()) <= int(window.max()) < self._vocab_size:
            raise ValueError(f"data: a token is outside the vocabulary of {self._vocab_size}")
        return window


def corpus(data: Mapping[str, Any], limit: int, seed: int) -> Tensor:
    """Return up to `limit` tokens of a text, the interpreter's own sources or a token file."""
    if data["source"] == "tokens":
        dtype = getattr(torch, data["token_dtype"])
        size = Path(data["path"]).stat().st_size // dtype.itemsize
        return torch.from_file(data["path"], shared=False, size=min(size, limit), dtype=dtype)
    limit = min(limit, MAX_TEXT_TOKENS)
    pieces: list[Tensor] = []
    num_tokens = 0
    for text in documents(data, limit, seed):
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
        pieces.append(torch.cat([ids, torch.tensor([END_OF_DOCUMENT], dtype=torch.int16)]))
        num_tokens += len(text) + 1
        if num_tokens >= limit:
            break
    return torch.cat(pieces)[:limit] if pieces else torch.empty(0, dtype=torch.int16)


def documents(data: Mapping[str, Any], limit: int, seed: int) -> Iterator[bytes]:
    """Yield texts that are not empty; those of the standard library in an order from the seed."""
    if data["source"] == "text":
        with Path(data["path"]).open("rb") as file:
            yield file.read(limit) or b"\n"
        return
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(paths)
    yield from (text for path in paths if (text := path.read_bytes()))
