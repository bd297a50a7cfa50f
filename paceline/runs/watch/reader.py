"""Reader that follows every rank's files in a run folder, and writes nothing there."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import fmean, mean, median
from typing import Literal, TypedDict

import numpy as np

from paceline.core.errors import UserError
from paceline.core.flops import model_flops_per_token
from paceline.core.rates import flops_per_s_per_device, mfu
from paceline.core.result import Status
from paceline.core.steps import Step
from paceline.core.telemetry import TelemetrySample, read_telemetry
from paceline.core.value import NonNegativeInt, Value
from paceline.files.documents import open_regular
from paceline.files.events import StartEvent, read_events
from paceline.files.run_folder import (
    LOGS_FOLDER,
    STEPS_FOLDER,
    RunRecord,
    current_status,
    read_record,
)
from paceline.machines.placement import find_device
from paceline.machines.probe.telemetry import FOLDER as TELEMETRY_FOLDER
from paceline.runs.logged_run import NATIVE
from paceline.runs.outcome import tensor_float_note
from paceline.runs.step_follower import Follower, StepFollower, make_follower

RECENT = 10
"""Number of recent steps for current figures."""
PAST = 500
"""Number of earlier steps for usual figures."""
NAMED_EXCESS = 0.05
"""Minimum relative excess of busy time for a rank to be shown as waited for."""
NAMED_STEPS = 0.8
"""Minimum fraction of recent steps in which that rank is the busiest."""
STEPS_BYTES = 1024 * (PAST + RECENT)
"""Bytes read from the end of a rank's file at first; the line of a step has about 500."""
FIRST_LOOK_BYTES = 64 << 20
"""Limit of these bytes for all ranks together; with a thousand ranks the past is shorter."""
TAIL_BYTES = 32_768
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass
class _Rank:
    """Last steps of one rank."""

    lines: Follower
    path: Path | None = None
    start: StartEvent | None = None
    steps: deque[Step] = field(default_factory=lambda: deque[Step](maxlen=PAST + RECENT))
    memory_bytes: float | None = None
    _restarts: int = 0

    def read(self) -> None:
        """Read the lines added since the last call."""
        steps = self.lines.new_steps()
        if self.lines.restarts != self._restarts:
            self._restarts, self.start, self.memory_bytes = self.lines.restarts, None, None
            self.steps.clear()
        for step in steps:
            self.steps.append(step)
            peaks = [peak for peak in _peaks(step) if peak is not None]
            self.memory_bytes = max([*peaks[:1], self.memory_bytes or 0.0]) or None
        if self.start is None and self.path is not None:
            first = _ends_of(self.path, 0)
            self.start = next((e for e in read_events(first) if isinstance(e, StartEvent)), None)

    @property
    def stage(self) -> int:
        return self.start.stage if self.start else 0

    @property
    def first_step(self) -> int:
        """First step of this attempt, whose time includes one-time costs."""
        return self.start.first_step if self.start else 1

    @property
    def recent(self) -> list[Step]:
        return [*islice(reversed(self.steps), RECENT)][::-1]


