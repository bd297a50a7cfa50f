"""Result of a scaling analysis, as printed by `paceline scale --json`, with its sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from paceline.core.hosts import compress
from paceline.core.node_groups import ScalingKind
from paceline.core.units import percent, pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.scaling.analysis.analysis import Analysis
from paceline.scaling.analysis.bisection import Bisection, Group
from paceline.scaling.analysis.factors import Factor, SizeFactors
from paceline.scaling.analysis.reliability import NotSeparable
from paceline.scaling.analysis.slow_nodes import FEWEST_JUDGED, LEAST_LOSS, WORST_Z, NodeVerdict


class Base(Value):
    """Reference that counts as 100%."""

    nodes: PositiveInt
    value: float
    """Samples/s of the reference."""
    statistic: str


class NaiveFactors(Value):
    """Uncorrected factors: the slowest of many noisy nodes is measured as too slow."""

    straggler: float | None
    communication: float | None


class SizeResult(Value):
    """All sub-clusters of one size."""

    nodes: PositiveInt
    n: PositiveInt
    """Number of sub-clusters with a value."""
    value: float
    """Samples/s: the geometric mean of the sub-clusters."""
    spread: float | None
    """Relative standard deviation between the sub-clusters."""
    efficiency: float
    """value / (nodes x base per node)."""
    low: float | None
    """Lower end of the 95% interval of the efficiency."""
    high: float | None
    """Upper end of the 95% interval of the efficiency."""
    straggler: float | None
    """Straggler efficiency: the share left after waiting for the slowest node; None if unknown."""
    straggler_low: float | None
    straggler_high: float | None
    communication: float | None
    """Communication efficiency: the share left after communication and synchronisation."""
    communication_low: float | None
    communication_high: float | None
    naive: NaiveFactors


class NodeResult(Value):
    """One node measured alone."""

    host: str
    value: float
    """Samples/s, the median of its repeats."""
    z: float | None
    """Robust z-score; None with too few nodes for comparison."""
    loss: float
    """Fraction by which the node is below the median node, or below its own reference."""
    n: PositiveInt


class SuspectResult(Value):
    """A node that one measurement finds slow. Repeat the measurement before draining it."""

    host: str
    confirmed: bool | None
    """Result of the second pass; None if there was none, or too little of it."""
    pair_loss: float | None
    """Mean loss of its pairs with known-good nodes compared with pairs of known-good nodes."""
    group_loss: float | None = None
    """Median loss of its groups compared with groups of their size without a slow node."""


class GainResult(Value):
    """Gain of a group of all nodes from replacing the slowest nodes."""

    replaced: tuple[str, ...]
    gain: float
    low: float
    high: float


class ScaleResult(Value):
    """Scaling of a cluster, and the losses caused by single nodes."""

    base: Base
    scaling: ScalingKind
    sizes: tuple[SizeResult, ...]
    flagged: tuple[str, ...]
    """Hosts that two independent measurements find slow, the slowest first."""
    suspects: tuple[SuspectResult, ...] = ()
    """Suspect nodes, the slowest first."""
    nodes: tuple[NodeResult, ...]
    """Nodes measured alone, the slowest first."""
    smallest_fault_found: float | None
    """Loss of a node that would have been found in 9 of 10 cases; None if no node could be
    judged."""
    gains: tuple[GainResult, ...]
    failed: NonNegativeInt
    """Number of sub-clusters without a value."""
    sentences: tuple[str, ...]


MOST_NAMED = 6
COMMON_CHANGE = 0.005
"""Relative change of the median node from its history above which it is reported."""
WORTH_REPLACING = 0.005
"""Relative gain above which a replacement is recommended."""


def sentences(analysis: Analysis) -> tuple[str, ...]:
    """Return sentences on scaling, slow nodes, gains, detection limits and exclusions, in order."""
    return (
        *_scaling(analysis),
        *_against_reference(analysis),
        *_common_change(analysis),
        *_flagged(analysis),
        *_gains(analysis),
        *_searches(analysis),
        *_noisy(analysis),
        *_findable(analysis),
        *_not_tested(analysis),
        *_left_out(analysis),
    )


def _scaling(analysis: Analysis) -> Iterator[str]:
    largest = analysis.largest
    if largest.nodes == analysis.base_nodes:
        alone = pluralize(largest.nodes, "node")
        yield f"Only groups of {alone} were measured: scaling takes larger ones too."
        return
    efficiency = f"{_with_interval(largest.efficiency)} of {_ideal(analysis)}"
    yield (
        f"{pluralize(largest.nodes, 'node')} reach {efficiency} "
        f"({analysis.context.scaling} scaling, base: {_base(analysis)})."
    )
    if largest.straggler and largest.communication:
        yield (
            f"That is {_with_interval(largest.straggler)} for waiting for the slowest node x "
            f"{_with_interval(largest.communication)} for communication and synchronisation."
        )
    elif isinstance(analysis.lasting, NotSeparable):
        loss = 0 if analysis.suspected or analysis.flagged else 1 - largest.efficiency.value
        blamed = (
            f" No node is held to account for the loss of {percent(loss, 2)}." if loss > 0 else ""
        )
        yield f"Straggler and communication are not separable: {analysis.lasting.why}.{blamed}"


def _flagged(analysis: Analysis) -> Iterator[str]:
    blame = analysis.blame
    if not blame.nodes:
        return
    judged = [node for node in blame.nodes if node.by != "nothing"]
    if not judged:
        yield (
            f"Too few to judge: {pluralize(len(blame.nodes), 'node')} measured alone, "
            f"{FEWEST_JUDGED} are needed, or a reference, or the nodes' own history."
        )
        return
    rule = f"z below {WORST_Z:.0f} and more than {percent(LEAST_LOSS, 0)} slower"
    if not analysis.flagged:
        slowest = max(judged, key=lambda node: node.loss)
        which = "." if blame.flagged or blame.suspected else f"; the slowest, {_judged(slowest)}."
        yield f"No node is flagged ({rule}){which}"
    for node in analysis.flagged[:MOST_NAMED]:
        yield f"{_judged(node, 'is')}{_confirmed(analysis, node)}."
    if len(analysis.flagged) > MOST_NAMED:
        rest = [node.host for node in analysis.flagged[MOST_NAMED:]]
        yield f"{pluralize(len(rest), 'more node', 'are')} flagged: {_names(rest)}."
    for cleared in (e for e in analysis.evidence if e.standing == "refuted"):
        where = "beside proven nodes it is" if cleared.by == "its pairs" else "its groups are"
        yield f"{_judged(cleared.node, 'was')}, but {where} not slow: not flagged."
    for node in analysis.suspected[:MOST_NAMED]:
        yield f"{_judged(node, 'was')}: suspected, {_suspicion(analysis, node)}."
    if len(analysis.suspected) > MOST_NAMED:
        rest = [node.host for node in analysis.suspected[MOST_NAMED:]]
        more = pluralize(len(rest), "more node", "were")
        yield f"{more} suspected and not confirmed: {_names(rest)}."


def _common_change(analysis: Analysis) -> Iterator[str]:
    change = analysis.blame.common_change
    if abs(change - 1) > COMMON_CHANGE:
        way = "slower" if change < 1 else "faster"
        yield (
            f"The median node is {percent(abs(change - 1), 2)} {way} than its own history: that is "
            "the cluster's change, and each node is judged by what it has beyond it."
        )


def _not_tested(analysis: Analysis) -> Iterator[str]:
    """Yield a warning if the way in which the hosts were split leaves some links untested."""
    groups = {frozenset(g.hosts) for g in analysis.measured if g.purpose == "plan" and g.nodes > 1}
    hosts = frozenset[str]().union(*groups)
    parted = [group for group in groups if group != hosts]
    if not parted or len(hosts) < FEWEST_JUDGED:
        return
    if all(a.isdisjoint(b) or a <= b or b <= a for a in parted for b in parted):
        yield (
            "Not tested: the hosts were split in one way only, every group inside another, so a "
            "slow way between hosts that no border parts would hardly be seen; --split pairs or "
            "topology, or more --rounds, part them in other ways."
        )


def _against_reference(analysis: Analysis) -> Iterator[str]:
    reference = analysis.context.reference
    if reference is not None:
        healthy = reference.samples_per_s
        share = percent(analysis.base / healthy, 2)
        yield f"The median node reaches {share} of the reference, {healthy:.6g} samples/s."


def _gains(analysis: Analysis) -> Iterator[str]:
    if not analysis.gains or not analysis.largest.straggler:
        return
    first = analysis.gains[0]
    refuted = {
        confirmation.host for confirmation in analysis.confirmed if confirmation.confirmed is False
    }
    if first.hosts[0] in refuted:
        return
    tail = 1 - analysis.largest.straggler.value
    interval = f"({_signed(first.low)} to {_signed(first.high)})"
    if first.value < WORTH_REPLACING:
        yield (
            f"No single replacement helps: replacing {first.hosts[0]} alone gives "
            f"{_signed(first.value)} {interval}; the slow tail together costs about "
            f"{percent(tail)}."
        )
    else:
        yield f"Replacing {first.hosts[0]} gives {_signed(first.value)} {interval}."
    num_flagged = len(analysis.flagged)
    others = [
        gain for gain in analysis.gains[1:] if num_flagged < 2 or len(gain.hosts) == num_flagged
    ]
    if others and (num_flagged > 1 or first.value < WORTH_REPLACING):
        largest = others[-1]
        yield (
            f"Replacing the {len(largest.hosts)} slowest nodes gives {_signed(largest.value)} "
            f"({_signed(largest.low)} to {_signed(largest.high)})."
        )


def _searches(analysis: Analysis) -> Iterator[str]:
    failed = {
        group.hosts
        for group in analysis.measured
        if group.purpose == "bisection" and group.samples_per_s is None
    }
    for search in analysis.searches:
        group = search.group
        head = (
            f"{_names(group.hosts)} together are {percent(group.loss)} slower than their nodes "
            "and their number explain"
        )
        yield f"{head}: {_place(search, failed)}."
    named = {search.group.hosts for search in analysis.searches}
    rest = [group for group in analysis.slow if group.hosts not in named]
    if rest:
        more = pluralize(len(rest), "more group", "are")
        yield f"{more} slower than their nodes and their number explain."


def _place(search: Bisection, failed: Collection[Group]) -> str:
    if gone := [group for group in search.ask if group in failed]:
        return f"where is not known, as {'; '.join(map(_names, gone))} gave no value"
    if search.ask:
        groups = "; ".join(_names(group) for group in search.ask)
        return f"to be measured next: {groups}"
    if len(search.sides) == 2:
        first, second = map(_names, search.sides)
        return (
            "each half alone is as fast as it should be, so the loss lies between "
            f"{first} and {second}"
        )
    (side,) = search.sides
    if len(side) == 1:
        return f"the loss goes with {side[0]}, though it is fast alone"
    return f"the loss goes with {_names(side)}, on their way to other nodes"


def _noisy(analysis: Analysis) -> Iterator[str]:
    speeds = analysis.speeds
    if speeds is None or speeds.common_scatter is None:
        return
    for at in speeds.is_noisy.nonzero()[0][:MOST_NAMED]:
        yield (
            f"{speeds.hosts[at]} is noisy: its repeats scatter by "
            f"{percent(float(speeds.own_scatter[at]), 2)}, those of all nodes by "
            f"{percent(speeds.common_scatter, 2)}."
        )


def _findable(analysis: Analysis) -> Iterator[str]:
    smallest = analysis.blame.smallest_fault
    if smallest is None and any(node.by != "nothing" for node in analysis.blame.nodes):
        yield (
            "How small a fault would have been found is not known: one value a node, and no spread "
            "to hold it against."
        )
    if smallest is not None:
        seen = "found" if analysis.has_second_witness else "suspected"
        alone = "" if analysis.has_second_witness else " No second value of it could flag it."
        yield (
            f"Smallest fault that would have been {seen} here in 9 of 10 cases: a node "
            f"{percent(smallest)} slower.{alone}"
        )


def _left_out(analysis: Analysis) -> Iterator[str]:
    if analysis.failed:
        failed = sorted({h for m in analysis.measured if m.samples_per_s is None for h in m.hosts})
        share = f"{analysis.failed:,} of {pluralize(len(analysis.measured), 'sub-cluster')}"
        yield f"{share} without a value: {_names(failed)}."
    if analysis.apart:
        series = sorted({group.series for group in analysis.apart})
        n = len(analysis.apart)
        yield (
            f"{n} value{' of' if n == 1 else 's of'} {', '.join(series)} left out: measured apart "
            "from the others, with a smaller hostfile."
        )


def _judged(node: NodeVerdict, verb: str = "") -> str:
    words = f"{node.host} {verb}".strip() if verb else f"{node.host}, is"
    against = {"the other nodes": "the median node"}.get(node.by, node.by)
    z = "by the margin alone" if node.z is None else f"z {node.z:.1f}"
    times = f"median of {node.repeats} values" if node.repeats > 1 else "one value"
    return f"{words} {percent(node.loss, 2)} below {against} ({z}, {times})"


def _confirmed(analysis: Analysis, node: NodeVerdict) -> str:
    confirmation = next(
        (candidate for candidate in analysis.confirmed if candidate.host == node.host), None
    )
    if confirmation is None or confirmation.confirmed is None or confirmation.loss is None:
        return _second_witness(analysis, node)
    return f", and its pairs with proven nodes are {percent(confirmation.loss)} slower: confirmed"


def _second_witness(analysis: Analysis, node: NodeVerdict) -> str:
    """Return the evidence other than the node's own value, for a node without pairs."""
    witness = next((e for e in analysis.evidence if e.node.host == node.host), None)
    if witness is None or witness.by == "its repeats" or witness.group_loss is None:
        return ", in more than one of them"
    return f", and its groups are {percent(witness.group_loss)} slower than others"


