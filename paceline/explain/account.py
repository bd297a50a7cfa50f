"""Where the seconds of a run's steps went: parts that add up to the mean step.

Ranks wait for each other, so a delay of one is a wait of all others. What delays a rank by itself
is taken at the rank that has most of it; what is left of everybody's wait for collectives, the
smallest over ranks, is communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from paceline.core.layout import Layout
from paceline.core.pipeline import bubble_fraction
from paceline.explain.rank_events import RankEvents
from paceline.files.events import StepEvent

LEAST_STEPS = 5
"""Fewer tell nothing of a usual step."""
BEYOND_ERROR = 4.0
"""Standard errors that a rank must be slower than the others of its stage to be called so."""

Table = npt.NDArray[np.float64]
"""(ranks, steps), in seconds."""
Row = npt.NDArray[np.float64]
"""(steps,), in seconds."""
Rows = Sequence[Sequence[StepEvent]]
"""The same steps of every rank."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of the mean step by part; they add up to it."""

    compute: float
    """The ranks' own work, and whatever has no name."""
    data: float = 0.0
    """The slowest loader keeps its rank waiting."""
    checkpoint: float = 0.0
    straggler: float = 0.0
    """The busiest rank works longer than the others of its stage do."""
    core_wait: float = 0.0
    """The thread that trains could have run and had no core."""
    bubble: float = 0.0
    """Stages without a micro-batch, by the schedule's formula."""
    communication: float = 0.0
    """All ranks wait for collectives at the same time."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))

    def scaled(self, factor: float) -> StepParts:
        """All parts times `factor`, as for another number of samples."""
        return StepParts(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


@dataclass(frozen=True)
class Account:
    """The parts of a run's mean step, and how sure they are."""

    parts: StepParts
    n: int
    """Steps that they are a mean of."""
    samples: float | None
    """Sequences of a step over all ranks."""
    error_s: float
    """Standard error of the compute part over the steps."""
    throttled_s: float | None
    """Mean seconds a step in which the quota of the cores was spent, added up over cores of the
    rank that had most; None where nothing counts it."""
    system_share: float | None
    """Share of the processor time that was spent inside the kernel, all ranks."""
    marks_waits: bool = True
    """Whether its ranks tell what they wait in collectives; else that is in their own work."""
    slow_rank: int | None = None
    """The rank behind `straggler`."""
    waiting_rank: int | None = None
    """The rank that waited longest for a core."""


def account_of(
    ranks: Mapping[int, RankEvents],
    layout: Layout | None,
    num_microbatches: int | None,
    stages: Mapping[int, int] | None = None,
    *,
    on_cores: bool = True,
) -> Account | None:
    """The account of the steps that every rank has finished; None for too few.

    `stages` has the pipeline stage of each rank: only ranks of one do equal work. `on_cores` says
    that ranks compute on processor cores, for which they may have to wait.
    """
    events = [{s.step: s for s in rank.steps} for _, rank in sorted(ranks.items())]
    common = sorted(set.intersection(*(set(steps) for steps in events))) if events else []
    if len(common) < LEAST_STEPS:
        return None
    numbers, rows = sorted(ranks), [[steps[number] for number in common] for steps in events]
    tables = _Tables.of(rows, on_cores)
    if not tables.step.any():
        return None
    slow, straggler = _slowest(tables.own, [(stages or {}).get(rank, 0) for rank in numbers])
    series = _series(tables, straggler, _bubble(layout, num_microbatches))
    return Account(
        parts=StepParts(**{name: float(values.mean()) for name, values in series.items()}),
        n=len(common),
        samples=_samples(rows),
        error_s=float(np.std(series["compute"]) / len(common) ** 0.5),
        throttled_s=_throttled(rows),
        system_share=_system_share(rows),
        marks_waits=all(s.comm_wait_s is not None for row in rows for s in row),
        slow_rank=None if slow is None else numbers[slow],
        waiting_rank=numbers[int(tables.waited.mean(axis=1).argmax())],
    )


