"""Encoded drawings, and shards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.staging.converters import ConversionJob, convert

SIZES = {
    "samples": 20, "held_out": 9, "latent_channels": 2, "latent_size": 4, "text_len": 3,
    "text_width": 8, "pooled_width": 6,
}  # fmt: skip
SOURCES = {"train": "encodings/train", "val": "encodings/val", "empty": "encodings"}


def converted(folder: Path, encodings: Path, **settings: Any) -> Path:
    """Shards of encodings."""
    how = {**SOURCES, "samples_per_shard": 8, **settings}
    convert("flux-shards", ConversionJob(folder, {"encodings": encodings}, how, lambda: None))
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A saved data set as Hugging Face datasets reads it."""
    from datasets import load_from_disk

    return list(load_from_disk(str(folder)))  # type: ignore[arg-type]