def _suspicion(analysis: Analysis, node: NodeVerdict) -> str:
    """Return the result for a suspected node that is not flagged."""
    confirmation = next(
        candidate for candidate in analysis.confirmed if candidate.host == node.host
    )
    if confirmation.loss is None:
        return "and no second measurement bears it out; repeat before draining"
    beside = f"its pairs with proven nodes are {percent(abs(confirmation.loss))}"
    beside += " slower" if confirmation.loss > 0 else " faster"
    if confirmation.confirmed is None:
        return f"and {beside} than others, but these are too few to confirm it"
    return f"but {beside} than others, which does not confirm it: not flagged"


def _base(analysis: Analysis) -> str:
    if analysis.speeds is None:
        return f"median group of {pluralize(analysis.base_nodes, 'node')}"
    return (
        f"median of {pluralize(len(analysis.speeds.hosts), 'node')}, {analysis.base:.6g} samples/s"
    )


def _ideal(analysis: Analysis) -> str:
    times = analysis.largest.nodes / analysis.base_nodes
    unit = "node" if analysis.base_nodes == 1 else f"group of {analysis.base_nodes}"
    return f"{times:g} times the median {unit}"


def _with_interval(factor: Factor) -> str:
    if factor.low is None or factor.high is None:
        return percent(factor.value, 2)
    return f"{percent(factor.value, 2)} ({100 * factor.low:.2f} to {100 * factor.high:.2f})"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}%"


