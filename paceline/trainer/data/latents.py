"""Samples of a diffusion transformer: encoded images and texts, at random or from files.

A sample is the autoencoder's mean and log variance of an image (C, S, S), the T5 encoding of its
text (text, E) and the CLIP encoding of all of it (P,). Every use of a sample draws its own latent,
noise and time, from a seed that its number in the run gives: no layout changes what is drawn.

Files: a JSON index {"schema": 1, "parts": [{"samples": n, "text": ..., "pooled": ..., "mean": ...,
"logvar": ...}, ...], "empty": {"text": ..., "pooled": ...}} names files beside it, each holding a
part's samples one after the other in bf16; `empty` is the encoding of no text.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from paceline.trainer.config import ConfigError, EvaluationConfig, FluxConfig, TrainerConfig
from paceline.trainer.model.flux import own_part
from paceline.trainer.model.weights import mixed_seed
from paceline.trainer.parallel.mesh import Axis

SHIFT, FACTOR = 0.1159, 0.3611
"""Of Flux' autoencoder: (latent - SHIFT) x FACTOR has a mean of about 0 and a deviation of 1."""
TIMES = 8
"""Times at which samples that are held out are tried."""
TEXT, IMAGE = ("text", "pooled"), ("mean", "logvar")


class LatentSource(Protocol):
    """Where samples come from."""

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """A sample's tensors by name; `number` counts all uses of all samples."""
        ...

    def no_text(self) -> dict[str, Tensor]:
        """The encodings of no text."""
        ...


def shapes(model: FluxConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a sample."""
    latents = (model.latent_channels, model.latent_size, model.latent_size)
    text = {"text": (model.text_len, model.text_width), "pooled": (model.pooled_width,)}
    return {**text, "mean": latents, "logvar": latents}


@dataclass(frozen=True)
class RandomSource:
    """Endless samples of the right sizes, from N(0, 1)."""

    model: FluxConfig

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """A new sample every time."""
        return {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes(self.model).items()
        }

    def no_text(self) -> dict[str, Tensor]:
        """Nothing stands for nothing."""
        return {name: torch.zeros(shapes(self.model)[name], dtype=torch.bfloat16) for name in TEXT}


class EncodedFiles:
    """Samples of files that are mapped into memory, in another order every epoch."""

    def __init__(self, path: str, model: FluxConfig, seed: int, held_out: int = 0) -> None:
        """The last `held_out` samples are never anyone's turn."""
        self.folder, self.shapes, self.seed = Path(path).parent, shapes(model), seed
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
        self.num_files = self._ends[-1] if self._ends else 0
        self.num_samples = self.num_files - held_out
        if self.num_samples <= 0:
            left = f" besides the {held_out} held out" if held_out else ""
            raise ConfigError(f"data.path: {path} names no samples{left}")
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """The sample whose turn it is."""
        epoch, position = divmod(number, self.num_samples)
        if epoch != self._epoch:
            shuffle = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_samples, generator=shuffle)
        return self.at(int(self._order[position]))

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


