"""The drawings that the small diffusion transformer is tried on, as the trainer's encoded files.

A JSON index, and files of bf16 values beside it.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np

from paceline.core.mmdit import MMDiTShape
from paceline.staging.conversions.random_data import Encoder, bfloat16_bits, pictures


def write_images(folder: Path, shape: MMDiTShape, count: int) -> Path:
    """Encode `count` pictures into `folder`; returns the index."""
    encoder = Encoder.of(shape)
    samples = [encoder.sample(picture) for picture in pictures(count)]
    names = {name: f"{name}.bf16" for name in samples[0]}
    for name, file in names.items():
        (folder / file).write_bytes(bfloat16_bits(np.stack([s[name] for s in samples])).tobytes())
    empty = {"text": (shape.text_len, shape.text_width), "pooled": (shape.pooled_width,)}
    for name, size in empty.items():
        (folder / f"empty-{name}.bf16").write_bytes(bytes(2 * prod(size)))
    index = {
        "schema": 1,
        "parts": [{"samples": count, **names}],
        "empty": {name: f"empty-{name}.bf16" for name in empty},
    }
    path = folder / "index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    return path
