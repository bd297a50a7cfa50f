"""Keep the router's choice of experts when a block is recomputed.

The second run of a block may round differently, and a token whose scores are nearly equal would
then go to another expert than in the forward pass. So a checkpoint stores the chosen experts, which
are small, and its recomputation uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

_record: list[Tensor] | None = None
_replay: Iterator[Tensor] | None = None
"""Global, not per thread: autograd recomputes on threads of its own, but one block at a time."""


def routing_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpoint's forward pass and of its recomputation."""
    choices: list[Tensor] = []
    return _recording(choices), _replaying(choices)


def in_replay() -> bool:
    """Return whether a block is recomputed."""
    return _replay is not None


def replayed_choice() -> Tensor | None:
    """Return the choice of the forward pass; None outside of a recomputation."""
    return None if _replay is None else next(_replay)


def record_choice(experts: Tensor) -> None:
    """Store a choice for the recomputation, if there will be one."""
    if _record is not None:
        _record.append(experts)


@contextmanager
def _recording(choices: list[Tensor]) -> Iterator[None]:
    global _record
    before, _record = _record, choices
    try:
        yield
    finally:
        _record = before


@contextmanager
def _replaying(choices: list[Tensor]) -> Iterator[None]:
    global _replay
    before, _replay = _replay, iter(choices)
    try:
        yield
    finally:
        _replay = before
