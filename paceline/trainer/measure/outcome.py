"""How a training ended: the status, the sentence and the cause that its end line carries."""

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
    "memoryerror:",  # a callback of autograd's, told by a RuntimeError
)
NO_THREAD = ("can't start new thread", "resource temporarily unavailable")
"""What lack of memory looks like where a memory limit also holds for the stacks of threads."""
NO_CODE = "could not create a primitive"
"""What oneDNN says where a memory limit leaves no room for the code that it makes."""
LOST_PEER = (
    # gloo, in every collective; the second when data was on its way.
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
    "timed out connecting",
    # NCCL
    "remote process exited",
    "ncclremoteerror",
    # The store that ranks meet through.
    "remote server shutdown or crash",
    "failed to recv, got 0 bytes",
    "clients joined",
)
"""What PyTorch says in lower case when another rank ended, or did not come."""


class NotFiniteError(Exception):
    """The loss or the gradient is no longer a finite number."""


class CheckpointError(Exception):
    """A checkpoint was not written."""


def outcome(error: BaseException) -> tuple[str, str, str]:
    """(status, reason, cause) of an exception: oom, nan or failed; why, as a sentence; whose fault.

    The cause is `peer_lost` where another rank's end is to blame, else `own_fault`.
    """
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        # A pipeline's stage tells only its inputs, and keeps what went wrong as the cause.
        return outcome(error.__cause__)
    sentence = _last_line(error)
    lowered = sentence.lower()
    if isinstance(error, NotFiniteError):
        return "nan", str(error), "own_fault"
    if isinstance(error, (ConfigError, CheckpointError)):
        return "failed", str(error), "own_fault"
    if isinstance(error, MemoryError) or any(words in lowered for words in OUT_OF_MEMORY):
        return "oom", sentence, "own_fault"
    if is_limited() and any(words in lowered for words in NO_THREAD):
        return "oom", f"no memory for a thread's stack: {sentence}", "own_fault"
    if is_limited() and NO_CODE in lowered:
        return "oom", f"no memory for compiled code: {sentence}", "own_fault"
    if any(words in lowered for words in LOST_PEER):
        return "failed", f"another rank ended first: {sentence}", "peer_lost"
    return "failed", sentence, "own_fault"


def _last_line(error: BaseException) -> str:
    """What Python prints last about an exception, on one line of at most 500 characters."""
    text = "".join(traceback.format_exception_only(type(error), error))
    return " ".join(text.split())[:500]
