"""Memory of ranks without running them: the trainer's own step on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.value import Value
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 1800.0


class RankTrace(Value):
    """Memory that one rank's second step keeps at its peak."""

    rank: int
    torch: str
    kernels: str
    """Kind of kernels that determine which tensors are kept: cpu or cuda."""
    num_microbatches: int
    """Maximum number of micro-batches that were traced; the figures are for a whole step."""
    peak_bytes: int
    at_peak_bytes: dict[str, int]
    """Bytes by part at the peak; they add up to the peak."""
    parts_bytes: dict[str, int | None]
    """Largest size of each part in bytes, at any time."""


def trace_ranks(
    python: str, trainer: Mapping[str, Any], size: int, ranks: Sequence[int]
) -> tuple[RankTrace, ...]:
    """Trace the memory of some ranks of a world of `size`.

    `trainer` is the trainer's resolved JSON. Raises SystemFaultError if the program fails: PyTorch
    cannot trace every operation, for example those of fp8.
    """
    question = {"trainer": trainer, "size": size, "ranks": list(ranks)}
    lines = probe_lines(python, "offline.memory_trace", question, threads=1, limit_s=TIME_LIMIT_S)
    return tuple(
        RankTrace(**{name: line[name] for name in RankTrace.model_fields}) for line in lines
    )
