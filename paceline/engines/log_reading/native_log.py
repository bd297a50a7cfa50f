"""Log of the native trainer as one run.

The lines are events of one rank, events of several ranks one after another, or the merged steps of
a run folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from paceline.core.ranks import merge_ranks
from paceline.core.steps import Steps
from paceline.engines.log_reading.log_content import LAYOUT_FACTS, LogContent
from paceline.engines.log_reading.native_lines import (
    Columns,
    Event,
    Faults,
    LineLayout,
    as_object,
    columns_of,
    decode_events,
    is_count,
    lines_of,
    of_one_rank,
)
from paceline.engines.log_reading.records import watch_end
from paceline.files.events import SCHEMA

STEPS_AT_ONCE = 1 << 16
MIN_AT_ONCE = 16
MAX_RANKS = 20_000
OWN_SHARE = ("tokens", "samples")
"""Columns of an event line that cover only the rank's own part of the step."""

CONSTANTS = ("global_batch", "seq_len")
LONGEST_REASON = 200

_LOST = re.compile(r"became (?:-?inf|nan) in step (\d{1,15})")


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the steps of all ranks in the log, merged as in a run folder."""
    run = _Run(log)
    layout: LineLayout | None = None
    for block in watch_end(blocks, log):
        columns = layout.columns(block) if layout else None
        if layout and columns:
            run.take_columns(columns, layout.of_one_rank)
        elif lines := lines_of(block):
            run.take(decode_events(lines, run.faults, ends_whole=block.endswith((b"\n", b"\r"))))
            layout = LineLayout.learn(lines[-1]) or layout
    run.keep()


@dataclass
class _Rank:
    """Steps of one rank; those of a merged file belong to no rank."""

    log: LogContent = field(default_factory=LogContent)
    of_one_rank: bool = False


class _Run:
    """Steps of every rank, and information in start and end lines."""

    def __init__(self, log: LogContent) -> None:
        self.faults = Faults()
        self._log = log
        self._ranks: dict[int, _Rank] = {}
        self._rank = 0
        self._world_size: int | None = None
        self._newest_schema = SCHEMA
        self._last_step = 0
        self._lost_step: int | None = None
        self._skipped = 0
        self._constants: dict[str, set[float]] = {name: set() for name in CONSTANTS}

    def take(self, events: list[Event]) -> None:
        """Add the events in order, consecutive steps together."""
        others = [at for at, event in enumerate(events) if event.get("event", "step") != "step"]
        begin = 0
        for at in (*others, len(events)):
            if at > begin:
                self._take_steps(events[begin:at])
            if at < len(events):
                self._take_other(events[at])
            begin = at + 1

    def take_columns(self, rows: Columns, of_one_rank: bool) -> None:
        """Add steps of the current rank; with `of_one_rank`, tokens and samples are its share."""
        index, columns = rows
        rank = self._ranks.setdefault(self._rank, _Rank())
        rank.of_one_rank |= of_one_rank
        rank.log.add_steps(
            index,
            **{name: column for name, column in columns.items() if not np.isnan(column).all()},
        )
        self._last_step = max(self._last_step, int(index[-1]))
        for name, values in self._constants.items():
            if len(values) < 2 and name in columns:
                column = columns[name]
                values.update(np.unique(column[np.isfinite(column)])[:2].tolist())

    def keep(self) -> None:
        """Store the merged steps and remarks about them in the log."""
        log, ranks = self._log, self._ranks
        own_share = any(rank.of_one_rank for rank in ranks.values())
        partial = own_share and len(ranks) != self._world_size
        without = OWN_SHARE if partial else ()
        if len(ranks) == 1:
            log.take_steps(next(iter(ranks.values())).log, without)
        elif ranks:
            _add_merged(log, {number: rank.log.steps() for number, rank in ranks.items()}, without)
            for sentence in sorted({s for rank in ranks.values() for s in rank.log.remarks}):
                log.remark(sentence)
        if partial:
            size = "an unknown number of" if self._world_size is None else str(self._world_size)
            log.remark(
                f"the log has lines of {len(ranks)} of {size} ranks: the loss covers only these"
            )
        if self._lost_step is not None:
            step = max(self._lost_step, self._last_step + 1)
            log.add_steps(np.array([step]), loss=np.array([inf]))
        if len(log):
            log.facts["log_interval"] = 1
        for name, values in self._constants.items():
            if len(values) == 1 and 1 <= (value := values.pop()) < 1e15:
                log.facts[name] = int(value)
        self._keep_faults()

    def _keep_faults(self) -> None:
        log, faults = self._log, self.faults
        if faults.is_incomplete:
            log.incomplete_reason = "the last line is incomplete"
        if faults.unread:
            log.remark(f"invalid event lines, ignored: {faults.unread:,}")
        if self._newest_schema > SCHEMA:
            log.remark(
                f"the lines have schema {self._newest_schema}, and this version reads schema "
                f"{SCHEMA}: newer fields are ignored; update Paceline"
            )
        if self._skipped:
            log.remark(f"skipped steps (fp16 overflow): {self._skipped:,}")

    def _take_steps(self, events: list[Event]) -> None:
        sound = [event for event in events if is_count(event.get("step"))]
        self.faults.unread += len(events) - len(sound)
        if sound:
            self._skipped += sum(event.get("skipped") is True for event in sound)
            self.take_columns(columns_of(sound), any(map(of_one_rank, sound)))

    def _take_other(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self._take_start(event)
        elif kind == "end":
            self._take_end(event)
        elif kind != "memory":
            self.faults.unread += 1

    def _take_start(self, start: Event) -> None:
        """Read the rank of the following steps, and the run's settings."""
        rank, size, schema = start.get("rank"), start.get("world_size"), start.get("schema")
        if is_count(schema):
            self._newest_schema = max(self._newest_schema, schema)
        if not is_count(rank) or not is_count(size) or size == 0:
            self.faults.unread += 1
            return
        if len(self._ranks) < MAX_RANKS:
            self._rank = rank
        self._world_size = max(size, self._world_size or 0)
        facts = self._log.facts
        facts["num_devices"] = self._world_size
        layout = as_object(start.get("layout"))
        facts.update({name: layout[name] for name in LAYOUT_FACTS if is_count(layout.get(name))})
        if is_count(start.get("num_parameters")):
            facts["num_parameters"] = start["num_parameters"]
        on_cpu = start.get("cuda") is None and start.get("backend") in (None, "gloo")
        name, dtype = start.get("device_name"), start.get("dtype")
        if isinstance(name, str) and name:
            facts["device"] = "cpu" if on_cpu else _short(name)
        if isinstance(dtype, str) and dtype:
            facts["dtype"] = _short(dtype)

    def _take_end(self, end: Event) -> None:
        """Read how the rank ended; a step with a lost loss has no line of its own."""
        status, reason, steps = _short(end.get("status")), end.get("reason"), end.get("steps")
        self._log.end_line = f"end of a rank, status {status}"
        if status == "oom":
            self._log.out_of_memory = _short(reason)
        elif status == "nan":
            match = _LOST.search(str(reason))
            after = steps + 1 if is_count(steps) else 0
            self._lost_step = max(self._lost_step or 0, int(match[1]) if match else after)
        elif status != "ok":
            self._log.remark(f"a rank ended with status {status}: {_short(reason)}")


def _add_merged(log: LogContent, ranks: Mapping[int, Steps], without: Iterable[str]) -> None:
    """Add the merged ranks in chunks, because a full copy would need too much memory."""
    numbers = np.unique(next(iter(ranks.values())).index)
    at_once = max(MIN_AT_ONCE, STEPS_AT_ONCE // len(ranks))
    bounds = [*numbers[::at_once].tolist(), 1 << 62]
    for low, high in pairwise(bounds):
        part = {number: _between(steps, low, high) for number, steps in ranks.items()}
        with np.errstate(all="ignore"):
            merged = merge_ranks(part)
        columns = {
            name: column
            for name, column in merged.columns.items()
            if name not in without and not np.isnan(column).all()
        }
        if len(merged):
            log.add_steps(merged.index, **columns)


def _between(steps: Steps, low: int, high: int) -> Steps:
    return steps.select((steps.index >= low) & (steps.index < high))


def _short(value: object) -> str:
    return "".join(c for c in str(value)[:LONGEST_REASON] if c.isprintable())
