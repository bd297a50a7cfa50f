"""Real text that every machine has: sources of Python's standard library, and its reference.

Both come from the interpreter that runs, so another Python has somewhat other texts: who compares
trainings over them compares their digests first.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal

from paceline.core.errors import SystemFaultError

Domain = Literal["code", "prose"]
PIECE_BYTES = 2048
"""Texts are cut into pieces of this size and shuffled, so that every part of the whole is alike."""
MOST_BYTES = 2_000_000
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "pydoc_data",
}
"""Packages of others, and what not every installation has; pydoc_data is the prose."""
ORDER_SEED = 20_25
"""One order for all, whatever the seed of a training."""


def text_of(domain: Domain) -> bytes:
    """At most MOST_BYTES of one domain, in shuffled pieces; the same for one installation."""
    texts = _sources() if domain == "code" else _reference()
    pieces = [
        text[at : at + PIECE_BYTES] for text in texts for at in range(0, len(text), PIECE_BYTES)
    ]
    random.Random(ORDER_SEED).shuffle(pieces)
    return b"".join(_up_to(pieces, MOST_BYTES))


def _sources() -> Iterator[bytes]:
    """Modules of the standard library by name."""
    root = sysconfig.get_path("stdlib")
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name).read_bytes()


def _reference() -> list[bytes]:
    """Chapters of the language reference that `help()` shows.

    Raises SystemFaultError where they are not installed.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise SystemFaultError(
            "pydoc_data",
            "this Python comes without the texts that help() shows",
            remedy="install its documentation data (Debian: libpython3-stdlib)",
        ) from error
    return [topics[name].encode() for name in sorted(topics)]


def _up_to(pieces: Iterable[bytes], limit: int) -> Iterator[bytes]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > limit:
            return
        yield piece
