"""Ranks of one run: merged step series, straggler detection and memory.

Collectives synchronize all ranks, so their step times are equal. The slow rank is the one that
waits least. It has the largest busy time among ranks with equal work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, lgamma, log

import numpy as np
import numpy.typing as npt

from paceline.core.binding import Place
from paceline.core.memory import Memory, memory_per_device
from paceline.core.result import MemoryByPart, RankMemory, RankSummary, Straggler
from paceline.core.run import RunSettings, RunSpec
from paceline.core.stats import group_medians
from paceline.core.steps import FLOATS, FloatColumn, IntColumn, Steps

MIN_EXCESS = 0.01
"""Minimum excess of busy time over the median to report a rank (1%)."""

MAX_P_VALUE = 0.01
"""Probability below which a rank is not the busiest this often by chance among equal ranks."""

BLOCK_STEPS = 5
"""Steps per block. Neighboring steps are correlated, so blocks are counted, not single steps."""

ONE_STAGE: Mapping[int, int] = {}
"""Default stages: all ranks are on the first pipeline stage."""


def merge_ranks(ranks: Mapping[int, Steps]) -> Steps:
    """Merge ranks into one series over the steps that every rank finished.

    Times and memory are the maximum over ranks. The wait in collectives is that of the median rank.
    Tokens and samples are summed: tensor-, pipeline- and context-parallel ranks that work on the
    same tokens each report their share. The loss is averaged with samples as weights, or tokens if
    samples are unknown. Every rank divides its sum by the mean count of targets, so ranks with the
    same samples count them once together, and unequal padding does not bias the loss. The attended
    share of documents is weighted in the same way.
    """
    if not ranks:
        return Steps.of([])
    common = _common_steps(ranks)
    aligned_ranks = [_at(steps, common) for _, steps in sorted(ranks.items())]
    first = aligned_ranks[0]
    by_rank = {name: np.stack([s[name] for s in aligned_ranks]) for name in FLOATS}
    columns = {name: _largest(values) for name, values in by_rank.items()}
    for name in ("tokens", "samples"):
        columns[name] = by_rank[name].sum(axis=0)
    columns["comm_wait_s"] = np.median(by_rank["comm_wait_s"], axis=0)
    samples, tokens = by_rank["samples"], by_rank["tokens"]
    shares = np.where(np.isfinite(samples).all(axis=0), samples, tokens)
    for name in ("loss", "attended_share", "expert_overload", "dead_experts"):
        columns[name] = _weighted_mean(by_rank[name], shares)
    skipped = np.any([s.skipped for s in aligned_ranks], axis=0)
    return Steps(first.index, first.averaged_over, skipped, columns)


def rank_summaries(
    ranks: Mapping[int, Steps],
    hosts: Mapping[int, str],
    window: IntColumn,
    stages: Mapping[int, int] = ONE_STAGE,
    places: Sequence[Place] = (),
) -> tuple[RankSummary, ...]:
    """Return per-rank medians over the steps in `window`.

    `stages` maps ranks to pipeline stages.
    """
    cores = {place.rank: place for place in places if place.cores is not None}
    summaries: list[RankSummary] = []
    for rank, steps in sorted(ranks.items()):
        inside = steps.select(np.isin(steps.index, window))
        memory = {
            kind: float(np.nanmax(steps[f"{kind}_bytes"]))
            for kind in ("allocated", "reserved", "device_used", "resident")
            if steps.known(f"{kind}_bytes")
        }
        summaries.append(
            RankSummary(
                rank=rank,
                host=hosts.get(rank, "unknown"),
                stage=stages.get(rank, 0),
                step_time_s=_median(inside, "step_time_s"),
                busy_time_s=_median(inside, "busy_time_s"),
                comm_wait_s=_median(inside, "comm_wait_s"),
                data_wait_s=_median(inside, "data_wait_s"),
                memory_bytes=memory,
                cores=cores[rank].cores if rank in cores else None,
                bound=cores[rank].bound_by is not None if rank in cores else None,
            )
        )
    return tuple(summaries)


def find_straggler(
    ranks: Mapping[int, Steps],
    hosts: Mapping[int, str],
    window: IntColumn,
    stages: Mapping[int, int] = ONE_STAGE,
) -> Straggler | None:
    """Return the rank with the largest median busy time relative to its pipeline stage.

    Stages do different work, so a rank is compared only with ranks of its own stage. Returns None
    if no stage has two ranks or if there are no busy times. The rank is reported as a straggler
    only if it exceeds the median of the others by more than 1% and is the busiest in more blocks of
    five steps than chance allows among equal ranks (one-sided binomial test, Bonferroni-corrected
    for the number of ranks because the busiest one was selected). Of several stages, ranks that
    qualify come first, then the largest excess decides.
    """
    if not ranks or len(window) == 0:
        return None
    common = np.intersect1d(_common_steps(ranks), window)
    busy = {rank: _at(steps, common)["busy_time_s"] for rank, steps in sorted(ranks.items())}
    if len(common) == 0 or not all(np.isfinite(row).all() for row in busy.values()):
        return None
    groups: dict[int, list[int]] = {}
    for rank in busy:
        groups.setdefault(stages.get(rank, 0), []).append(rank)
    stage_groups = [(stage, group) for stage, group in sorted(groups.items()) if len(group) > 1]
    busiest = [
        _busiest(stage, {rank: busy[rank] for rank in group}, hosts, len(stage_groups))
        for stage, group in stage_groups
    ]
    return max(busiest, key=lambda straggler: (straggler.named, straggler.excess), default=None)


def _busiest(
    stage: int, ranks: Mapping[int, FloatColumn], hosts: Mapping[int, str], num_groups: int
) -> Straggler:
    """Return the busiest of two or more ranks of one stage. `num_groups` stages are compared."""
    order, busy = list(ranks), np.stack(list(ranks.values()))
    medians = np.median(busy, axis=1)
    slowest = int(np.argmax(medians))
    excess = float(medians[slowest] / np.median(np.delete(medians, slowest)) - 1)
    blocks = np.stack([group_medians(row, max(1, busy.shape[1] // BLOCK_STEPS)) for row in busy])
    wins = int((np.argmax(blocks, axis=0) == slowest).sum())
    chance = num_groups * len(order) * binomial_tail(wins, blocks.shape[1], 1 / len(order))
    rank = order[slowest]
    return Straggler(
        rank=rank,
        host=hosts.get(rank, "unknown"),
        stage=stage,
        excess=excess,
        share_of_steps=float((np.argmax(busy, axis=0) == slowest).mean()),
        named=excess > MIN_EXCESS and chance < MAX_P_VALUE,
    )


def binomial_tail(wins: int, trials: int, chance: float) -> float:
    """Return P(at least `wins` of `trials`) for probability `chance` each, 0 < chance < 1."""

    def log_p(k: int) -> float:
        log_combinations = lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1)
        return log_combinations + k * log(chance) + (trials - k) * log(1 - chance)

    return sum(exp(log_p(k)) for k in range(wins, trials + 1))


def _common_steps(ranks: Mapping[int, Steps]) -> IntColumn:
    common: IntColumn | None = None
    for steps in ranks.values():
        common = steps.index if common is None else np.intersect1d(common, steps.index)
    return np.unique(common) if common is not None else np.array([], dtype=np.int64)


def _at(steps: Steps, index: IntColumn) -> Steps:
    """Return the rows with step numbers `index`; of duplicates the last one is used."""
    order = np.argsort(steps.index, kind="stable")
    last = np.searchsorted(steps.index[order], index, side="right") - 1
    return steps.select(order[last])


def _largest(values: npt.NDArray[np.float64]) -> FloatColumn:
    return np.where(np.isnan(values).all(axis=0), np.nan, np.fmax.reduce(values, axis=0))


def _weighted_mean(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> FloatColumn:
    """Return the weighted mean over ranks. A missing loss makes the mean of its step NaN."""
    total = weights.sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):  # An infinite loss stays infinite.
        weighted = (values * weights).sum(axis=0)
    return np.divide(weighted, total, out=np.full_like(total, np.nan), where=total > 0)


def _median(steps: Steps, name: str) -> float | None:
    column = steps[name][np.isfinite(steps[name])]
    return float(np.median(column)) if len(column) else None


def memory_by_part(
    ranks: Iterable[RankMemory],
    spec: RunSpec | None,
    facts: RunSettings,
    device_memory_bytes: float | None,
    context_bytes: float,
    step_time_s: float | None,
) -> MemoryByPart | None:
    """Return the memory of all ranks in order; None without ranks.

    `context_bytes` is the catalog's value, used in the static lower bound.
    """
    by_rank = tuple(sorted(ranks, key=lambda rank: rank.rank))
    if not by_rank:
        return None
    process_limit = spec.memory_limit_bytes if spec else None
    on_cpu = facts.device == "cpu"
    limit = process_limit or facts.device_memory_bytes or device_memory_bytes
    device = "the machine's memory / processes" if on_cpu else "one device's memory"
    source = "memory_limit_bytes of the recipe" if process_limit else device
    slowest = max((r.watched_step_s for r in by_rank if r.watched_step_s is not None), default=None)
    return MemoryByPart(
        largest_rank=max(by_rank, key=lambda rank: rank.size_bytes).rank,
        ranks=by_rank,
        limit_bytes=limit,
        limit=None if limit is None else source,
        limit_counts_context=not process_limit,
        bound_bytes=_bound(spec, context_bytes) if spec else {},
        watch_cost_s=slowest - step_time_s if slowest is not None and step_time_s else None,
    )


def _bound(spec: RunSpec, context_bytes: float) -> dict[str, float]:
    """Return the static lower bound, with the names of measured parts."""
    need: Memory = memory_per_device(spec.parallel, context_bytes)
    # Without sharding, the operations that use 16-bit copies create them, so they count as
    # activations.
    sharded = spec.layout.zero_stage >= 2 and spec.parallel.data_ranks > 1
    gathered_bytes = need.copies_bytes if sharded else 0.0
    activations_bytes = (
        need.activations_bytes + need.logits_bytes + need.copies_bytes - gathered_bytes
    )
    return {
        "weights": need.weights_bytes,
        "gradients": need.gradients_bytes,
        "optimizer": need.optimizer_bytes,
        "gathered": gathered_bytes,
        "activations": activations_bytes,
        "context": need.context_bytes,
    }
