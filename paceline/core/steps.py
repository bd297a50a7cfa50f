"""Columns of steps, the common form of all log formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]
Rows = npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of a log.

    None means that the log has no value. inf means that it printed NaN.
    """

    index: int
    step_time_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None
    samples: float | None = None
    global_batch: float | None = None
    seq_len: float | None = None
    busy_time_s: float | None = None
    comm_wait_s: float | None = None
    data_wait_s: float | None = None
    attended_share: float | None = None
    """Share of attention pairs that document masking leaves; None without document masking."""
    expert_overload: float | None = None
    """Largest load of an expert over the mean load, averaged over layers; None without experts."""
    dead_experts: float | None = None
    """Share of the experts without tokens; None without experts."""
    checkpoint_s: float | None = None
    """Part of the step time spent waiting for a checkpoint."""
    flops_per_s_per_device: float | None = None
    """FLOP/s as printed by the log in its own convention. The same holds for the three fields
    below."""
    samples_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    resident_bytes: float | None = None
    device_used_bytes: float | None = None
    """Memory in use on the device by all programs."""
    averaged_over: int = 1
    """Number of steps over which the step time is averaged."""
    skipped: bool = False
    """True if the optimizer skipped the step (fp16 overflow)."""


MIN_STEP_TIME_S = 1e-9
"""Minimum step time in seconds; a shorter one is not a measured time and reads as NaN."""
FLOATS = tuple(f.name for f in fields(Step) if f.name not in ("index", "averaged_over", "skipped"))
"""Names of the float columns."""


@dataclass(frozen=True)
class Steps:
    """Columns of equal length n.

    NaN means that the log has no value. inf means that it printed NaN or infinity.
    """

    index: IntColumn
    averaged_over: IntColumn
    skipped: npt.NDArray[np.bool_]
    columns: Mapping[str, FloatColumn]
    """Columns with a value for at least one step. Other columns read as NaN and take no memory."""

    def __post_init__(self) -> None:
        times = self.columns.get("step_time_s") if isinstance(self.columns, dict) else None
        # No step takes no time. Rates divide by these times, wherever a program got them from.
        if times is not None and np.any(too_short := times < MIN_STEP_TIME_S):
            columns = {**self.columns, "step_time_s": np.where(too_short, np.nan, times)}
            object.__setattr__(self, "columns", columns)

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Steps:
        """Return columns of `steps`, in order."""
        rows = list(steps)
        known_names = [name for name in FLOATS if any(getattr(s, name) is not None for s in rows)]
        return cls(
            index=np.array([s.index for s in rows], dtype=np.int64),
            averaged_over=np.array([s.averaged_over for s in rows], dtype=np.int64),
            skipped=np.array([s.skipped for s in rows], dtype=np.bool_),
            columns={
                name: np.array([_nan(getattr(s, name)) for s in rows], dtype=np.float64)
                for name in known_names
            },
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name: str) -> FloatColumn:
        """Return the float column `name`, such as `step_time_s`.

        Raises KeyError for an unknown name.
        """
        if name not in self.columns and name in FLOATS:
            return np.broadcast_to(np.nan, len(self))
        return self.columns[name]

    def known(self, name: str) -> bool:
        """Return True if the log has a value of `name` for at least one step."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    def select(self, rows: Rows) -> Steps:
        """Return the rows of a mask, indices or slice; float columns are copied on access."""
        index = self.index[rows]
        return Steps(
            index,
            _select_rows(self.averaged_over, rows, len(index)),
            _select_rows(self.skipped, rows, len(index)),
            _SelectedColumns(self.columns, rows),
        )


@dataclass(frozen=True)
class _SelectedColumns(Mapping[str, FloatColumn]):
    """Selected rows of columns, copied on access, so that millions of steps are not held twice."""

    columns: Mapping[str, FloatColumn]
    rows: Rows

    def __getitem__(self, name: str) -> FloatColumn:
        return self.columns[name][self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def _select_rows(column: npt.NDArray[Any], rows: Rows, length: int) -> npt.NDArray[Any]:
    """Return some rows of a column; a broadcast single value still takes no memory."""
    if length and column.strides == (0,):
        return np.broadcast_to(column[0], length)
    return column[rows]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
