"""Steps as columns: what every log format is read into."""

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
    """One training step as a log tells it; None = the log did not say, inf = it printed NaN."""

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
    """What document masking leaves of attention's pairs; None without document masking."""
    checkpoint_s: float | None = None
    """Part of the step in which it waited for its checkpoint."""
    flops_per_s_per_device: float | None = None
    """This and the three below: as the log itself prints them, in its own convention."""
    samples_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    resident_bytes: float | None = None
    device_used_bytes: float | None = None
    """Used on the device by all programs together."""
    averaged_over: int = 1
    """How many steps the step time is a mean of."""
    skipped: bool = False
    """True when the optimizer did not step (fp16 overflow)."""


FLOATS = tuple(f.name for f in fields(Step) if f.name not in ("index", "averaged_over", "skipped"))
"""Names of the float columns."""


@dataclass(frozen=True)
class Steps:
    """Columns of equal length n; NaN = the log did not say, inf = it printed NaN or infinity."""

    index: IntColumn
    averaged_over: IntColumn
    skipped: npt.NDArray[np.bool_]
    columns: Mapping[str, FloatColumn]
    """Those that the log says for some step; every other reads as NaN and takes no memory."""

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Steps:
        """Columns of `steps`, in their order."""
        rows = list(steps)
        said = [name for name in FLOATS if any(getattr(s, name) is not None for s in rows)]
        return cls(
            index=np.array([s.index for s in rows], dtype=np.int64),
            averaged_over=np.array([s.averaged_over for s in rows], dtype=np.int64),
            skipped=np.array([s.skipped for s in rows], dtype=np.bool_),
            columns={
                name: np.array([_nan(getattr(s, name)) for s in rows], dtype=np.float64)
                for name in said
            },
        )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name: str) -> FloatColumn:
        """The float column `name`, such as `step_time_s`; raises KeyError for no column's name."""
        if name not in self.columns and name in FLOATS:
            return np.broadcast_to(np.nan, len(self))
        return self.columns[name]

    def known(self, name: str) -> bool:
        """True when the log says `name` for at least one step."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    def select(self, rows: Rows) -> Steps:
        """The rows picked by a mask, indices or slice; float columns are copied when looked at."""
        index = self.index[rows]
        return Steps(
            index,
            _picked(self.averaged_over, rows, len(index)),
            _picked(self.skipped, rows, len(index)),
            _Picked(self.columns, rows),
        )


@dataclass(frozen=True)
class _Picked(Mapping[str, FloatColumn]):
    """Some rows of columns: of millions of steps no second copy of everything is held."""

    columns: Mapping[str, FloatColumn]
    rows: Rows

    def __getitem__(self, name: str) -> FloatColumn:
        return self.columns[name][self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def _picked(column: npt.NDArray[Any], rows: Rows, length: int) -> npt.NDArray[Any]:
    """Some rows of a column; one that repeats a single value still takes no memory."""
    if length and column.strides == (0,):
        return np.broadcast_to(column[0], length)
    return column[rows]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
