"""Classification of failures: status, reason and cause of the end line."""

from __future__ import annotations

import traceback

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.memory_limit import is_limited

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "std::bad_alloc",
    "bad allocation",
    "alloc_failed",
    "allocation_failed",  # cuDNN
    "memoryerror:",  # in a RuntimeError of an autograd callback
)
NO_THREAD = ("can't start new thread", "resource temporarily unavailable")
"""Errors of thread creation when a memory limit leaves no room for a stack."""
NO_CODE = "could not create a primitive"
"""oneDNN's error when a memory limit leaves no room for generated code."""
LOST_PEER = (
    # gloo; the second one during a transfer.
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
    "timed out connecting",
    # NCCL
    "remote process exited",
    "ncclremoteerror",
    # The rendezvous store.
    "remote server shutdown or crash",
    "failed to recv, got 0 bytes",
    "clients joined",
)
"""PyTorch's errors, in lower case, when another rank ended or did not join."""


class NotFiniteError(Exception):
    """The loss or the gradient norm is not finite."""


class CheckpointError(Exception):
    """A checkpoint could not be written."""


def outcome(error: BaseException) -> tuple[str, str, str]:
    """Return (status, reason, cause) of an exception.

    The status is oom, nan or failed, the reason a sentence. The cause is `peer_lost` if another
    rank's end caused it, else `own_fault`.
    """
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        # A pipeline stage reports only its inputs; the actual error is the cause.
        return outcome(error.__cause__)
    sentence = _last_line(error)
    lower_case = sentence.lower()
    if isinstance(error, NotFiniteError):
        return "nan", str(error), "own_fault"
    if isinstance(error, (ConfigError, CheckpointError)):
        return "failed", str(error), "own_fault"
    if isinstance(error, MemoryError) or any(words in lower_case for words in OUT_OF_MEMORY):
        return "oom", sentence, "own_fault"
    if is_limited() and any(words in lower_case for words in NO_THREAD):
        return "oom", f"no memory for a thread's stack: {sentence}", "own_fault"
    if is_limited() and NO_CODE in lower_case:
        return "oom", f"no memory for compiled code: {sentence}", "own_fault"
    if any(words in lower_case for words in LOST_PEER):
        return "failed", f"another rank ended first: {sentence}", "peer_lost"
    return "failed", sentence, "own_fault"


def _last_line(error: BaseException) -> str:
    """Return the last line of an exception's traceback, at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error))
    return " ".join(text.split())[:500]
