"""Agreement of a run's rank files with the run and with each other.

A lost or copied file changes totals such as tokens/s, so a result of files that disagree is never
ok. Programs that Paceline did not write may log on one rank only, or run several devices in one
process, so their files are compared only with each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.core.run import RunSpec
from paceline.core.steps import Steps
from paceline.core.units import pluralize
from paceline.files.events import RankLog, StartEvent
from paceline.runs.logged_run import NATIVE

ROUNDING = 1e-3
"""Relative difference that rounded figures of one step may have."""
CLOCK_S = 1e-3
"""Difference in seconds that two readings of a clock may have."""


def contradiction(
    spec: RunSpec, ranks: Mapping[int, RankLog], series: Mapping[int, Steps], merged: Steps
) -> str | None:
    """Return how the files of the ranks contradict the run or each other; None if they agree."""
    starts = {rank: log.start for rank, log in sorted(ranks.items()) if log.start}
    native_spec = spec if spec.engine == NATIVE else None
    if fault := _wrong_ranks(starts):
        return fault
    if native_spec and (fault := _differs_from_run(native_spec, ranks)):
        return fault
    for rank, log in sorted(ranks.items()):
        if log.end and log.end.status != "ok":
            return f"rank {rank} ended as {log.end.status}: {log.end.reason}"
        if fault := _impossible_step(series[rank], native_spec):
            return f"rank {rank}: {fault}"
    return _wrong_batch(native_spec, merged) if native_spec else None


def missing_ranks_warning(ranks: Mapping[int, RankLog]) -> str | None:
    """Return a warning if the files of ranks are missing that the start lines count."""
    size = max((log.start.world_size for log in ranks.values() if log.start), default=0)
    if len(ranks) >= size:
        return None
    present = pluralize(len(ranks), "rank")
    return f"step files of {present} of {size:,}: tokens and samples of the others are missing"


def _wrong_ranks(starts: Mapping[int, StartEvent]) -> str | None:
    """Return which file states another rank or number of ranks than the files have."""
    sizes = sorted({start.world_size for start in starts.values()})
    if len(sizes) > 1:
        return f"the step files state {sizes[0]:,} and {pluralize(sizes[-1], 'rank')}"
    for rank, start in starts.items():
        if start.rank != rank:
            return f"the step file of rank {rank} was written by rank {start.rank}"
        if rank >= start.world_size:
            return f"rank {rank} has a step file, but the run has {pluralize(sizes[0], 'rank')}"
    return None


def _differs_from_run(spec: RunSpec, ranks: Mapping[int, RankLog]) -> str | None:
    """Return how the built-in trainer's files differ from those that the run's settings lead to."""
    size, num_parameters = spec.world_size, spec.num_parameters
    run = f"the run has {pluralize(size, 'rank')}"
    if extra := sorted(ranks.keys() - range(size)):
        return f"{run}, but there is a step file of rank {extra[0]}"
    for rank in range(size):
        file, log = f"the step file of rank {rank}", ranks.get(rank)
        if log is None:
            return f"{run}, but {file} is missing"
        if log.start is None or log.end is None:
            return f"{file} has no {'end' if log.start else 'start'} line"
        if log.start.world_size != size:
            return f"{run}, but {file} states {log.start.world_size:,}"
        if log.start.num_parameters not in (None, num_parameters):
            count = f"{log.start.num_parameters:,} parameters"
            return f"rank {rank} trained {count}, but the recipe's model has {num_parameters:,}"
        if log.end.steps != len(log.steps) and not log.skipped_lines.lines:
            steps = pluralize(len(log.steps), "step")
            return f"{file} has {steps}, but its end line states {log.end.steps:,}"
    return None


def _impossible_step(steps: Steps, native_spec: RunSpec | None) -> str | None:
    """Return which figures of a step contradict each other, or the built-in trainer's settings."""
    step_s, busy_s = steps["step_time_s"], steps["busy_time_s"]
    tokens, positions = steps["tokens"], steps["samples"] * steps["seq_len"]
    too_busy = busy_s > step_s * (1 + ROUNDING) + CLOCK_S
    wrong_tokens = tokens > positions * (1 + ROUNDING)
    no_loss = ~np.isfinite(steps["loss"])
    if native_spec is None:
        no_loss &= "loss" in steps.columns and no_loss.all()
    elif native_spec.data.packing != "padded":
        wrong_tokens |= tokens < positions * (1 - ROUNDING)
    for wrong, describe in (
        (too_busy, lambda i: f"took {step_s[i]:.6g} s, but was busy {busy_s[i]:.6g} s"),
        (wrong_tokens, lambda i: f"has {tokens[i]:,.0f} tokens in {positions[i]:,.0f} positions"),
        (no_loss, lambda i: "has no finite loss"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            return f"step {steps.index[row]} {describe(row)}"
    return None


def _wrong_batch(spec: RunSpec, merged: Steps) -> str | None:
    """Return which step's samples or sequence length are not those of the settings."""
    samples, batch, seq_len = merged["samples"], merged["global_batch"], spec.training.seq_len
    wrong = abs(samples - batch) > ROUNDING * batch
    wrong |= batch > spec.training.global_batch
    wrong |= merged["seq_len"] != seq_len
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    has = f"{samples[row]:,.6g} samples of length {merged['seq_len'][row]:,.0f}"
    expected = f"a global batch of {spec.training.global_batch:,} of length {seq_len:,}"
    return f"step {merged.index[row]} has {has}, but the recipe has {expected}"
