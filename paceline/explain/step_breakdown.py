"""A breakdown of a run's mean step into parts that add up to it.

Ranks wait for each other, so a delay on one rank is a wait on all others. Each delay is therefore
counted once, on the rank where it is largest. Communication is the wait for collectives that all
ranks share: the minimum over the ranks. Delays of several ranks that overlap share the time in
which they delay the step.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.layout import Layout
from paceline.core.pipeline import bubble_fraction
from paceline.explain.expert_times import ExpertTimes, expert_times
from paceline.files.documents import read_lines
from paceline.files.events import EndEvent, StartEvent, StepEvent, read_events
from paceline.files.run_folder import STEPS_FOLDER

MAX_STEPS = 1000
"""Maximum number of steps per rank, the last ones; more do not change the mean step."""
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True)
class RankEvents:
    """The events of one rank."""

    start: StartEvent | None
    steps: tuple[StepEvent, ...]
    end: EndEvent | None = None


def rank_events(folder: Path, first: int, last: int) -> dict[int, RankEvents]:
    """Return the steps `first` to `last` of every rank, up to MAX_STEPS, without tracked ones."""
    ranks: dict[int, RankEvents] = {}
    for path in sorted((folder / STEPS_FOLDER).glob("rank-*.jsonl")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        try:
            ranks[int(match[1])] = _read(read_lines(path), first, last)
        except OSError:  # A rank without a readable file is left out.
            continue
    return ranks


def _read(lines: Iterable[str], first: int, last: int) -> RankEvents:
    start: StartEvent | None = None
    end: EndEvent | None = None
    steps: deque[StepEvent] = deque(maxlen=MAX_STEPS)
    for event in read_events(lines):
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, EndEvent):
            end = event
        elif isinstance(event, StepEvent) and first <= event.step <= last and not event.tracked:
            steps.append(event)
    return RankEvents(start, tuple(steps), end)


MIN_STEPS = 5
"""Minimum number of steps from which a mean step is computed."""
SPIKE = 1.5
"""A step is a spike above this multiple of the median step."""
BEYOND_ERROR = 4.0
"""Standard errors by which a straggler must be slower than the other ranks of its stage."""
MIN_VARIATION = 0.05
"""Relative variation of a wait over the steps from which its effect on collectives is fitted."""

Table = npt.NDArray[np.float64]
"""(ranks, steps), in seconds."""
Row = npt.NDArray[np.float64]
"""(steps,), in seconds."""
Rows = Sequence[Sequence[StepEvent]]
"""The same steps of every rank."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of the mean step by part; the sum is the whole step."""

    compute: float
    """The ranks' own work and everything that no other part covers."""
    data: float = 0.0
    """Time that the rank with the slowest data loader waits for data."""
    checkpoint: float = 0.0
    straggler: float = 0.0
    """Extra work time of the busiest rank compared with the other ranks of its stage."""
    core_wait: float = 0.0
    """Time that the training thread was runnable but had no core."""
    bubble: float = 0.0
    """Time that stages have no micro-batch, by the formula of the schedule."""
    communication: float = 0.0
    """Time that all ranks wait for collectives simultaneously."""
    spikes: float = 0.0
    """Extra own work, compared with the median step, of the few steps that are much slower."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))

    def scaled(self, factor: float) -> StepParts:
        """Return all parts multiplied by `factor`, for example to adjust the number of samples."""
        return StepParts(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


@dataclass(frozen=True)
class StepBreakdown:
    """The parts of a run's mean step and their uncertainty."""

    parts: StepParts
    n: int
    """Number of steps that were averaged."""
    samples: float | None
    """Sequences per step over all ranks."""
    error_s: float
    """Standard error of the compute part, in seconds."""
    throttled_s: float | None
    """Mean seconds per step in which the CPU quota was exhausted, summed over cores, on the rank
    with the most; None if the system does not count it."""
    system_share: float | None
    """Share of the CPU time spent in the kernel, over all ranks."""
    num_spikes: int = 0
    """Number of steps whose extra time is in `spikes`."""
    marks_waits: bool = True
    """True if the ranks report their waits for collectives; otherwise `compute` includes them."""
    slow_rank: int | None = None
    """The rank that causes `straggler`."""
    waiting_rank: int | None = None
    """The rank that waited longest for a core."""
    experts: ExpertTimes | None = None
    """Times of experts that ranks share out; None without such, or if the program records none."""


