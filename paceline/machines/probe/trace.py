"""Memory of ranks that nobody runs: the trainer's own step on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.value import Value
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 1800.0


class RankTrace(Value):
    """What one rank's second step keeps at its peak."""

    rank: int
    torch: str
    kernels: str
    """Whose kernels decide on what is kept: cpu or cuda."""
    num_microbatches: int
    """That were followed at most; the figures are a whole step's."""
    peak_bytes: int
    at_peak_bytes: dict[str, int]
    """By part; they add up to the peak."""
    parts_bytes: dict[str, int | None]
    """The largest of each part, whenever it is."""


def trace_ranks(
    python: str, trainer: Mapping[str, Any], size: int, ranks: Sequence[int]
) -> tuple[RankTrace, ...]:
    """Follow some ranks of a world of `size`; `trainer` is the trainer's resolved JSON.

    Raises SystemFaultError where the program fails: PyTorch cannot follow every operation, fp8's
    among them.
    """
    question = {"trainer": trainer, "size": size, "ranks": list(ranks)}
    lines = probe_lines(python, "offline.memory_trace", question, threads=1, limit_s=TIME_LIMIT_S)
    return tuple(
        RankTrace(**{name: line[name] for name in RankTrace.model_fields}) for line in lines
    )