def _names(hosts: Sequence[str]) -> str:
    text = compress(list(hosts))
    return text if len(text) <= 200 else f"{hosts[0]} and {len(hosts) - 1} more"


def scale_result(analysis: Analysis, notes: Sequence[str] = ()) -> ScaleResult:
    """Return the frozen result; `notes` are further sentences, such as on left-over hosts."""
    alone = analysis.base_nodes == 1
    n = analysis.sizes[0].n if analysis.speeds is None else len(analysis.speeds.hosts)
    return ScaleResult(
        base=Base(
            nodes=analysis.base_nodes,
            value=analysis.base * analysis.base_nodes,
            statistic=f"median of {pluralize(n, 'node' if alone else 'group')}",
        ),
        scaling=analysis.context.scaling,
        sizes=tuple(_size(size) for size in analysis.sizes),
        flagged=tuple(node.host for node in analysis.flagged),
        suspects=tuple(_suspects(analysis)),
        nodes=tuple(
            NodeResult(host=n.host, value=n.value, z=n.z, loss=n.loss, n=n.repeats)
            for n in analysis.blame.nodes
        ),
        smallest_fault_found=analysis.blame.smallest_fault,
        gains=tuple(
            GainResult(replaced=g.hosts, gain=g.value, low=g.low, high=g.high)
            for g in analysis.gains
        ),
        failed=analysis.failed,
        sentences=(*sentences(analysis), *notes),
    )