@dataclass(frozen=True)
class LatentCorpus:
    """Noisy latents, their velocities, and what they are conditioned on, by number."""

    model: FluxConfig
    source: LatentSource
    seq_len: int
    seed: int
    masked: bool = False
    num_tokens: None = field(default=None, init=False)
    num_windows: None = field(default=None, init=False)

    @property
    def num_samples(self) -> int | None:
        """Different samples; None without end."""
        return self.source.num_samples if isinstance(self.source, EncodedFiles) else None

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
        """(inputs, targets, times, texts, pooled texts), this rank's part of every sequence."""
        fields = zip(*(self.drawn(number, cp) for number in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def drawn(self, number: int, cp: Axis) -> tuple[Tensor, ...]:
        """One sample: x = (1 - t) latent + t noise, noise - latent, t, and its text or none."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, number))
        sample = self.source.sample(number, generator)
        latent, noise = latent_and_noise(sample, generator)
        time, chance = torch.rand(2, generator=generator)
        text = self.source.no_text() if chance < self.model.text_dropout else sample
        return noised(sample | text, latent, noise, time, self.model.patch_size, cp)


@dataclass(frozen=True)
class ValidationLatents:
    """Samples at fixed times, i / 8 for the i-th modulo 8, with fixed latents and noise.

    Source: MLPerf Training 5.1, flux1: a loss at every eighth of the way, and the mean of those.
    """

    model: FluxConfig
    source: LatentSource
    seq_len: int
    first: int
    """Number in the source of the first one."""
    num_windows: int
    masked: bool = False
    num_tokens: None = field(default=None, init=False)

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: Axis) -> tuple[Tensor, ...]:
        """As a training's samples."""
        fields = zip(*(self.fixed(index, cp) for index in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def fixed(self, index: int, cp: Axis) -> tuple[Tensor, ...]:
        """One sample, always the same."""
        generator = torch.Generator().manual_seed(mixed_seed(0, -1 - index))
        if isinstance(self.source, EncodedFiles):
            sample = self.source.at(self.first + index)
        else:
            sample = self.source.sample(index, generator)
        latent, noise = latent_and_noise(sample, generator)
        time = torch.tensor(index % TIMES / TIMES)
        return noised(sample, latent, noise, time, self.model.patch_size, cp)


def latent_and_noise(sample: dict[str, Tensor], generator: Generator) -> tuple[Tensor, Tensor]:
    """A latent of a sample's image, and the noise that it is mixed with."""
    mean, logvar = (sample[name].float() for name in IMAGE)
    spread = torch.randn(mean.shape, generator=generator)
    latent = FACTOR * (mean + torch.exp(0.5 * logvar) * spread - SHIFT)
    return latent, torch.randn(mean.shape, generator=generator)


def noised(
    text: dict[str, Tensor], latent: Tensor, noise: Tensor, time: Tensor, patch: int, cp: Axis
) -> tuple[Tensor, ...]:
    """What the model takes of a latent at a time, with its text."""
    clean, noise = (own_part(patches(x, patch), cp) for x in (latent, noise))
    noisy = (1 - time) * clean + time * noise
    return noisy, noise - clean, time, own_part(text["text"], cp), text["pooled"]


def patches(latent: Tensor, size: int) -> Tensor:
    """(C, S, S) -> (tokens, C size^2): rows of patches, each channel by channel."""
    parts = latent.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return parts.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


def load_latents(config: TrainerConfig, model: FluxConfig) -> LatentCorpus:
    """The samples of a run; raises ConfigError for a source that has none of this kind."""
    data, seed = config.data, config.training.seed
    if data.source == "synthetic":
        source: LatentSource = RandomSource(model)
    elif data.source == "latents" and data.path is not None:
        evaluation = config.training.evaluation
        apart = evaluation.samples if evaluation and evaluation.path is None else 0
        source = EncodedFiles(data.path, model, seed, apart)
    else:
        raise ConfigError(
            f"data.source {data.source}: an mmdit takes synthetic, or latents with a path"
        )
    return LatentCorpus(model, source, config.training.seq_len, seed)


def load_validation_latents(
    config: TrainerConfig, model: FluxConfig, evaluation: EvaluationConfig
) -> ValidationLatents:
    """The samples that evaluations go over; raises ConfigError when there are too few."""
    seq_len, count = config.training.seq_len, evaluation.samples
    if config.data.source == "synthetic":
        return ValidationLatents(model, RandomSource(model), seq_len, 0, count)
    path = evaluation.path or config.data.path
    assert path is not None, "latents have a path"
    source = EncodedFiles(path, model, 0)
    first = 0 if evaluation.path else source.num_files - count
    if source.num_files < count:
        raise ConfigError(f"training.evaluation.samples {count}: {path} holds {source.num_files}")
    return ValidationLatents(model, source, seq_len, first, count)


def _index(path: str) -> dict[str, Any]:
    try:
        index = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path: {path} is no index of latents: {error}") from error
    if not isinstance(index, dict) or index.get("schema") != 1:
        raise ConfigError(f"data.path: {path} is no index of latents of schema 1")
    return index
