"""Comparison of the measured traffic with the traffic that the layout requires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pydantic import NonNegativeFloat

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.traffic import Collective, step_traffic, unsupported_reason
from paceline.core.value import Value
from paceline.profiles.nccl.communication import Communication

MAX_DEVIATION = 0.02
"""Largest relative difference from the predicted bytes without a warning."""


class TrafficComparison(Value):
    """Traffic of one axis and collective in bytes per rank and step, as mean over ranks."""

    axis: str
    collective: Collective
    counted_bytes: NonNegativeFloat
    predicted_bytes: NonNegativeFloat
    purposes: tuple[str, ...] = ()
    """Purposes of the predicted bytes, ordered by size."""

    @property
    def ratio(self) -> float | None:
        """Counted divided by predicted bytes; None if nothing is predicted."""
        return self.counted_bytes / self.predicted_bytes if self.predicted_bytes else None


def axis_groups(layout: Layout, dp: int) -> dict[tuple[int, ...], str]:
    """Return the axis of each group of world ranks in a layout.

    Tensor-parallel ranks are neighbours, then context-parallel ranks, as in the native trainer and
    in Megatron. Ranks that share states are `dp` (dp x cp of them), with hybrid sharding `dp_shard`
    and `dp_replicate`. With expert parallelism, consecutive ones are `ep`, and `expert_data` hold
    the same experts.
    """
    tp, cp, pp, shards = layout.tp, layout.cp, layout.pp, layout.shards(dp)
    groups: dict[tuple[int, ...], str] = {}
    replica = dp * cp * tp
    for stage in range(pp):
        first = stage * replica
        for inner in range(tp):
            states = tuple(first + inner + tp * i for i in range(dp * cp))
            if shards == dp * cp:
                _name(groups, states, "dp")
            else:
                for i in range(0, dp * cp, shards):
                    _name(groups, states[i : i + shards], "dp_shard")
                for i in range(shards):
                    _name(groups, states[i::shards], "dp_replicate")
            if layout.ep > 1:
                for i in range(0, dp * cp, layout.ep):
                    _name(groups, states[i : i + layout.ep], "ep")
                for i in range(layout.ep):
                    _name(groups, states[i :: layout.ep], "expert_data")
            for i in range(dp):
                _name(groups, states[i * cp : (i + 1) * cp], "cp")
        for outer in range(dp * cp):
            _name(groups, tuple(range(first + outer * tp, first + (outer + 1) * tp)), "tp")
    for place in range(replica):
        _name(groups, tuple(place + stage * replica for stage in range(pp)), "pp")
    return groups


def compare_traffic(
    table: Communication, spec: RunSpec, ranks: Collection[int] = ()
) -> tuple[tuple[TrafficComparison, ...], str | None]:
    """Return (comparison by axis, reason for no comparison).

    `ranks` are the ranks with counters; empty means all. Bytes are per step, so the table must have
    its number of steps.
    """
    reason = unsupported_reason(spec.parallel)
    if reason is None and table.steps is None:
        reason = "the number of steps in the figures is unknown"
    if reason is None and not any(row.axis for row in table.rows):
        reason = "no communicator could be matched with an axis of the layout"
    if reason is not None or table.steps is None:
        return (), reason
    counted_bytes: defaultdict[tuple[str, Collective], float] = defaultdict(float)
    for row in table.rows:
        if row.axis is not None:
            # A row's mean is over its own members; some pipeline ranks may have none.
            share = row.members / table.ranks
            counted_bytes[row.axis, row.collective] += row.num_bytes * share / table.steps
    predicted_bytes, purposes = _predicted(spec, ranks, [axis for axis, _ in counted_bytes])
    keys = sorted({*counted_bytes, *predicted_bytes})
    return tuple(
        TrafficComparison(
            axis=axis,
            collective=collective,
            counted_bytes=counted_bytes.get((axis, collective), 0.0),
            predicted_bytes=predicted_bytes.get((axis, collective), 0.0),
            purposes=tuple(purposes.get((axis, collective), ())),
        )
        for axis, collective in keys
    ), None


def traffic_warnings(rows: Sequence[TrafficComparison]) -> Iterator[str]:
    """Yield a sentence for each axis and collective with more or fewer bytes than required."""
    for row in rows:
        ratio = row.ratio
        if ratio is None:
            yield (
                f"{row.axis} {row.collective} moves {row.counted_bytes:,.0f} bytes per step, but "
                "the layout requires none"
            )
        elif abs(ratio - 1) > MAX_DEVIATION:
            yield (
                f"{row.axis} {row.collective} moves {row.counted_bytes:,.0f} bytes per step, "
                f"{ratio:.2f} times what the layout requires"
            )


def _name(groups: dict[tuple[int, ...], str], ranks: tuple[int, ...], axis: str) -> None:
    if len(ranks) > 1:
        groups[ranks] = f"{axis}+{groups[ranks]}" if ranks in groups else axis


def _predicted(
    spec: RunSpec, ranks: Collection[int], measured: Sequence[str]
) -> tuple[dict[tuple[str, Collective], float], dict[tuple[str, Collective], dict[str, None]]]:
    """Return bytes per step by axis, with the names of the measured axes, and their purposes."""
    per_stage = spec.world_size // spec.layout.pp
    stages = [rank // per_stage for rank in ranks] or list(range(spec.layout.pp))
    total: defaultdict[tuple[str, Collective], float] = defaultdict(float)
    purposes: defaultdict[tuple[str, Collective], dict[str, None]] = defaultdict(dict)
    for stage in stages:
        terms = step_traffic(replace(spec.parallel, pipeline_rank=stage))
        for term in sorted(terms, key=lambda term: -term.num_bytes):
            axis = next((name for name in measured if term.axis in name.split("+")), term.axis)
            total[axis, term.collective] += term.num_bytes / len(stages)
            purposes[axis, term.collective].setdefault(term.purpose)
    return dict(total), dict(purposes)
