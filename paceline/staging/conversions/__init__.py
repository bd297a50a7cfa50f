"""What one form of data becomes in another: functions from files to files."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes of input done, bytes of input in all), again and again."""


def unwatched(done_bytes: int, total_bytes: int) -> None:
    """Show no progress."""
