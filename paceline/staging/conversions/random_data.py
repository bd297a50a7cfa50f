"""Small drawn images and their descriptions, encoded as samples of a diffusion transformer.

An image shows one shape of one colour, size and place on a coloured ground. Its description is a
sentence, and every word has a fixed vector. Fixed random projections replace the autoencoder and
the text encoders: the colours and edges of a pixel become the channels of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

COLOURS = {
    "red": (1, 0, 0), "green": (0, 0.7, 0), "blue": (0, 0, 1), "yellow": (1, 0.9, 0),
    "white": (1, 1, 1), "black": (0, 0, 0), "cyan": (0, 0.8, 0.8), "purple": (0.6, 0, 0.6),
}  # fmt: skip
SHAPES = ("disc", "square", "cross", "ring", "diamond", "bars")
SIZES = {"small": 0.3, "medium": 0.45, "large": 0.6}
PLACES = {"left": -0.4, "middle": 0.0, "right": 0.4}
HEIGHTS = {"upper": -0.4, "centre": 0.0, "lower": 0.4}
WORDS = ("a", *SIZES, *COLOURS, *SHAPES, "on", "at", *HEIGHTS, *PLACES)
SHIFT, FACTOR = 0.1159, 0.3611
"""Shift and scale factor of Flux's autoencoder, which the trainer inverts."""
LOG_VARIANCE = -4.0
ENCODER_SEED, DRAWING_SEED = 7, 11


@dataclass(frozen=True)
class Picture:
    """Attributes of a drawn image."""

    size: str
    colour: str
    shape: str
    ground: str
    height: str
    place: str

    @property
    def words(self) -> tuple[str, ...]:
        """Words of its description."""
        what = ("a", self.size, self.colour, self.shape, "on", self.ground)
        return (*what, "at", self.height, self.place)


def draw(picture: Picture, size: int) -> Floats:
    """Return an image (size, size, 4): red, green, blue and coverage by the shape, each 0-1."""
    line = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = np.meshgrid(line - PLACES[picture.place], line - HEIGHTS[picture.height])
    mask = _mask(picture.shape, x, y, SIZES[picture.size])[..., None]
    ground, colour = (np.float32(COLOURS[name]) for name in (picture.ground, picture.colour))
    return np.concatenate([ground + mask * (colour - ground), mask], axis=-1).astype(np.float32)


def _mask(shape: str, x: Floats, y: Floats, reach: float) -> Floats:
    """Return 1 inside the shape and 0 outside, with an edge of one or two pixels in between."""
    distance = {
        "disc": np.hypot(x, y),
        "square": np.maximum(abs(x), abs(y)),
        "cross": np.maximum(np.minimum(abs(x), abs(y)) * 3, np.maximum(abs(x), abs(y))),
        "ring": abs(np.hypot(x, y) - 0.7 * reach) + 0.6 * reach,
        "diamond": abs(x) + abs(y),
        "bars": np.maximum(np.maximum(abs(x), abs(y)), reach * (0.8 + 0.4 * (np.sin(20 * x) > 0))),
    }[shape]
    return np.clip((reach - distance) * 8 + 0.5, 0, 1).astype(np.float32)


def pictures(count: int) -> list[Picture]:
    """Return the first `count` pictures of a fixed series; shape and ground differ in colour."""
    random = np.random.RandomState(DRAWING_SEED)
    colours = tuple(COLOURS)

    def draw(names: Any) -> str:
        return tuple(names)[random.randint(len(names))]

    series: list[Picture] = []
    while len(series) < count:
        colour, ground = draw(colours), draw(colours)
        if colour != ground:
            # Do not reorder the draws: another order gives other pictures.
            size, shape = draw(SIZES), draw(SHAPES)
            height, place = draw(HEIGHTS), draw(PLACES)
            series.append(Picture(size, colour, shape, ground, height, place))
    return series


class EncodingSizes(Protocol):
    """Sizes of the encodings of an image and its text."""

    @property
    def latent_channels(self) -> int: ...
    @property
    def latent_size(self) -> int: ...
    @property
    def text_len(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def pooled_width(self) -> int: ...


@dataclass(frozen=True)
class Encoder:
    """Fixed projections from pixels and words to the model's inputs."""

    shape: EncodingSizes
    channels: Floats
    """Projection of a pixel (4, C), whose outputs have a mean standard deviation of about 1."""
    text: Floats
    """Vector of each word for the text encoding (words, text width)."""
    pooled: Floats
    """Vector of each word for the pooled encoding (words, pooled width)."""

    @classmethod
    def of(cls, shape: EncodingSizes) -> Encoder:
        """Return the encoder of these sizes, always with the same projections."""
        random = np.random.RandomState(ENCODER_SEED)
        sizes = (
            (4, shape.latent_channels),
            (len(WORDS), shape.text_width),
            (len(WORDS), shape.pooled_width),
        )
        channels, text, pooled = (random.standard_normal(size).astype(np.float32) for size in sizes)
        return cls(shape, channels, text, pooled / 3)

    def sample(self, picture: Picture) -> dict[str, Floats]:
        """Return the tensors of one sample by name."""
        size, numbers = self.shape.latent_size, [WORDS.index(word) for word in picture.words]
        latent = (draw(picture, size) - 0.5) @ self.channels  # (S, S, 4) @ (4, C)
        text = np.zeros((self.shape.text_len, self.shape.text_width), np.float32)
        text[: len(numbers)] = self.text[numbers][: len(text)]
        mean = latent.transpose(2, 0, 1) / FACTOR + SHIFT  # (C, S, S)
        return {
            "text": text,
            "pooled": self.pooled[numbers].sum(0),
            "mean": mean,
            "logvar": np.full_like(mean, LOG_VARIANCE),
        }


def bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """Convert float32 values to bfloat16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half of the dropped range, plus the lowest kept bit for ties.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
