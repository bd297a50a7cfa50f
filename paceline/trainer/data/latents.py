"""Samples of a diffusion transformer: encoded images and texts, at random or from files.

Every use of a sample draws its own latent, noise and time from a seed derived from its number in
the run. The layout does not change these draws.
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
"""Scaling of Flux's autoencoder: (latent - SHIFT) x FACTOR has mean 0 and deviation 1, roughly."""
TIMES = 8
"""Number of distinct times at which held-out samples are evaluated."""


class LatentSource(Protocol):
    """Source of samples."""

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """Return a sample's tensors by name; `number` counts all uses of all samples."""
        ...

    def no_text(self) -> dict[str, Tensor]:
        """Return the encodings of an empty text."""
        ...


@dataclass(frozen=True)
class RandomSource:
    """Endless samples of the right shapes, drawn from N(0, 1)."""

    model: FluxConfig

    def sample(self, number: int, generator: Generator) -> dict[str, Tensor]:
        """Return a new sample at every call."""
        return {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes(self.model).items()
        }

    def no_text(self) -> dict[str, Tensor]:
        """Return zeros as the encodings of an empty text."""
        return {name: torch.zeros(shapes(self.model)[name], dtype=torch.bfloat16) for name in TEXT}


@dataclass(frozen=True)
class LatentCorpus:
    """Noisy latents, their velocities and their conditions, by sample number."""

    model: FluxConfig
    source: LatentSource
    seq_len: int
    seed: int
    masked: bool = False
    num_tokens: None = field(default=None, init=False)
    num_windows: None = field(default=None, init=False)

    @property
    def num_samples(self) -> int | None:
        """Number of distinct samples; None if endless."""
        return self.source.num_samples if isinstance(self.source, LatentFiles) else None

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens; every position is one."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return inputs, targets, times, texts and pooled texts, this rank's part of sequences."""
        fields = zip(*(self.training_sample(number, cp) for number in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def training_sample(self, number: int, cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return one sample: (1 - t) latent + t noise, noise - latent, t, and its text or none."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, number))
        sample = self.source.sample(number, generator)
        latent, noise = latent_and_noise(sample, generator)
        time, chance = torch.rand(2, generator=generator)
        text = self.source.no_text() if chance < self.model.text_dropout else sample
        return add_noise(sample | text, latent, noise, time, self.model.patch_size, cp)


@dataclass(frozen=True)
class ValidationLatents:
    """Samples at fixed times with fixed latents and noise.

    A sample's time is the eighth given in its files, else i / 8 with i its index modulo 8. Source:
    MLPerf Training 5.1, flux1: a loss at every eighth of the interval, and their mean.
    """

    model: FluxConfig
    source: LatentSource
    seq_len: int
    first: int
    """Number of the first sample in the source."""
    num_windows: int
    masked: bool = False
    num_tokens: None = field(default=None, init=False)

    @cached_property
    def eighths(self) -> Tensor:
        """(num_windows,) evaluation times of the samples, in eighths."""
        defaults = [index % TIMES for index in range(self.num_windows)]
        if not isinstance(self.source, LatentFiles):
            return torch.tensor(defaults)
        from_files = (self.source.eighth(self.first + index) for index in range(self.num_windows))
        return torch.tensor(
            [u if s is None else s for u, s in zip(defaults, from_files, strict=True)]
        )

    def real_tokens(self, indices: Sequence[int]) -> int:
        """Return the number of tokens; every position is one."""
        return len(indices) * self.seq_len

    def collate(self, indices: list[int], cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return samples in the form of training samples."""
        fields = zip(*(self.validation_sample(index, cp) for index in indices), strict=True)
        return tuple(torch.stack(tensors) for tensors in fields)

    def validation_sample(self, index: int, cp: MeshAxis) -> tuple[Tensor, ...]:
        """Return one sample, the same at every call."""
        generator = torch.Generator().manual_seed(derive_seed(0, -1 - index))
        if isinstance(self.source, LatentFiles):
            sample = self.source.at(self.first + index)
        else:
            sample = self.source.sample(index, generator)
        latent, noise = latent_and_noise(sample, generator)
        time = self.eighths[index] / TIMES
        return add_noise(sample, latent, noise, time, self.model.patch_size, cp)


def latent_and_noise(sample: dict[str, Tensor], generator: Generator) -> tuple[Tensor, Tensor]:
    """Return a latent of a sample's image, and the noise to mix with it."""
    mean, logvar = (sample[name].float() for name in IMAGE)
    spread = torch.randn(mean.shape, generator=generator)
    latent = FACTOR * (mean + torch.exp(0.5 * logvar) * spread - SHIFT)
    return latent, torch.randn(mean.shape, generator=generator)


def add_noise(
    text: dict[str, Tensor], latent: Tensor, noise: Tensor, time: Tensor, patch: int, cp: MeshAxis
) -> tuple[Tensor, ...]:
    """Return the model's input for a latent at a time, with its text."""
    clean, noise = (local_tokens(patches(x, patch), cp) for x in (latent, noise))
    noisy = (1 - time) * clean + time * noise
    return noisy, noise - clean, time, local_tokens(text["text"], cp), text["pooled"]


def patches(latent: Tensor, size: int) -> Tensor:
    """Split into patches: (C, S, S) -> (tokens, C size^2), row by row, each channel by channel."""
    parts = latent.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return parts.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


def load_latents(config: TrainerConfig, model: FluxConfig) -> LatentCorpus:
    """Return the samples of a run; raises ConfigError if the source has no such samples."""
    data, seed, evaluation = config.data, config.training.seed, config.training.evaluation
    source: LatentSource
    if data.source == "synthetic":
        source = RandomSource(model)
    elif data.source in LATENT_FILES and data.path is not None:
        held_out = evaluation.samples if evaluation and _held_out_path(config) is None else 0
        source = _files(data.source, data.path, TRAIN, model, seed, held_out)
    else:
        raise ConfigError(
            f"data.source {data.source}: an mmdit needs synthetic, or latents or webdataset with a "
            "path"
        )
    return LatentCorpus(model, source, config.training.seq_len, seed)


def load_validation_latents(
    config: TrainerConfig, model: FluxConfig, evaluation: EvaluationConfig
) -> ValidationLatents:
    """Return the samples of the evaluations; raises ConfigError when there are too few."""
    data, seq_len, count = config.data, config.training.seq_len, evaluation.samples
    if data.source == "synthetic":
        return ValidationLatents(model, RandomSource(model), seq_len, 0, count)
    validation_path = _held_out_path(config)
    path = validation_path or data.path
    assert path is not None, "latents have a path"
    source = _files(data.source, path, VAL if validation_path else TRAIN, model, 0, 0)
    if source.num_files < count:
        raise ConfigError(
            f"training.evaluation.samples {count}: {path} has only {source.num_files} samples"
        )
    return ValidationLatents(
        model, source, seq_len, 0 if validation_path else source.num_files - count, count
    )


def _held_out_path(config: TrainerConfig) -> str | None:
    """Return the path of the validation samples; None if they are the last training samples.

    Shards may have a separate folder for them.
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