def break_down_steps(
    ranks: Mapping[int, RankEvents],
    layout: Layout | None,
    num_microbatches: int | None,
    stages: Mapping[int, int] | None = None,
    *,
    on_cores: bool = True,
) -> StepBreakdown | None:
    """Return the breakdown of the steps that every rank completed; None if they are too few.

    `stages` maps each rank to its pipeline stage, because only ranks of one stage do equal work.
    Set `on_cores` if the ranks compute on CPU cores, for which they may have to wait.
    """
    events = [{s.step: s for s in rank.steps} for _, rank in sorted(ranks.items())]
    common = sorted(set.intersection(*(set(steps) for steps in events))) if events else []
    if len(common) < MIN_STEPS:
        return None
    numbers, rows = sorted(ranks), [[steps[number] for number in common] for steps in events]
    tables = _Tables.of(rows, on_cores)
    if not tables.step.any():
        return None
    slow, straggler = _slowest(tables.own_work, [(stages or {}).get(rank, 0) for rank in numbers])
    series = _series(tables, straggler, _bubble(layout, num_microbatches))
    return StepBreakdown(
        parts=StepParts(**{name: float(values.mean()) for name, values in series.items()}),
        n=len(common),
        samples=_samples(rows),
        error_s=float(np.std(series["compute"]) / len(common) ** 0.5),
        throttled_s=_throttled_seconds(rows),
        system_share=_system_share(rows),
        num_spikes=int((series["spikes"] > 0).sum()),
        marks_waits=all(s.comm_wait_s is not None for row in rows for s in row),
        slow_rank=None if slow is None else numbers[slow],
        waiting_rank=numbers[int(tables.core_wait.mean(axis=1).argmax())],
        experts=expert_times(rows),
    )


@dataclass(frozen=True)
class _Tables:
    """Seconds of every rank in every step, by activity; all of shape (ranks, steps)."""

    step: Table
    comm: Table
    data: Table
    checkpoint: Table
    core_wait: Table
    """Wait for a core outside collectives; a wait inside one delays nobody."""

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
    def own_work(self) -> Table:
        """The ranks' own work: the step without all waits."""
        waits = self.comm + self.checkpoint + self.data + self.core_wait
        return np.maximum(self.step - waits, 0.0)


def _series(tables: _Tables, straggler: Row, bubble_share: float) -> dict[str, Row]:
    """Return the seconds of every step by part, keyed by the names of StepParts."""
    times, network = tables.step.max(axis=0), tables.comm.min(axis=0)
    core_waits = np.sort(tables.core_wait, axis=0)
    twice = _repeated_wait(network, core_waits[-2]) if len(core_waits) > 1 else 0.0 * network
    network = network - twice
    waits = {
        "data": tables.data.max(axis=0),
        "checkpoint": tables.checkpoint.max(axis=0),
        "straggler": straggler,
        "core_wait": core_waits[-1] + twice,
    }
    # The rank with the least work needs this time even if nothing delays it.
    available = np.maximum(times - network - tables.own_work.min(axis=0), 0.0)
    delays = sum(waits.values())
    share = np.divide(available, delays, out=np.ones_like(times), where=delays > available)
    waits = {name: seconds * share for name, seconds in waits.items()}
    remaining = times - sum(waits.values())
    bubble = np.minimum(network, bubble_share * np.maximum(remaining, 0.0))
    exchange = {"bubble": bubble, "communication": network - bubble}
    work = remaining - network
    median = np.median(work)
    spikes = np.where(times > SPIKE * np.median(times), np.maximum(work - median, 0.0), 0.0)
    return {"compute": work - spikes, **waits, **exchange, "spikes": spikes}


def _repeated_wait(network: Row, second_wait: Row) -> Row:
    """Return the part of `network` in which the second rank that waits for a core delays all.

    Ranks that wait for cores at different times delay each other twice, and the collective then
    takes longer with that wait (slope 1). Ranks that wait simultaneously do not (slope 0). Without
    variation the slope is unknown, and no wait is counted twice.
    """
    deviations = second_wait - second_wait.mean()
    power = float((deviations * deviations).sum())
    if power <= MIN_VARIATION**2 * float((second_wait * second_wait).sum()):
        return 0.0 * network
    slope = float((deviations * (network - network.mean())).sum()) / power
    return np.minimum(network, min(max(slope, 0.0), 1.0) * second_wait)


def _table(rows: Rows, quantity: Callable[[StepEvent], float | None]) -> Table:
    """Return one quantity for all ranks and steps; 0 where it was not recorded."""
    return np.array([[quantity(step) or 0.0 for step in row] for row in rows], dtype=np.float64)


def _slowest(work: Table, stages: Sequence[int]) -> tuple[int | None, Row]:
    """Return the straggler and its extra work time per step compared with its stage's other ranks.

    Return None and zeros if the difference is within its own variation over the steps.
    """
    zero = np.zeros(work.shape[1])
    slowest: tuple[int | None, Row] = (None, zero)
    for rank, stage in enumerate(stages):
        others = [r for r, of in enumerate(stages) if of == stage and r != rank]
        if not others:
            continue
        excess = work[rank] - np.median(work[others], axis=0)
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


def _throttled_seconds(rows: Rows) -> float | None:
    throttled_means = [
        np.mean([s.cores.throttled_s for s in row if s.cores.throttled_s is not None])
        for row in rows
        if any(s.cores.throttled_s is not None for s in row)
    ]
    return float(max(throttled_means)) if throttled_means else None


def _system_share(rows: Rows) -> float | None:
    pairs = [
        (s.cores.user_s, s.cores.system_s)
        for row in rows
        for s in row
        if s.cores.user_s is not None and s.cores.system_s is not None
    ]
    user, system = (sum(pair[index] for pair in pairs) for index in (0, 1))
    return system / (user + system) if user + system > 0 else None
