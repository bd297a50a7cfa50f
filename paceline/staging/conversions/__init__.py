"""Conversions of data between file formats."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Progress callback, called repeatedly with (processed input bytes, total input bytes)."""


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""
