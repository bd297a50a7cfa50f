"""What was exchanged, held against what the layout asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pydantic import NonNegativeFloat

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.traffic import Collective, step_traffic, unpredicted
from paceline.core.value import Value
from paceline.profiles.nccl.communication import Communication

CLOSE = 0.02
"""Of the predicted bytes; a larger difference is told."""


class TrafficContrast(Value):
    """One axis and collective, in bytes of a rank and step; the mean over the counted ranks."""

    axis: str
    collective: Collective
    counted_bytes: NonNegativeFloat
    predicted_bytes: NonNegativeFloat
    purposes: tuple[str, ...] = ()
    """What the predicted bytes are for, the most first."""

    @property
    def ratio(self) -> float | None:
        """Counted over predicted; None where nothing is predicted."""
        return self.counted_bytes / self.predicted_bytes if self.predicted_bytes else None


def axis_groups(layout: Layout, dp: int) -> dict[tuple[int, ...], str]:
    """The layout's groups of world ranks with their axis.

    Tensor ranks are neighbours, then context ranks, as in the native trainer and in Megatron. Ranks
    that share states are `dp`: dp x cp of them, in hybrid sharding `dp_shard` and `dp_replicate`.
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
            for i in range(dp):
                _name(groups, states[i * cp : (i + 1) * cp], "cp")
        for outer in range(dp * cp):
            _name(groups, tuple(range(first + outer * tp, first + (outer + 1) * tp)), "tp")
    for place in range(replica):
        _name(groups, tuple(place + stage * replica for stage in range(pp)), "pp")
    return groups


def contrast(
    table: Communication, spec: RunSpec, ranks: Collection[int] = ()
) -> tuple[tuple[TrafficContrast, ...], str | None]:
    """(axis by axis, why there is no comparison); `ranks` are those that counted, else all.

    Bytes are those of a step, so it takes the number of steps that the table is the sum of.
    """
    reason = unpredicted(spec.parallel)
    if reason is None and table.steps is None:
        reason = "nothing says how many steps the figures are the sum of"
    if reason is None and not any(row.axis for row in table.rows):
        reason = "no communicator could be matched with an axis of the layout"
    if reason is not None or table.steps is None:
        return (), reason
    counted: defaultdict[tuple[str, Collective], float] = defaultdict(float)
    for row in table.rows:
        if row.axis is not None:
            # A row's mean is over its own members; of a pipeline's ranks some may have none.
            share = row.members / table.ranks
            counted[row.axis, row.collective] += row.num_bytes * share / table.steps
    predicted, purposes = _predicted(spec, ranks, [axis for axis, _ in counted])
    keys = sorted({*counted, *predicted})
    return tuple(
        TrafficContrast(
            axis=axis,
            collective=collective,
            counted_bytes=counted.get((axis, collective), 0.0),
            predicted_bytes=predicted.get((axis, collective), 0.0),
            purposes=tuple(purposes.get((axis, collective), ())),
        )
        for axis, collective in keys
    ), None


def differences(rows: Sequence[TrafficContrast]) -> Iterator[str]:
    """One sentence for each axis and collective that moves more or less than it should."""
    for row in rows:
        ratio = row.ratio
        if ratio is None:
            yield (
                f"{row.axis} {row.collective} moves {row.counted_bytes:,.0f} bytes a step, and the "
                "layout asks for none"
            )
        elif abs(ratio - 1) > CLOSE:
            yield (
                f"{row.axis} {row.collective} moves {row.counted_bytes:,.0f} bytes a step, "
                f"{ratio:.2f} x what the layout asks for"
            )


def _name(groups: dict[tuple[int, ...], str], ranks: tuple[int, ...], axis: str) -> None:
    if len(ranks) > 1:
        groups[ranks] = f"{axis}+{groups[ranks]}" if ranks in groups else axis


def _predicted(
    spec: RunSpec, ranks: Collection[int], measured: Sequence[str]
) -> tuple[dict[tuple[str, Collective], float], dict[tuple[str, Collective], dict[str, None]]]:
    """Bytes of a step by axis, as the measured axes are called, and their purposes."""
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
