"""Small drawn images and their descriptions, encoded as a diffusion transformer's samples.

An image is one shape of one colour, size and place on a coloured ground. Its description is a
sentence; every word has a fixed vector. What an autoencoder and text encoders would do is done by
fixed random projections: colours and edges of a pixel become the channels of a latent.
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
"""Of Flux' autoencoder, which the trainer undoes."""
LOG_VARIANCE = -4.0
ENCODER_SEED, DRAWING_SEED = 7, 11


@dataclass(frozen=True)
class Picture:
    """What is drawn."""

    size: str
    colour: str
    shape: str
    ground: str
    height: str
    place: str

    @property
    def words(self) -> tuple[str, ...]:
        """Its description."""
        what = ("a", self.size, self.colour, self.shape, "on", self.ground)
        return (*what, "at", self.height, self.place)


def drawn(picture: Picture, size: int) -> Floats:
    """(size, size, 4): red, green, blue and how far a pixel belongs to the shape, each 0-1."""
    line = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = np.meshgrid(line - PLACES[picture.place], line - HEIGHTS[picture.height])
    mask = _mask(picture.shape, x, y, SIZES[picture.size])[..., None]
    ground, colour = (np.float32(COLOURS[name]) for name in (picture.ground, picture.colour))
    return np.concatenate([ground + mask * (colour - ground), mask], axis=-1).astype(np.float32)


def _mask(shape: str, x: Floats, y: Floats, reach: float) -> Floats:
    """1 inside the shape, 0 outside, with an edge of a pixel or two between."""
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
    """The first `count` pictures, always the same; no ground has the shape's own colour."""
    random = np.random.RandomState(DRAWING_SEED)
    colours = tuple(COLOURS)

    def draw(names: Any) -> str:
        return tuple(names)[random.randint(len(names))]

    chosen: list[Picture] = []
    while len(chosen) < count:
        colour, ground = draw(colours), draw(colours)
        if colour != ground:
            # The order of the draws is the data: another gives other pictures.
            size, shape = draw(SIZES), draw(SHAPES)
            height, place = draw(HEIGHTS), draw(PLACES)
            chosen.append(Picture(size, colour, shape, ground, height, place))
    return chosen


class EncodingSizes(Protocol):
    """Sizes of what encoders make of an image and its text."""

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
    """Fixed projections from pixels and words to what the model takes."""

    shape: EncodingSizes
    channels: Floats
    """(4, C), of deviation about 1 in the mean."""
    text: Floats
    """(words, text width)."""
    pooled: Floats
    """(words, pooled width)."""

    @classmethod
    def of(cls, shape: EncodingSizes) -> Encoder:
        """The one encoder of a shape."""
        random = np.random.RandomState(ENCODER_SEED)
        sizes = (
            (4, shape.latent_channels),
            (len(WORDS), shape.text_width),
            (len(WORDS), shape.pooled_width),
        )
        channels, text, pooled = (random.standard_normal(size).astype(np.float32) for size in sizes)
        return cls(shape, channels, text, pooled / 3)

    def sample(self, picture: Picture) -> dict[str, Floats]:
        """The tensors of one sample by name."""
        size, numbers = self.shape.latent_size, [WORDS.index(word) for word in picture.words]
        latent = (drawn(picture, size) - 0.5) @ self.channels
        text = np.zeros((self.shape.text_len, self.shape.text_width), np.float32)
        text[: len(numbers)] = self.text[numbers][: len(text)]
        mean = latent.transpose(2, 0, 1) / FACTOR + SHIFT
        return {
            "text": text,
            "pooled": self.pooled[numbers].sum(0),
            "mean": mean,
            "logvar": np.full_like(mean, LOG_VARIANCE),
        }


def bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """The upper halves of the float32 bits, rounded to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
