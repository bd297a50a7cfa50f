"""Classification of failures: status, reason and cause of the end line.

A limit of a rank's memory on a CPU makes running out of memory an orderly failure.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import traceback
from pathlib import Path

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.machine import M_TOP_PAD

SMALL_GROWTH_BYTES = 2**20
STATUS = Path("/proc/self/status")
UNLIMITED = (resource.RLIM_INFINITY, -1)


def limit_memory(limit_bytes: float | None, device: str) -> None:
    """Limit this process to `limit_bytes` beyond its current memory; None sets no limit.

    The kernel counts private writable memory (RLIMIT_DATA), touched or not: heap, tensors and
    thread stacks. Raise ConfigError where this limit does not exist.
    """
    if limit_bytes is None:
        return
    if device != "cpu" or not sys.platform.startswith("linux"):
        raise ConfigError(
            f"memory_limit_bytes {limit_bytes:g}: is only supported for CPUs on Linux, not for "
            f"{device} on {sys.platform}; remove it"
        )
    # Let the heap grow in small steps; a large reserve would fail before the limit is reached.
    ctypes.CDLL(None).mallopt(M_TOP_PAD, SMALL_GROWTH_BYTES)
    limit = data_bytes() + int(limit_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in UNLIMITED:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def is_limited() -> bool:
    """Return whether this process has a memory limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return soft not in UNLIMITED


def data_bytes() -> int:
    """Return this process's private writable memory in bytes, as RLIMIT_DATA counts it."""
    match = re.search(r"^VmData:\s*(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ConfigError(f"memory_limit_bytes: {STATUS} does not report the memory in use")
    return int(match[1]) * 1024


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
