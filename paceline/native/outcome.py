"""How a training ended: the status and the one sentence that its end line carries."""

from __future__ import annotations

import traceback

from config import ConfigError

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "bad allocation",
    "alloc_failed",
)
LOST_PEER = ("connection closed by peer", "connection reset by peer", "remote process exited")


class NotFiniteError(Exception):
    """The loss or the gradient is no longer a finite number."""


def outcome(error: BaseException) -> tuple[str, str]:
    """(status, reason) of an exception: oom, nan or failed, and why in one sentence."""
    sentence = _last_line(error)
    lowered = sentence.lower()
    if isinstance(error, NotFiniteError):
        return "nan", str(error)
    if isinstance(error, ConfigError):
        return "failed", str(error)
    if isinstance(error, MemoryError) or any(words in lowered for words in OUT_OF_MEMORY):
        return "oom", sentence
    if any(words in lowered for words in LOST_PEER):
        return "failed", f"another rank ended first: {sentence}"
    return "failed", sentence


def _last_line(error: BaseException) -> str:
    """What Python prints last about an exception, on one line of at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error))
    return " ".join(text.split())[:500]
