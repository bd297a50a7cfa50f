"""What a rank loses before any model: the driver's context, libraries, the communicator.

The BigScience 1.3B study calibrates its memory figures so, with one CUDA tensor and nvidia-smi.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import defaultdict
from importlib import resources
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.core.stats import NORMAL_MAD
from paceline.core.value import Value

TIME_LIMIT_S = 300.0
PRODUCT_SIZE = 1024
STAGES = {
    "python": "the interpreter",
    "torch": "importing torch",
    "context": "the driver's context, with one tensor",
    "product": "the first matrix product and its gradient",
    "group": "the process group and its first collective",
}
"""Stages in their order; a CPU has no context, CUDA's figure begins with it."""


class ContextRow(Value):
    """One stage: the median over repeats of the fullest rank."""

    stage: str
    what: str
    kind: str
    """`resident` on a CPU, `device_used` on a GPU."""
    bytes: float
    """In use after the stage."""
    added_bytes: float
    """More than after the stage before."""
    pool_bytes: float
    """The part that PyTorch's allocator holds, library workspaces among it."""
    n: int
    spread: float
    """1.4826 x MAD / median of the repeats."""


class ContextProbe(Value):
    """All stages on one kind of device."""

    device_name: str
    torch: str
    ranks: int
    rows: tuple[ContextRow, ...]

    def row(self, stage: str) -> ContextRow | None:
        """The stage's row, or None."""
        return next((row for row in self.rows if row.stage == stage), None)


def probe_context(python: str, device: str, ranks: int = 1, repeats: int = 3) -> ContextProbe:
    """The memory in use stage by stage, each repeat in fresh processes.

    Raises SystemFaultError when the probe program fails.
    """
    runs = [_run(python, device, ranks) for _ in range(repeats)]
    first = runs[0][0]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for lines in runs:
        for stage in STAGES:
            told = [(line["bytes"], line["pool_bytes"]) for line in lines if line["stage"] == stage]
            if told:
                found[stage].append(max(told))
    rows: list[ContextRow] = []
    for stage, readings in found.items():
        used = [reading[0] for reading in readings]
        median = statistics.median(used)
        away = statistics.median(abs(value - median) for value in used)
        rows.append(
            ContextRow(
                stage=stage,
                what=STAGES[stage],
                kind="resident" if device == "cpu" else "device_used",
                bytes=median,
                added_bytes=median - (rows[-1].bytes if rows else 0.0),
                pool_bytes=statistics.median(reading[1] for reading in readings),
                n=len(used),
                spread=NORMAL_MAD * away / median if median else 0.0,
            )
        )
    return ContextProbe(
        device_name=first["device_name"], torch=first["torch"], ranks=ranks, rows=tuple(rows)
    )


def _run(python: str, device: str, ranks: int) -> list[dict[str, Any]]:
    """The lines of one start of the program."""
    program = str(resources.files("paceline") / "native" / "context_probe.py")
    question = json.dumps({"device": device, "size": PRODUCT_SIZE})
    launch = [
        "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}",
    ]  # fmt: skip
    command = [python, *(launch if ranks > 1 else []), program, question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(
            "context probe", f"did not end within {TIME_LIMIT_S:.0f} s"
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemFaultError("context probe", _reason(error)) from error
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [line for line in lines if line.get("event") == "context"]
    if not found:
        raise SystemFaultError("context probe", f"measured nothing: {done.stderr[-300:]}")
    return found


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """The line that says why the program failed, before what a launcher adds."""
    text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    told = [line.strip() for line in text if "Error: " in line]
    return (told or text[-1:] or ["failed"])[0][:300]
