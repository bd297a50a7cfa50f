"""Simulation of a pipeline's step pass by pass: its duration, and the idle time of each rank.

The closed forms of core/pipeline.py and step.py hold for equal stages and instant transfers. In
this simulation the first stage may have the embedding and the last one the head. Transfers between
ranks take time, so it matters which rank waits for which.

Symbols: p ranks (pp) with v chunks of layers each (vp), S = p v stages, of which stage i is on rank
i mod p, and m micro-batches. A pass takes one micro-batch through one stage. Passes are numbered,
so that their durations and dependencies are arrays:

    pass = kind S m + stage m + micro-batch,    kind 0  forward
                                                     1  backward
                                                     2  gradients of weights, zero-bubble only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from paceline.core.layout import Schedule
from paceline.core.pipeline import stage_sizes
from paceline.estimate.model.block import recompute_passes
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.step import (
    StepComponents,
    StepTime,
    assemble_step,
    closed_bubble,
    step_components,
)

WEIGHT_SHARE = 0.5
"""Share of a backward pass that computes weight gradients; only zero-bubble separates it."""
Order = list[int]
"""Passes of one rank in execution order."""


@dataclass(frozen=True)
class PipelineTime:
    """Duration of one step and busy time of its ranks."""

    total_s: float
    """Seconds until the last rank is done."""
    busy_s: tuple[float, ...]
    """Seconds of computation on each rank."""

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the step in which each rank waits, 0-1."""
        return tuple(1 - busy / self.total_s for busy in self.busy_s)

    @property
    def idle_fraction(self) -> float:
        """Mean of the ranks' idle shares, 0-1."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s)


def pipeline_s(
    stage_forward_s: Sequence[float],
    stage_backward_s: Sequence[float],
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    vp: int = 1,
    exchange_s: float = 0.0,
    weight_share: float = WEIGHT_SHARE,
) -> PipelineTime:
    """Return the time of a step whose pp x vp stages take these seconds.

    Stage i is on rank i mod pp. A pass waits for its rank and for the neighbouring stage's pass,
    whose output arrives `exchange_s` later; the rank stays idle meanwhile. 1f1b over several chunks
    is the interleaved schedule (Narayanan et al., arXiv:2104.04473). zero-bubble is ZB-H1 (Qi et
    al., arXiv:2401.10241) with `weight_share` of a backward pass deferred. Raises ValueError for
    stages that do not fit the schedule, and if passes wait for each other in a cycle (interleaved,
    many ranks, uneven rounds).
    """
    stages, m = len(stage_forward_s), num_microbatches
    if m < 1 or vp < 1 or not stages or stages % vp or len(stage_backward_s) != stages:
        raise ValueError(f"{stages} stages do not fit {vp} chunks per rank and {m} micro-batches")
    if schedule == "zero-bubble" and vp > 1:
        raise ValueError("zero-bubble requires one chunk per rank")
    pp = stages // vp
    splits_backward = schedule == "zero-bubble"
    backward = np.asarray(stage_backward_s, dtype=float) * (
        1 - weight_share if splits_backward else 1.0
    )
    weights = np.asarray(stage_backward_s, dtype=float) * weight_share
    durations = np.repeat(np.concatenate([stage_forward_s, backward, weights]), m)
    orders = _orders(schedule, pp, vp, m)
    total = _last_end_s(
        orders, durations.tolist(), _dependencies(stages, m), exchange_s if pp > 1 else 0.0
    )
    busy = tuple(float(durations[order].sum()) for order in orders)
    return PipelineTime(total, busy)


def _last_end_s(
    orders: Sequence[Order], durations: list[float], dependencies: list[int], exchange_s: float
) -> float:
    """Return the time at which the last rank ends; each pass starts once its inputs have arrived.

    Every rank continues until it waits for a pass that has not ended; then the next rank's turn
    comes. Turns alternate in direction, because forward passes flow one way and backward passes the
    other.
    """
    ends = [-1.0] * len(durations)
    rank_free, position = [0.0] * len(orders), [0] * len(orders)
    ranks = list(range(len(orders)))
    remaining = sum(map(len, orders))
    while remaining:
        remaining_before = remaining
        for rank in ranks:
            order, i, now = orders[rank], position[rank], rank_free[rank]
            for i in range(position[rank], len(order)):
                work = order[i]
                dependency = dependencies[work]
                if dependency >= 0:
                    arrival = ends[dependency]
                    if arrival < 0:
                        break
                    arrival += exchange_s
                    if arrival > now:  # max() would take as long as the rest of the loop
                        now = arrival
                now += durations[work]
                ends[work] = now
            else:
                i = len(order)
            remaining -= i - position[rank]
            position[rank], rank_free[rank] = i, now
        if remaining == remaining_before:
            raise ValueError("the schedule deadlocks: passes wait for each other in a cycle")
        ranks.reverse()
    return max(rank_free)


def _dependencies(stages: int, m: int) -> list[int]:
    """Return the pass on a neighbouring stage that each pass waits for, -1 for none.

    Forward passes wait for the previous stage, backward passes for the next one. The order of each
    rank ensures that its forward pass precedes its backward pass, and this the weight gradients.
    """
    forward = np.arange(-m, (stages - 1) * m)
    backward = np.arange((stages + 1) * m, (2 * stages + 1) * m)
    forward[:m] = -1
    backward[-m:] = -1
    return np.concatenate([forward, backward, np.full(stages * m, -1)]).tolist()


def _orders(schedule: Schedule, pp: int, vp: int, m: int) -> list[Order]:
    """Return the pass order of every rank, which starts with a warm-up of forward passes.

    Forward passes before the first backward pass: gpipe: all v m. 1f1b and zero-bubble: p - 1 -
    rank, until the first micro-batch comes back. interleaved: 2 (p - 1 - rank) + (v - 1) g, chunks
    in turn for rounds of g micro-batches, as Megatron counts its warm-up; g is p where that divides
    m.
    """
    if schedule == "gpipe":
        return [_rank_order(pp, vp, m, rank, m, vp * m) for rank in range(pp)]
    if schedule == "zero-bubble":
        return [
            _with_deferred_weights(_rank_order(pp, 1, m, r, m, pp - 1 - r), pp, m, r)
            for r in range(pp)
        ]
    if vp == 1:
        return [_rank_order(pp, 1, m, rank, m, pp - 1 - rank) for rank in range(pp)]
    group = max(1, m // max(1, m // pp))
    return [
        _rank_order(pp, vp, m, rank, group, 2 * (pp - 1 - rank) + (vp - 1) * group)
        for rank in range(pp)
    ]


def _rank_order(pp: int, vp: int, m: int, rank: int, group: int, ahead: int) -> Order:
    """Return an order of `ahead` forward passes, then one forward and one backward pass in turn.

    Chunks take turns for every `group` of micro-batches. Backward passes go through the chunks from
    the last one to the first.
    """
    turns = [
        (chunk, start, min(start + group, m)) for start in range(0, m, group) for chunk in range(vp)
    ]
    forwards: Order = []
    backwards: Order = []
    for chunk, start, end in turns:
        forward = (chunk * pp + rank) * m
        forwards += range(forward + start, forward + end)
        backward = ((2 * vp - 1 - chunk) * pp + rank) * m
        backwards += range(backward + start, backward + end)
    ahead = min(ahead, len(forwards))
    steady = [work for both in zip(forwards[ahead:], backwards, strict=False) for work in both]
    return forwards[:ahead] + steady + backwards[len(backwards) - ahead :]


def _with_deferred_weights(order: Order, pp: int, m: int, rank: int) -> Order:
    """Return the order with weight gradients, `rank` micro-batches after their backward passes.

    ZB-H1 defers as many as there are ranks before this one; the remaining ones run at the end.
    """
    backward, weights = (pp + rank) * m, (2 * pp + rank) * m
    with_weights: Order = []
    for work in order:
        with_weights.append(work)
        if work >= backward + rank:
            with_weights.append(weights + work - backward - rank)
    return with_weights + list(range(weights + max(0, m - rank), weights + m))


MAX_PASSES = 400_000
"""Maximum passes of all ranks in a simulated step (about 1 s); beyond it, use the closed form."""


def simulated_step(x: Cases, c: Mapping[str, float]) -> StepTime:
    """Return the seconds of a step by part, with a simulated pipeline.

    The duration of a stage follows from its layers, the last stage's head, and the transfers of
    every chunk. The bubble is the idle time of the slowest rank: the pipeline's duration minus its
    own work.
    """
    work = step_components(x, c)
    whole = _pipelines_s(x, work)
    busy = work.num_microbatches * (work.slowest + work.stage_transfer)
    waits = np.maximum(0.0, whole - busy) / x.cpu_oversubscription
    return assemble_step(x, c, work, np.where(np.isnan(whole), closed_bubble(x, work), waits))


def _pipelines_s(x: Cases, work: StepComponents) -> Floats:
    """Return the seconds until the last rank of each pipeline is done; nan if not simulated."""
    seconds = np.full(x.size, np.nan)
    for row in np.flatnonzero(x.pp > 1).tolist():
        seconds[row] = _pipeline_s(x, work, row)
    return seconds


def _pipeline_s(x: Cases, work: StepComponents, row: int) -> float:
    """Return the same for one case; nan for too many passes or an impossible schedule."""
    pp, vp, m = int(x.pp[row]), max(1, int(x.vp[row])), int(work.num_microbatches[row])
    if 2 * pp * vp * m > MAX_PASSES:
        return np.nan
    overhead = (work.stage_transfer[row] + work.overhead[row]) / vp
    last, layers = float(work.last_layers[row]), int(x.layers[row])
    sizes = _sizes(layers, pp, vp) if np.isnan(last) else _placed_sizes(layers, int(last), pp, vp)
    seconds = np.array(sizes) * work.layer[row] + overhead
    seconds[-1] += work.head[row]
    # The forward pass counts 1. The backward pass counts 2, or 1 if weights are frozen, plus the
    # recomputed forward passes.
    recomputed_passes = float(recompute_passes(x)[row])
    forward = seconds / (2 + (x.frozen[row] == 0) + recomputed_passes)
    schedule = cast(Schedule, str(x.categories["schedule"][row]))
    order: Schedule = "interleaved" if vp > 1 and schedule == "1f1b" else schedule
    try:
        return pipeline_s(forward.tolist(), (seconds - forward).tolist(), m, order, vp).total_s
    except ValueError:
        return np.nan


def _placed_sizes(layers: int, last: int, pp: int, vp: int) -> list[float]:
    """Return the layers of each chunk if the last rank has `last` and the others share the rest."""
    each, remainder = divmod(layers - last, pp - 1)
    rank_layers = [*(each + (rank < remainder) for rank in range(pp - 1)), last]
    return [number / vp for number in rank_layers] * vp


def _sizes(layers: int, pp: int, vp: int) -> list[int]:
    """Return the layers of each chunk; the first ones have one more if uneven."""
    try:
        return stage_sizes(layers, pp, vp)
    except ValueError:
        each, remainder = divmod(layers, pp * vp)
        return [each + (i < remainder) for i in range(pp * vp)]