def _suspects(analysis: Analysis) -> Iterator[SuspectResult]:
    confirmations = {confirmation.host: confirmation for confirmation in analysis.confirmed}
    listed = {node.host for node in (*analysis.blame.suspected, *analysis.suspected)}
    group_loss = {e.node.host: e.group_loss for e in analysis.evidence}
    for node in (node for node in analysis.blame.nodes if node.host in listed):
        confirmation = confirmations[node.host]
        yield SuspectResult(
            host=node.host,
            confirmed=confirmation.confirmed,
            pair_loss=confirmation.loss,
            group_loss=group_loss.get(node.host),
        )


def _size(size: SizeFactors) -> SizeResult:
    straggler, communication = size.straggler, size.communication
    return SizeResult(
        nodes=size.nodes,
        n=size.n,
        value=size.samples_per_s,
        spread=size.scatter,
        efficiency=size.efficiency.value,
        low=size.efficiency.low,
        high=size.efficiency.high,
        straggler=straggler and straggler.value,
        straggler_low=straggler and straggler.low,
        straggler_high=straggler and straggler.high,
        communication=communication and communication.value,
        communication_low=communication and communication.low,
        communication_high=communication and communication.high,
        naive=NaiveFactors(straggler=size.naive_straggler, communication=size.naive_communication),
    )