@dataclass(frozen=True)
class _Tables:
    """What every rank did in every step."""

    step: Table
    comm: Table
    data: Table
    checkpoint: Table
    waited: Table
    """For a core, outside waits for other ranks, which delay nobody by themselves."""

    @classmethod
    def of(cls, rows: Rows, on_cores: bool) -> _Tables:
        step = _table(rows, lambda s: s.step_time_s)
        comm = _table(rows, lambda s: s.comm_wait_s)
        return cls(
            step,
            comm,
            _table(rows, lambda s: s.data_wait_s),
            _table(rows, lambda s: s.checkpoint_s),
            np.minimum(_table(rows, lambda s: s.cores.waited_s), step - comm) * on_cores,
        )

    @property
    def own(self) -> Table:
        """The ranks' own work."""
        waits = self.comm + self.checkpoint + self.data + self.waited
        return np.maximum(self.step - waits, 0.0)


def _series(tables: _Tables, straggler: Row, bubble_share: float) -> dict[str, Row]:
    """Seconds of every step by part, the names of StepParts."""
    times, network = tables.step.max(axis=0), tables.comm.min(axis=0)
    # Two ranks that wait for cores at different times delay each other twice.
    waited = np.sort(tables.waited, axis=0)
    twice = np.minimum(network, waited[-2]) if len(waited) > 1 else np.zeros(len(times))
    network = network - twice
    waits = {
        "data": tables.data.max(axis=0),
        "checkpoint": np.median(tables.checkpoint, axis=0),
        "straggler": straggler,
        "core_wait": waited[-1] + twice,
    }
    left = times - sum(waits.values())
    bubble = np.minimum(network, bubble_share * np.maximum(left, 0.0))
    exchange = {"bubble": bubble, "communication": network - bubble}
    return {"compute": left - network, **waits, **exchange}


def _table(rows: Rows, second: Callable[[StepEvent], float | None]) -> Table:
    """One quantity of all ranks and steps; 0 where it is not told."""
    return np.array([[second(step) or 0.0 for step in row] for row in rows], dtype=np.float64)


def _slowest(own: Table, stages: Sequence[int]) -> tuple[int | None, Row]:
    """The rank that the others of its stage wait for, and by step what it works longer than them.

    None, and nothing, where the difference is not beyond its own scatter over the steps.
    """
    zero = np.zeros(own.shape[1])
    slowest: tuple[int | None, Row] = (None, zero)
    for rank, stage in enumerate(stages):
        others = [r for r, of in enumerate(stages) if of == stage and r != rank]
        if not others:
            continue
        excess = own[rank] - np.median(own[others], axis=0)
        error = float(excess.std()) / len(excess) ** 0.5
        if excess.mean() > max(BEYOND_ERROR * error, slowest[1].mean()):
            slowest = (rank, np.maximum(excess, 0.0))
    return slowest


def _bubble(layout: Layout | None, num_microbatches: int | None) -> float:
    if layout is None or layout.pp == 1 or not num_microbatches:
        return 0.0
    return bubble_fraction(layout.schedule, layout.pp, layout.vp, num_microbatches)


def _samples(rows: Rows) -> float | None:
    counts = [[step.samples for step in row] for row in rows]
    flat = [count for row in counts for count in row if count is not None]
    complete = len(flat) == sum(map(len, counts))
    return sum(flat) / len(rows[0]) if complete and flat else None


def _throttled(rows: Rows) -> float | None:
    means = [
        np.mean([s.cores.throttled_s for s in row if s.cores.throttled_s is not None])
        for row in rows
        if any(s.cores.throttled_s is not None for s in row)
    ]
    return float(max(means)) if means else None


def _system_share(rows: Rows) -> float | None:
    pairs = [
        (s.cores.user_s, s.cores.system_s)
        for row in rows
        for s in row
        if s.cores.user_s is not None and s.cores.system_s is not None
    ]
    user, system = (sum(pair[at] for pair in pairs) for at in (0, 1))
    return system / (user + system) if user + system > 0 else None
