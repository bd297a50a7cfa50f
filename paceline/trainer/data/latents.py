"""Samples of a diffusion transformer: encoded images and texts, at random or from files.

Every use of a sample draws its own latent, noise and time, from a seed that its number in the run
gives: no layout changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Generator, Tensor

from paceline.trainer.config import LATENT_FILES, ConfigError, EvaluationConfig, TrainerConfig
from paceline.trainer.data.shards import (
    IMAGE,
    TEXT,
    TRAIN,
    VAL,
    EncodedFiles,
    LatentFiles,
    ShardedFiles,
    part_folder,
    shapes,
)
from paceline.trainer.model.flux import local_tokens
from paceline.trainer.model.network import derive_seed
from paceline.trainer.model_config import FluxConfig
from paceline.trainer.parallel.mesh import MeshAxis

SHIFT, FACTOR = 0.1159, 0.3611
"""Of Flux' autoencoder: (latent - SHIFT) x FACTOR has a mean of about 0 and a deviation of 1."""
TIMES = 8
"""Times at which samples that are held out are tried."""


class LatentSource(Protocol):
    """Where samples come from."""

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """A sample's tensors by name; `number` counts all uses of all samples."""
        ...

    def no_text(self) -> dict[str, Tensor]:
        """The encodings of no text."""
        ...


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
        return self.source.num_samples if isinstance(self.source, LatentFiles) else None

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """(inputs, targets, times, texts, pooled texts), this rank's part of every sequence."""
        fields = zip(*(self.drawn(number, cp) for number in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def drawn(self, number: int, cp: MeshAxis) -> tuple[Tensor, ...]:
        """One sample: x = (1 - t) latent + t noise, noise - latent, t, and its text or none."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, number))
        sample = self.source.sample(number, generator)
        latent, noise = latent_and_noise(sample, generator)
        time, chance = torch.rand(2, generator=generator)
        text = self.source.no_text() if chance < self.model.text_dropout else sample
        return noised(sample | text, latent, noise, time, self.model.patch_size, cp)


@dataclass(frozen=True)
class ValidationLatents:
    """Samples at fixed times with fixed latents and noise.

    A sample's time is an eighth that its files state, else i / 8 for the i-th modulo 8.
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

    @cached_property
    def eighths(self) -> Tensor:
        """(num_windows,) when samples are tried, in eighths of the way."""
        usual = [index % TIMES for index in range(self.num_windows)]
        if not isinstance(self.source, LatentFiles):
            return torch.tensor(usual)
        stated = (self.source.eighth(self.first + index) for index in range(self.num_windows))
        return torch.tensor([u if s is None else s for u, s in zip(usual, stated, strict=True)])

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Every position is a token."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """As a training's samples."""
        fields = zip(*(self.fixed(index, cp) for index in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def fixed(self, index: int, cp: MeshAxis) -> tuple[Tensor, ...]:
        """One sample, always the same."""
        generator = torch.Generator().manual_seed(derive_seed(0, -1 - index))
        if isinstance(self.source, LatentFiles):
            sample = self.source.at(self.first + index)
        else:
            sample = self.source.sample(index, generator)
        latent, noise = latent_and_noise(sample, generator)
        time = self.eighths[index] / TIMES
        return noised(sample, latent, noise, time, self.model.patch_size, cp)


def latent_and_noise(sample: dict[str, Tensor], generator: Generator) -> tuple[Tensor, Tensor]:
    """A latent of a sample's image, and the noise that it is mixed with."""
    mean, logvar = (sample[name].float() for name in IMAGE)
    spread = torch.randn(mean.shape, generator=generator)
    latent = FACTOR * (mean + torch.exp(0.5 * logvar) * spread - SHIFT)
    return latent, torch.randn(mean.shape, generator=generator)


def noised(
    text: dict[str, Tensor], latent: Tensor, noise: Tensor, time: Tensor, patch: int, cp: MeshAxis
) -> tuple[Tensor, ...]:
    """What the model takes of a latent at a time, with its text."""
    clean, noise = (local_tokens(patches(x, patch), cp) for x in (latent, noise))
    noisy = (1 - time) * clean + time * noise
    return noisy, noise - clean, time, local_tokens(text["text"], cp), text["pooled"]


def patches(latent: Tensor, size: int) -> Tensor:
    """(C, S, S) -> (tokens, C size^2): rows of patches, each channel by channel."""
    parts = latent.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return parts.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


def load_latents(config: TrainerConfig, model: FluxConfig) -> LatentCorpus:
    """The samples of a run; raises ConfigError for a source that has none of this kind."""
    data, seed, evaluation = config.data, config.training.seed, config.training.evaluation
    source: LatentSource
    if data.source == "synthetic":
        source = RandomSource(model)
    elif data.source in LATENT_FILES and data.path is not None:
        apart = evaluation.samples if evaluation and _held_out_path(config) is None else 0
        source = _files(data.source, data.path, TRAIN, model, seed, apart)
    else:
        raise ConfigError(
            f"data.source {data.source}: an mmdit takes synthetic, or latents or webdataset with a "
            "path"
        )
    return LatentCorpus(model, source, config.training.seq_len, seed)


def load_validation_latents(
    config: TrainerConfig, model: FluxConfig, evaluation: EvaluationConfig
) -> ValidationLatents:
    """The samples that evaluations go over; raises ConfigError when there are too few."""
    data, seq_len, count = config.data, config.training.seq_len, evaluation.samples
    if data.source == "synthetic":
        return ValidationLatents(model, RandomSource(model), seq_len, 0, count)
    apart = _held_out_path(config)
    path = apart or data.path
    assert path is not None, "latents have a path"
    source = _files(data.source, path, VAL if apart else TRAIN, model, 0, 0)
    if source.num_files < count:
        raise ConfigError(f"training.evaluation.samples {count}: {path} holds {source.num_files}")
    return ValidationLatents(
        model, source, seq_len, 0 if apart else source.num_files - count, count
    )


def _held_out_path(config: TrainerConfig) -> str | None:
    """Where samples lie that are never trained on; None: they are the last ones of the training's.

    Shards may have a part of their own for them.
    """
    evaluation, data = config.training.evaluation, config.data
    if evaluation is not None and evaluation.path is not None:
        return evaluation.path
    if data.source != "webdataset" or data.path is None:
        return None
    return data.path if part_folder(data.path, VAL) != Path(data.path) else None


def _files(
    source: str, path: str, part: str, model: FluxConfig, seed: int, held_out: int
) -> LatentFiles:
    if source == "webdataset":
        return ShardedFiles(path, part, model, seed, held_out)
    return EncodedFiles(path, model, seed, held_out)