@dataclass
class RunReader:
    """Reader of one run folder, for repeated snapshots."""

    folder: Path
    _ranks: dict[int, _Rank] = field(default_factory=dict[int, _Rank])

    def state(self) -> WatchState:
        """Return the current state of the run.

        Raises UserError if the folder holds no run, or one that was imported from a log.
        """
        record = read_record(self.folder)
        if record.log is not None and record.spec is None:
            raise UserError(
                f"run {self.folder.name}",
                "was imported from a log, so it is not in progress",
                remedy=f"`paceline runs show {self.folder.name}` prints its figures",
            )
        self._read(record)
        ranks = {number: rank for number, rank in sorted(self._ranks.items()) if rank.steps}
        times = _times([*ranks.values()])
        recent, past = times[-RECENT:], times[:-RECENT]
        step_s = median(recent) if recent else None
        usual_s = median(past) if past else None
        waited_for = _waited_for(ranks)
        last = min((rank.steps[-1].index for rank in ranks.values()), default=None)
        total_steps = record.spec.steps_requested if record.spec else None
        status = current_status(record)
        remaining_steps = (
            total_steps - last if total_steps and last and status in ("queued", "running") else None
        )
        return WatchState(
            run=self.folder.name,
            recipe=record.settings.recipe,
            status=status,
            reason=record.reason,
            step=last,
            steps_requested=total_steps,
            loss=next((_finite(rank.steps[-1].loss) for rank in ranks.values()), None),
            last_sign_s=self._last_sign_s(),
            step_time_s=step_s,
            n=len(recent),
            usual_s=usual_s,
            usual_n=len(past),
            ratio=step_s / usual_s if step_s and usual_s else None,
            **_rates(record, [*ranks.values()], step_s),
            data_wait_fraction=_share(ranks, "data_wait_s", step_s, max),
            comm_wait_fraction=_share(ranks, "comm_wait_s", step_s, median),
            waited_for=waited_for[0] if waited_for else None,
            waited_for_excess=waited_for[1] if waited_for else None,
            memory_bytes=max((m for r in ranks.values() if (m := r.memory_bytes)), default=None),
            eta_s=remaining_steps * mean(recent)
            if remaining_steps is not None and recent
            else None,
            ranks=tuple(_rank_now(number, rank) for number, rank in sorted(self._ranks.items())),
            devices=devices_now(self.folder),
        )

    def _read(self, record: RunRecord) -> None:
        """Read new lines of all ranks that have a file, and drop the other ranks."""
        before, self._ranks = self._ranks, {}
        paths = sorted((self.folder / STEPS_FOLDER).glob("rank-*.jsonl"))
        first_look = min(STEPS_BYTES, FIRST_LOOK_BYTES // max(1, len(paths)))
        for path in paths:
            if match := _FILE.fullmatch(path.name):
                rank = before.get(int(match[1]))
                if rank is None or rank.path != path:
                    rank = _Rank(StepFollower(path, first_look), path)
                self._ranks[int(match[1])] = rank
        if not self._ranks and record.spec is not None and record.spec.engine != NATIVE:
            rank = before.get(0)
            if rank is None or rank.path is not None:
                rank = _Rank(make_follower(self.folder, record.spec.engine))
            self._ranks[0] = rank
        for rank in self._ranks.values():
            rank.read()

    def _last_sign_s(self) -> float | None:
        paths = [p for name in (STEPS_FOLDER, LOGS_FOLDER) for p in (self.folder / name).glob("*")]
        modified_unix: list[float] = []
        for path in paths:
            with suppress(OSError):  # a rank removes its empty files
                modified_unix.append(path.stat().st_mtime)
        return max(0.0, time.time() - max(modified_unix)) if modified_unix else None


def devices_now(folder: Path) -> DevicesNow | None:
    """Return the last telemetry of all hosts; None if none was recorded."""
    last: list[TelemetrySample] = []
    for path in sorted((folder / TELEMETRY_FOLDER).glob("*.jsonl")):
        lines = [*_ends_of(path, 0)[:1], *_ends_of(path, 2)]
        telemetry = read_telemetry(lines)
        last += telemetry.samples[-1:] if telemetry else ()
    if not last:
        return None
    gpus = [gpu for sample in last for gpu in sample.gpus]
    clocks = [c for g in gpus if (c := g.sm_clock_mhz)]
    clocks = clocks or [c for sample in last if (c := sample.cpu_clock_mhz)]
    powers = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    hot = [t for g in gpus if (t := g.temperature_c) is not None]
    hot += [t for sample in last if (t := sample.cpu_temperature_c) is not None]
    return DevicesNow(
        hosts=len(last),
        age_s=max(0.0, time.time() - min(sample.time_unix for sample in last)),
        clock_mhz=mean(clocks) if clocks else None,
        lowest_clock_mhz=min(clocks, default=None),
        power_w=sum(powers) if powers else None,
        hottest_c=max(hot, default=None),
    )


def _times(ranks: Sequence[_Rank]) -> list[float]:
    """Return the seconds of each step that all ranks finished, slowest rank.

    The first step is excluded.
    """
    tables = [
        {
            s.index: s.step_time_s
            for s in rank.steps
            if s.step_time_s is not None and s.index > rank.first_step
        }
        for rank in ranks
    ]
    common = set[int].intersection(*map(set, tables)) if tables else set[int]()
    return [max(table[number] for table in tables) for number in sorted(common)]


class RatesNow(TypedDict):
    """Throughput and device utilization; unknown values are None."""

    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    achievable_fraction: float | None


def _rates(record: RunRecord, ranks: Sequence[_Rank], step_s: float | None) -> RatesNow:
    """Return the rates at a step time in seconds."""
    facts = record.settings
    rates = RatesNow(tokens_per_s=None, samples_per_s=None, mfu=None, achievable_fraction=None)
    steps = [rank.steps[-1] for rank in ranks]
    batch = steps[0].global_batch if steps else None
    batch = batch or facts.global_batch
    tokens = [step.tokens for step in steps if step.tokens is not None]
    if step_s is None:
        return rates
    if tokens and len(tokens) == len(steps):
        rates["tokens_per_s"] = sum(tokens) / step_s
    elif batch and facts.seq_len:
        rates["tokens_per_s"] = batch * facts.seq_len / step_s
    x, convention, devices = facts.flops_input, facts.flops_convention, facts.num_devices
    if batch:
        rates["samples_per_s"] = batch / step_s
    if not (batch and x and convention and devices and facts.seq_len):
        return rates
    shares = [step.attended_share for step in steps if step.attended_share is not None]
    x = x.with_attended_share(fmean(shares) if shares else None)
    sample = model_flops_per_token(convention, x) * facts.seq_len
    flops_rate = flops_per_s_per_device(sample, batch, step_s, devices)
    device = find_device(facts.device) if facts.device else None
    peak = device.peak_flops_per_s(facts.dtype) if device and facts.dtype else None
    if tensor_float_note(facts) is None:
        rates["mfu"] = mfu(flops_rate, peak)
    if record.achievable_flops_per_s:
        fraction = flops_rate * devices / record.achievable_flops_per_s
        rates["achievable_fraction"] = _finite(fraction)
    return rates


def _waited_for(ranks: dict[int, _Rank]) -> tuple[int, float] | None:
    """Return the rank that the others of its stage wait for, and its relative excess busy time.

    It is the busiest in most recent steps, and busier than the median of the others by more than
    5%. None if there is no such rank.
    """
    stages: dict[int, dict[int, dict[int, float]]] = {}
    for number, rank in ranks.items():
        busy = {s.index: s.busy_time_s for s in rank.recent if s.busy_time_s is not None}
        stages.setdefault(rank.stage, {})[number] = busy
    candidates = [rank for tables in stages.values() if (rank := _busiest(tables))]
    return max(candidates, key=lambda rank: rank[1], default=None)


def _busiest(tables: dict[int, dict[int, float]]) -> tuple[int, float] | None:
    """Return the rank of one stage that stands out by its busy time, and its relative excess."""
    common = sorted(set[int].intersection(*map(set, tables.values())))
    if len(tables) < 2 or len(common) < RECENT / 2:
        return None
    busy = np.array([[table[at] for at in common] for table in tables.values()])  # (ranks, steps)
    typical = np.median(busy, axis=1)
    shares = (busy == busy.max(axis=0)).mean(axis=1)
    # The candidate is the busiest rank in most steps; ties are resolved by the median busy time.
    row = int(np.lexsort((typical, shares))[-1])
    others = float(np.median(np.median(np.delete(busy, row, axis=0), axis=0)))
    excess = float(typical[row]) / others - 1 if others else 0.0
    stands_out = excess > NAMED_EXCESS and shares[row] >= NAMED_STEPS
    return (list(tables)[row], excess) if stands_out else None


def _share(
    ranks: dict[int, _Rank],
    name: str,
    step_s: float | None,
    over_ranks: Callable[[list[float]], float],
) -> float | None:
    """Return the mean wait of recent steps divided by the step time; None if it is unknown."""
    waits = [mean(values) for r in ranks.values() if (values := _values(r.recent, name))]
    return min(1.0, over_ranks(waits) / step_s) if waits and step_s else None


def _rank_now(number: int, rank: _Rank) -> RankNow:
    def typical(name: str) -> float | None:
        values = _values(rank.recent, name)
        return median(values) if values else None

    return RankNow(
        rank=number,
        host=rank.start.host if rank.start else None,
        stage=rank.stage,
        step=rank.steps[-1].index if rank.steps else None,
        busy_time_s=typical("busy_time_s"),
        comm_wait_s=typical("comm_wait_s"),
        data_wait_s=typical("data_wait_s"),
        memory_bytes=rank.memory_bytes,
    )


def _values(steps: Sequence[Step], name: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


def _peaks(step: Step) -> tuple[float | None, ...]:
    """Return the memory peaks of a step, the most inclusive first."""
    return (
        step.device_used_bytes,
        step.reserved_bytes,
        step.allocated_bytes,
        step.resident_bytes,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _ends_of(path: Path, whence: int) -> list[str]:
    """Return the lines in the first (`whence` 0) or last (2) 32 KiB of a file; [] if unreadable."""
    try:
        with open_regular(path) as file:
            if whence == 2:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


class RankNow(Value):
    """State of one rank; times are medians of the recent steps in seconds."""

    rank: NonNegativeInt
    host: str | None
    stage: NonNegativeInt
    step: NonNegativeInt | None
    """Last finished step."""
    busy_time_s: float | None
    comm_wait_s: float | None
    data_wait_s: float | None
    memory_bytes: float | None
    """Largest memory peak so far, of the kind that the rank reports."""


class DevicesNow(Value):
    """Last telemetry of all hosts: means over devices, unless stated otherwise."""

    hosts: NonNegativeInt
    age_s: float
    """Age of the oldest of these samples in seconds."""
    clock_mhz: float | None = None
    lowest_clock_mhz: float | None = None
    power_w: float | None = None
    """Total power of all devices in watts."""
    hottest_c: float | None = None


class WatchState(Value):
    """Snapshot of a run; unknown values are None."""

    schema_version: Literal[1] = 1
    run: str
    recipe: str | None
    status: Status
    reason: str | None
    step: NonNegativeInt | None
    steps_requested: NonNegativeInt | None
    loss: float | None
    last_sign_s: float | None
    """Seconds since a rank last wrote to a file."""
    step_time_s: float | None
    """Median time of the recent steps in seconds, slowest rank."""
    n: NonNegativeInt
    """Number of recent steps with a time."""
    usual_s: float | None
    """Median time of all earlier steps in seconds; the first step is always excluded."""
    usual_n: NonNegativeInt
    ratio: float | None
    """`step_time_s` divided by `usual_s`."""
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    achievable_fraction: float | None
    data_wait_fraction: float | None
    """Fraction of the recent steps spent waiting for data, slowest loader."""
    comm_wait_fraction: float | None
    """Fraction of the recent steps spent waiting for collectives, median rank."""
    waited_for: NonNegativeInt | None
    """Rank that the others of its stage wait for; None if no rank stands out."""
    waited_for_excess: float | None
    """Busy time of that rank divided by the median of the others, minus 1."""
    memory_bytes: float | None
    """Largest memory peak of any rank in bytes."""
    eta_s: float | None
    """Seconds to the last step at the recent pace, which includes checkpoints as they occur."""
    ranks: tuple[RankNow, ...]
    devices: DevicesNow | None

    @property
    def ended(self) -> bool:
        """True if the run has ended."""
        return self.status not in ("queued", "running")
