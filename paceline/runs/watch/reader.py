"""Follows every rank of a run folder by what was added to its files; writes nothing there."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import TypedDict

from paceline.core.flops import model_flops_per_token
from paceline.core.rates import flops_per_s_per_device, mfu
from paceline.core.steps import Step
from paceline.core.telemetry import TelemetrySample, read_telemetry
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
from paceline.runs.step_follower import Follower, StepFollower, follower
from paceline.runs.watch.state import DevicesNow, RankNow, WatchState

RECENT = 10
"""Steps that a figure of now is taken from."""
PAST = 500
"""Steps before them that say what is usual."""
NAMED_EXCESS = 0.05
"""A rank that is busier than the others by less is not shown as waited for."""
NAMED_STEPS = 0.8
"""Share of the recent steps in which it must have been the busiest."""
TAIL_BYTES = 32_768
_FILE = re.compile(r"rank-(\d+)\.jsonl")


@dataclass
class _Rank:
    """One rank's last steps."""

    lines: Follower
    path: Path | None = None
    start: StartEvent | None = None
    steps: deque[Step] = field(default_factory=lambda: deque[Step](maxlen=PAST + RECENT))
    memory_bytes: float | None = None

    def read(self) -> None:
        """Take in what was added since the last look."""
        for step in self.lines.new_steps():
            self.steps.append(step)
            told = [peak for peak in _peaks(step) if peak is not None]
            self.memory_bytes = max([*told[:1], self.memory_bytes or 0.0]) or None
        if self.start is None and self.path is not None:
            first = _ends_of(self.path, 0)
            self.start = next((e for e in read_events(first) if isinstance(e, StartEvent)), None)

    @property
    def stage(self) -> int:
        return self.start.stage if self.start else 0

    @property
    def recent(self) -> list[Step]:
        return list(self.steps)[-RECENT:]


@dataclass
class RunReader:
    """One run folder, looked at again and again."""

    folder: Path
    _ranks: dict[int, _Rank] = field(default_factory=dict[int, _Rank])

    def state(self) -> WatchState:
        """The run at this moment; raises UserError where the folder holds no run."""
        record = read_record(self.folder)
        self._read(record)
        ranks = {number: rank for number, rank in sorted(self._ranks.items()) if rank.steps}
        times = _times([*ranks.values()])
        recent, past = times[-RECENT:], times[:-RECENT]
        step_s = median(recent) if recent else None
        usual_s = median(past) if past else None
        waited_for = _waited_for(ranks)
        last = min((rank.steps[-1].index for rank in ranks.values()), default=None)
        asked = record.spec.steps_asked if record.spec else None
        status = current_status(record)
        left = asked - last if asked and last and status in ("queued", "running") else None
        return WatchState(
            run=self.folder.name,
            recipe=record.known.recipe,
            status=status,
            reason=record.reason,
            step=last,
            steps_asked=asked,
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
            eta_s=left * mean(recent) if left is not None and recent else None,
            ranks=tuple(_rank_now(number, rank) for number, rank in sorted(self._ranks.items())),
            devices=devices_now(self.folder),
        )

    def close(self) -> None:
        """Let go of what is open."""
        for rank in self._ranks.values():
            rank.lines.close()

    def _read(self, record: RunRecord) -> None:
        for path in sorted((self.folder / STEPS_FOLDER).glob("rank-*.jsonl")):
            named = _FILE.fullmatch(path.name)
            if named and int(named[1]) not in self._ranks:
                self._ranks[int(named[1])] = _Rank(StepFollower(path), path)
        foreign = record.spec is not None and record.spec.engine != NATIVE
        if foreign and not self._ranks and record.spec is not None:
            self._ranks[0] = _Rank(follower(self.folder, record.spec.engine))
        for rank in self._ranks.values():
            rank.read()

    def _last_sign_s(self) -> float | None:
        paths = [p for name in (STEPS_FOLDER, LOGS_FOLDER) for p in (self.folder / name).glob("*")]
        written: list[float] = []
        for path in paths:
            with suppress(OSError):  # a rank removes its empty files
                written.append(path.stat().st_mtime)
        return max(0.0, time.time() - max(written)) if written else None


def devices_now(folder: Path) -> DevicesNow | None:
    """The last telemetry of every host; None where none was recorded."""
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
    """Seconds of the steps that all ranks have done, slowest rank, without the first step."""
    tables = [
        {s.index: s.step_time_s for s in rank.steps if s.step_time_s is not None and s.index > 1}
        for rank in ranks
    ]
    common = set[int].intersection(*map(set, tables)) if tables else set[int]()
    return [max(table[number] for table in tables) for number in sorted(common)]


class RatesNow(TypedDict):
    """Throughput and use of the devices; None for what is not known."""

    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    of_achievable: float | None


def _rates(record: RunRecord, ranks: Sequence[_Rank], step_s: float | None) -> RatesNow:
    """The rates at a step time."""
    facts = record.known
    rates = RatesNow(tokens_per_s=None, samples_per_s=None, mfu=None, of_achievable=None)
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
    sample = model_flops_per_token(convention, x) * facts.seq_len
    reached = flops_per_s_per_device(sample, batch, step_s, devices)
    device = find_device(facts.device) if facts.device else None
    peak = device.peak_flops_per_s(facts.dtype) if device and facts.dtype else None
    if tensor_float_note(facts) is None:
        rates["mfu"] = mfu(reached, peak)
    if record.achievable_flops_per_s:
        rates["of_achievable"] = reached * devices / record.achievable_flops_per_s
    return rates


def _waited_for(ranks: dict[int, _Rank]) -> tuple[int, float] | None:
    """The rank that is busier than the others of its stage in most recent steps, and by how much.

    It is busier than their median by 5 % at least; None where nobody is.
    """
    worst: tuple[int, float] | None = None
    for number, rank in ranks.items():
        others = [r for n, r in ranks.items() if r.stage == rank.stage and n != number]
        tables = [{s.index: s.busy_time_s for s in r.recent} for r in (rank, *others)]
        common = set[int].intersection(*map(set, tables))
        rows = [[b for t in tables if (b := t[at]) is not None] for at in sorted(common)]
        rows = [row for row in rows if len(row) == len(tables) > 1]
        if len(rows) < RECENT / 2:
            continue
        excess = median(row[0] for row in rows) / median(median(row[1:]) for row in rows) - 1
        busiest = sum(row[0] == max(row) for row in rows) / len(rows)
        if excess > max(NAMED_EXCESS, worst[1] if worst else 0.0) and busiest >= NAMED_STEPS:
            worst = (number, excess)
    return worst


def _share(
    ranks: dict[int, _Rank],
    name: str,
    step_s: float | None,
    over_ranks: Callable[[list[float]], float],
) -> float | None:
    """A wait over the step, mean of the recent steps; None where no rank tells it."""
    waits = [mean(told) for r in ranks.values() if (told := _told(r.recent, name))]
    return min(1.0, over_ranks(waits) / step_s) if waits and step_s else None


def _rank_now(number: int, rank: _Rank) -> RankNow:
    def typical(name: str) -> float | None:
        told = _told(rank.recent, name)
        return median(told) if told else None

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


def _told(steps: Sequence[Step], name: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


def _peaks(step: Step) -> tuple[float | None, ...]:
    """Its memory peaks, the widest kind first."""
    return (
        step.device_used_bytes,
        step.reserved_bytes,
        step.allocated_bytes,
        step.resident_bytes,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _ends_of(path: Path, whence: int) -> list[str]:
    """The lines in a file's first (`whence` 0) or last (2) 32 KiB; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            if whence == 2:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
