"""Memory that a rank uses before any model: driver context, libraries and communicator.

The BigScience 1.3B study calibrates its memory figures in this way, with one CUDA tensor and
nvidia-smi.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from paceline.core.stats import NORMAL_MAD
from paceline.core.value import Value
from paceline.machines.probe.program import probe_lines

TIME_LIMIT_S = 300.0
GEMM_SIZE = 1024
STAGES = {
    "python": "the interpreter",
    "torch": "importing torch",
    "context": "the driver's context, with one tensor",
    "product": "the first GEMM and its gradient",
    "group": "the process group and its first collective",
}
"""Stages in order. A CPU has no context stage; the device memory of CUDA starts with it."""


class ContextRow(Value):
    """Memory after one stage: median over repeats of the rank that uses most."""

    stage: str
    what: str
    kind: str
    """Kind of memory: `resident` on a CPU, `device_used` on a GPU."""
    bytes: float
    """Memory in use after the stage, in bytes."""
    added_bytes: float
    """Increase over the previous stage, in bytes."""
    pool_bytes: float
    """Part held by PyTorch's allocator, including library workspaces, in bytes."""
    n: int
    spread: float
    """Relative spread of the repeats: 1.4826 x MAD / median."""


class ContextProbe(Value):
    """Memory of all stages on one kind of device."""

    device_name: str
    torch: str
    ranks: int
    rows: tuple[ContextRow, ...]

    def row(self, stage: str) -> ContextRow | None:
        """Return the stage's row, or None."""
        return next((row for row in self.rows if row.stage == stage), None)


def probe_context(python: str, device: str, ranks: int = 1, repeats: int = 3) -> ContextProbe:
    """Measure the memory in use after each stage, each repeat in new processes.

    Raises SystemFaultError if the probe program fails.
    """
    question = {"device": device, "size": GEMM_SIZE}
    runs = [
        probe_lines(
            python,
            "programs.context_memory",
            question,
            ranks=ranks,
            threads=1,
            limit_s=TIME_LIMIT_S,
        )
        for _ in range(repeats)
    ]
    first = runs[0][0]
    readings_by_stage: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for lines in runs:
        for stage in STAGES:
            rank_readings = [
                (line["bytes"], line["pool_bytes"]) for line in lines if line["stage"] == stage
            ]
            if rank_readings:
                readings_by_stage[stage].append(max(rank_readings))
    rows: list[ContextRow] = []
    for stage, readings in readings_by_stage.items():
        used = [reading[0] for reading in readings]
        median = statistics.median(used)
        deviation = statistics.median(abs(value - median) for value in used)
        rows.append(
            ContextRow(
                stage=stage,
                what=STAGES[stage],
                kind="resident" if device == "cpu" else "device_used",
                bytes=median,
                added_bytes=median - (rows[-1].bytes if rows else 0.0),
                pool_bytes=statistics.median(reading[1] for reading in readings),
                n=len(used),
                spread=NORMAL_MAD * deviation / median if median else 0.0,
            )
        )
    return ContextProbe(
        device_name=first["device_name"], torch=first["torch"], ranks=ranks, rows=tuple(rows)
    )
