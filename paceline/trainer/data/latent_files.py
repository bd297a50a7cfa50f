"""Encoded images and texts of files, by their place in them and by whose turn it is.

A sample is the autoencoder's mean and log variance of an image (C, S, S), the T5 encoding of its
text (text, E) and the CLIP encoding of all of it (P,).

A JSON index {"schema": 1, "parts": [{"samples": n, "text": ..., "pooled": ..., "mean": ...,
"logvar": ...}, ...], "empty": {"text": ..., "pooled": ...}} names files beside it, each holding a
part's samples one after the other in bf16; `empty` is the encoding of no text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from paceline.trainer.config import ConfigError
from paceline.trainer.model.weights import mixed_seed
from paceline.trainer.model_config import FluxConfig

TEXT, IMAGE = ("text", "pooled"), ("mean", "logvar")


def shapes(model: FluxConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a sample."""
    latents = (model.latent_channels, model.latent_size, model.latent_size)
    text = {"text": (model.text_len, model.text_width), "pooled": (model.pooled_width,)}
    return {**text, "mean": latents, "logvar": latents}


class LatentFiles(ABC):
    """Samples that lie somewhere, in another order every epoch."""

    def __init__(self, path: str, num_files: int, seed: int, held_out: int) -> None:
        """The last `held_out` samples are never anyone's turn; raises ConfigError if those are all.

        `num_files` counts all samples, `num_samples` those that are trained on.
        """
        self.num_files, self.num_samples, self.seed = num_files, num_files - held_out, seed
        if self.num_samples <= 0:
            left = f" besides the {held_out} held out" if held_out else ""
            raise ConfigError(f"data.path: {path} names no samples{left}")
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """The sample whose turn it is."""
        epoch, position = divmod(number, self.num_samples)
        if epoch != self._epoch:
            shuffle = Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_samples, generator=shuffle)
        return self.at(int(self._order[position]))

    @abstractmethod
    def at(self, index: int) -> dict[str, Tensor]:
        """A sample by its place."""

    @abstractmethod
    def no_text(self) -> dict[str, Tensor]:
        """What the encoders made of an empty text."""

    def eighth(self, index: int) -> int | None:
        """The time, in eighths, at which a sample is to be tried; None: nothing says it."""
        return None


class EncodedFiles(LatentFiles):
    """Samples of a JSON index's files, which are mapped into memory."""

    def __init__(self, path: str, model: FluxConfig, seed: int, held_out: int = 0) -> None:
        self.folder, self.shapes = Path(path).parent, shapes(model)
        index = _index(path)
        try:
            counts = [int(part["samples"]) for part in index["parts"]]
            self._parts = [
                {name: self._map(part[name], name, count) for name in (*TEXT, *IMAGE)}
                for part, count in zip(index["parts"], counts, strict=True)
            ]
            self._empty = {name: self._map(index["empty"][name], name, 1)[0] for name in TEXT}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"data.path: {path} is no index of latents: {error!r}") from error
        self._ends = list(accumulate(counts))
        super().__init__(path, self._ends[-1] if self._ends else 0, seed, held_out)

    def at(self, index: int) -> dict[str, Tensor]:
        """A sample by its place in the files."""
        part = bisect_right(self._ends, index)
        place = index - (self._ends[part - 1] if part else 0)
        return {name: tensor[place] for name, tensor in self._parts[part].items()}

    def no_text(self) -> dict[str, Tensor]:
        """What the encoders made of an empty text."""
        return self._empty

    def _map(self, file: str, name: str, count: int) -> Tensor:
        """(count, ...) of a file; raises ConfigError when it does not hold so much."""
        path, shape = self.folder / file, (count, *self.shapes[name])
        needed_bytes = prod(shape) * torch.bfloat16.itemsize
        size_bytes = path.stat().st_size if path.is_file() else 0
        if size_bytes != needed_bytes:
            raise ConfigError(
                f"data.path: {path} holds {size_bytes} bytes; "
                f"{count} x {name} {self.shapes[name]} in bf16 are {needed_bytes}"
            )
        mapped = torch.from_file(str(path), shared=False, size=prod(shape), dtype=torch.bfloat16)
        return mapped.view(shape)


def _index(path: str) -> dict[str, Any]:
    try:
        index = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path: {path} is no index of latents: {error}") from error
    if not isinstance(index, dict) or index.get("schema") != 1:
        raise ConfigError(f"data.path: {path} is no index of latents of schema 1")
    return index
