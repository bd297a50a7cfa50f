"""Achievable GEMM throughput of this machine per dtype, measured once and cached.

A data sheet's peak is not achievable and a CPU has none. A step's FLOP/s are therefore also
compared with the fastest GEMM that the same torch runs here with the same settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Dtype
from paceline.core.training import MatmulPrecision
from paceline.core.value import Value
from paceline.files.documents import read_text, write_value
from paceline.files.home import cache_folder
from paceline.machines.probe.program import probe_lines

SECONDS_PER_DTYPE = 1.0
TIME_LIMIT_S = 120.0
MAX_CACHED_SPREAD = 0.05
MIN_CACHED_CPU_SHARE = 0.9
"""Minimum CPU share of a measurement that is cached; `MAX_SPREAD_KEPT` is its maximum spread.
Repeats beyond these bounds were disturbed by other programs, so the next run measures again."""
MACHINE_ID = Path("/etc/machine-id")


class GemmRow(Value):
    """Throughput of one GEMM, (m, k) x (k, n), over several repeats."""

    dtype: Dtype
    m: int
    n: int
    k: int
    flops_per_s: float
    statistic: str
    """Statistic of the repeats' throughput, such as `best of n`."""
    repeats: int
    spread: float
    """Relative spread of the repeats: 1.4826 x MAD / median."""
    cpu_share: float | None = None
    """CPU time of the process / (wall time x threads); None on a GPU."""


class GemmProbe(Value):
    """All shapes measured for one device with one setting; `best` is the achievable throughput."""

    device_name: str
    torch: str
    threads: int | None
    matmul_precision: str
    rows: tuple[GemmRow, ...]
    skipped: dict[str, str] = {}
    """Dtypes without a row, each with the reason."""

    def best(self, dtype: Dtype) -> GemmRow | None:
        """Return the fastest row of `dtype`, or None."""
        rows = [row for row in self.rows if row.dtype == dtype]
        return max(rows, key=lambda row: row.flops_per_s) if rows else None


def probe_gemm(
    python: str,
    identity: dict[str, Any],
    device: str,
    dtypes: tuple[Dtype, ...],
    threads: int | None,
    matmul_precision: MatmulPrecision = "high",
    fresh: bool = False,
) -> GemmProbe:
    """Return the achievable GEMM throughput of one device, from the cache unless `fresh`.

    `identity` is what must be equal for a cached figure to be used: CPU or GPU, driver, torch
    version. Raises SystemFaultError if the probe program fails.
    """
    # The host is part of the key because several machines may share a home directory.
    machine = {"host": platform.node(), "machine": _machine_id()}
    question: dict[str, Any] = {
        "device": device,
        "threads": threads,
        "matmul_precision": matmul_precision,
        "seconds": SECONDS_PER_DTYPE,
    }
    key = {"python": python, **machine, **identity, **question}
    files: dict[Dtype, Path] = {d: _cache_file({**key, "dtype": d}) for d in dtypes}
    cached: dict[Dtype, GemmProbe | None] = {
        dtype: None if fresh else _read_cache(file) for dtype, file in files.items()
    }
    probes: dict[Dtype, GemmProbe] = {
        dtype: probe for dtype, probe in cached.items() if probe is not None
    }
    unknown: list[Dtype] = [dtype for dtype in files if dtype not in probes]
    if unknown:
        measured = _measure(python, {**question, "dtypes": unknown})
        probes |= {dtype: _only(measured, dtype) for dtype in unknown}
        for dtype in unknown:
            _write_cache(files[dtype], probes[dtype], dtype)
    return _merged([probes[dtype] for dtype in dtypes])


def _read_cache(path: Path) -> GemmProbe | None:
    try:
        return GemmProbe.model_validate_json(read_text(path))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def _write_cache(path: Path, probe: GemmProbe, dtype: Dtype) -> None:
    if _is_disturbed(probe, dtype):
        return
    with contextlib.suppress(SystemFaultError):  # without a cache the next run measures again
        write_value(path, probe)


def _is_disturbed(probe: GemmProbe, dtype: Dtype) -> bool:
    """Return True if the measurement of `dtype` was disturbed by other programs.

    The best row has too much spread, or any row got too little CPU time and might otherwise have
    been the best.
    """
    best = probe.best(dtype)
    shares = [row.cpu_share for row in probe.rows if row.dtype == dtype]
    return best is not None and (
        best.spread > MAX_CACHED_SPREAD
        or any(share is not None and share < MIN_CACHED_CPU_SHARE for share in shares)
    )


def _only(probe: GemmProbe, dtype: Dtype) -> GemmProbe:
    rows = tuple(row for row in probe.rows if row.dtype == dtype)
    skipped = {name: reason for name, reason in probe.skipped.items() if name == dtype}
    return probe.model_copy(update={"rows": rows, "skipped": skipped})


def _merged(probes: list[GemmProbe]) -> GemmProbe:
    rows = tuple(row for probe in probes for row in probe.rows)
    skipped = {name: reason for probe in probes for name, reason in probe.skipped.items()}
    return probes[0].model_copy(update={"rows": rows, "skipped": skipped})


def _measure(python: str, question: dict[str, Any]) -> GemmProbe:
    lines = probe_lines(
        python, "programs.gemm", question, threads=question["threads"], limit_s=TIME_LIMIT_S
    )
    rows = [line for line in lines if line.get("event") == "gemm"]
    measured = {row["dtype"] for row in rows}
    skipped = {
        line["dtype"]: line["reason"]
        for line in lines
        if line.get("event") == "skipped" and line["dtype"] not in measured
    }
    return GemmProbe(
        device_name=lines[0]["device_name"],
        torch=lines[0]["torch"],
        threads=lines[0]["threads"],
        matmul_precision=question["matmul_precision"],
        rows=tuple(_row(row) for row in rows),
        skipped=skipped,
    )


def _row(line: dict[str, Any]) -> GemmRow:
    m, n, k = line["shape"]
    return GemmRow(
        dtype=line["dtype"],
        m=m,
        n=n,
        k=k,
        flops_per_s=line["flops_per_s"],
        statistic=line["statistic"],
        repeats=line["n"],
        spread=line["spread"],
        cpu_share=line["cpu_share"],
    )


def _machine_id() -> str | None:
    try:
        return MACHINE_ID.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cache_file(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"gemm-{digest}.json"
