"""Result of a scaling analysis, as printed by `paceline scale --json`, with its sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from paceline.core.hosts import compress
from paceline.core.node_groups import ScalingKind
from paceline.core.units import percent, pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.scaling.analysis.analysis import Analysis
from paceline.scaling.analysis.corroboration import Bisection, Group
from paceline.scaling.analysis.factors import Factor, SizeFactors
from paceline.scaling.analysis.node_speeds import NotSeparable
from paceline.scaling.analysis.slow_nodes import MIN_COMPARED_NODES, MIN_LOSS, WORST_Z, NodeVerdict


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

    hosts: tuple[str, ...]
    gain: float
    low: float
    high: float


class ScaleResult(Value):
    """Scaling of a cluster, and the losses caused by single nodes."""

    base: Base
    scaling: ScalingKind
    sizes: tuple[SizeResult, ...]
    flagged: tuple[str, ...]  # language: allow
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


MAX_NAMED_NODES = 6
COMMON_CHANGE = 0.005
"""Relative change of the median node from its history above which it is reported."""
WORTH_REPLACING = 0.005
"""Relative gain above which a replacement is recommended."""


def sentences(analysis: Analysis) -> tuple[str, ...]:
    """Return sentences on scaling, slow nodes, gains, detection limits and exclusions, in order."""
    return (
        *_scaling(analysis),
        *_compared_with_reference(analysis),
        *_common_change(analysis),
        *_node_sentences(analysis),
        *_gains(analysis),
        *_searches(analysis),
        *_noisy(analysis),
        *_detection_limit(analysis),
        *_untested_links(analysis),
        *_exclusions(analysis),
    )


def _scaling(analysis: Analysis) -> Iterator[str]:
    largest = analysis.largest
    if largest.nodes == analysis.base_nodes:
        alone = pluralize(largest.nodes, "node")
        yield f"Only groups of {alone} were measured; scaling needs larger groups too."
        return
    efficiency = f"{_with_interval(largest.efficiency)} of {_ideal(analysis)}"
    yield (
        f"{pluralize(largest.nodes, 'node')} reach {efficiency} "
        f"({analysis.context.scaling} scaling, base: {_base(analysis)})."
    )
    if largest.straggler and largest.communication:
        yield (
            f"Straggler efficiency is {_with_interval(largest.straggler)}, and communication "
            f"efficiency, with synchronisation, is {_with_interval(largest.communication)}."
        )
    elif isinstance(analysis.component, NotSeparable):
        loss = (
            0 if analysis.suspect_nodes or analysis.flagged_nodes else 1 - largest.efficiency.value
        )
        note = f" The loss of {percent(loss, 2)} is not attributed to any node." if loss > 0 else ""
        why = analysis.component.why
        yield f"Straggler and communication efficiency cannot be separated: {why}.{note}"


def _node_sentences(analysis: Analysis) -> Iterator[str]:
    verdicts = analysis.verdicts
    if not verdicts.nodes:
        return
    comparable = [node for node in verdicts.nodes if node.by != "nothing"]
    if not comparable:
        yield (
            f"Too few to judge: {pluralize(len(verdicts.nodes), 'node')} measured alone. It takes "
            f"{MIN_COMPARED_NODES}, or a reference, or the nodes' own history."
        )
        return
    rule = f"z below {WORST_Z:.0f} and more than {percent(MIN_LOSS, 0)} slower"
    if not analysis.flagged_nodes:
        slowest = max(comparable, key=lambda node: node.loss)
        which = (
            "."
            if verdicts.flagged_nodes or verdicts.suspect_nodes
            else f"; the slowest, {_node_words(slowest)}."
        )
        yield f"No node is flagged ({rule}){which}"
    for node in analysis.flagged_nodes[:MAX_NAMED_NODES]:
        yield f"{_node_words(node, 'is')}{_confirmation_words(analysis, node)}."
    if len(analysis.flagged_nodes) > MAX_NAMED_NODES:
        others = [node.host for node in analysis.flagged_nodes[MAX_NAMED_NODES:]]
        yield f"{pluralize(len(others), 'more node', 'are')} flagged: {_names(others)}."
    for item in (e for e in analysis.evidence if e.verdict == "refuted"):
        where = "next to known-good nodes it is" if item.by == "its pairs" else "its groups are"
        yield f"{_node_words(item.node, 'was')}, but {where} not slow: not flagged."
    for node in analysis.suspect_nodes[:MAX_NAMED_NODES]:
        yield f"{_node_words(node, 'was')}: suspected, {_suspicion_words(analysis, node)}."
    if len(analysis.suspect_nodes) > MAX_NAMED_NODES:
        others = [node.host for node in analysis.suspect_nodes[MAX_NAMED_NODES:]]
        more = pluralize(len(others), "more node", "were")
        yield f"{more} suspected and not confirmed: {_names(others)}."


def _common_change(analysis: Analysis) -> Iterator[str]:
    change = analysis.verdicts.common_change
    if abs(change - 1) > COMMON_CHANGE:
        way = "slower" if change < 1 else "faster"
        yield (
            f"The median node is {percent(abs(change - 1), 2)} {way} than its own history. This "
            "change of the whole cluster is removed before nodes are judged."
        )


GROUPS_FOR_LINKS = "Use --split topology, or --split contiguous with more --rounds."


def _untested_links(analysis: Analysis) -> Iterator[str]:
    """Yield a warning if the way in which the hosts were split leaves some links untested."""
    groups = {frozenset(g.hosts) for g in analysis.measured if g.purpose == "plan" and g.nodes > 1}
    hosts = frozenset[str]().union(*groups)
    smaller_groups = [group for group in groups if group != hosts]
    if not smaller_groups or len(hosts) < MIN_COMPARED_NODES:
        return
    if all(a.isdisjoint(b) or a <= b or b <= a for a in smaller_groups for b in smaller_groups):
        yield (
            "Not all links were tested: the groups are nested, so a slow link between hosts that "
            f"are always in the same group can be missed. {GROUPS_FOR_LINKS}"
        )
    elif analysis.context.split == "pairs" or all(len(group) == 2 for group in smaller_groups):
        yield (
            "Uplinks of switches were not tested: pairs of distant hosts all cross them, so no "
            f"group shows a slow one. {GROUPS_FOR_LINKS}"
        )


def _compared_with_reference(analysis: Analysis) -> Iterator[str]:
    reference = analysis.context.reference
    if reference is not None:
        healthy = reference.samples_per_s
        share = percent(analysis.base / healthy, 2)
        yield f"The median node reaches {share} of the reference, {healthy:.6g} samples/s."


def _gains(analysis: Analysis) -> Iterator[str]:
    if not analysis.gains or not analysis.largest.straggler:
        return
    first = analysis.gains[0]
    refuted_hosts = {
        confirmation.host
        for confirmation in analysis.confirmations
        if confirmation.confirmed is False
    }
    if first.hosts[0] in refuted_hosts:
        return
    tail = 1 - analysis.largest.straggler.value
    interval = f"({_signed_percent(first.low)} to {_signed_percent(first.high)})"
    if first.value < WORTH_REPLACING:
        yield (
            f"No single replacement helps: replacing {first.hosts[0]} alone gives "
            f"{_signed_percent(first.value)} {interval}; the slow tail as a whole costs about "
            f"{percent(tail)}."
        )
    else:
        yield f"Replacing {first.hosts[0]} gives {_signed_percent(first.value)} {interval}."
    num_flagged = len(analysis.flagged_nodes)
    others = [
        gain for gain in analysis.gains[1:] if num_flagged < 2 or len(gain.hosts) == num_flagged
    ]
    if others and (num_flagged > 1 or first.value < WORTH_REPLACING):
        largest = others[-1]
        yield (
            f"Replacing the {len(largest.hosts)} slowest nodes gives "
            f"{_signed_percent(largest.value)} "
            f"({_signed_percent(largest.low)} to {_signed_percent(largest.high)})."
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
            f"{_names(group.hosts)} as a group are {percent(group.loss)} slower than their nodes "
            "and their number explain"
        )
        yield f"{head}: {_place(search, failed)}."
    searched_hosts = {search.group.hosts for search in analysis.searches}
    others = [group for group in analysis.slow if group.hosts not in searched_hosts]
    if others:
        more = pluralize(len(others), "more group", "are")
        yield f"{more} slower than their nodes and their number explain."


def _place(search: Bisection, failed: Collection[Group]) -> str:
    if failed_groups := [group for group in search.ask if group in failed]:
        return f"the cause is unknown because {'; '.join(map(_names, failed_groups))} gave no value"
    if search.ask:
        groups = "; ".join(_names(group) for group in search.ask)
        return f"to be measured next: {groups}"
    if not search.sides:
        return (
            "measured again, they are as fast as expected: a disturbance, or a fault that comes "
            "and goes; more --rounds would tell"
        )
    if len(search.sides) == 2:
        first, second = map(_names, search.sides)
        return (
            f"each half alone is as fast as expected, so the loss is between {first} and {second}"
        )
    (side,) = search.sides
    if len(side) == 1:
        return f"{side[0]} causes the loss, although it is fast alone"
    return f"the loss is on the links from {_names(side)} to other nodes"


def _noisy(analysis: Analysis) -> Iterator[str]:
    speeds = analysis.speeds
    if speeds is None or speeds.common_variation is None:
        return
    for at in speeds.is_noisy.nonzero()[0][:MAX_NAMED_NODES]:
        yield (
            f"{speeds.hosts[at]} is noisy: its repeats vary by "
            f"{percent(float(speeds.own_variation[at]), 2)}, those of all nodes by "
            f"{percent(speeds.common_variation, 2)}."
        )


_NEEDS_SECOND_VALUE = ("suspected", " Flagging it takes a second value.")


def _detection_limit(analysis: Analysis) -> Iterator[str]:
    smallest = analysis.verdicts.smallest_fault
    if smallest is None and any(node.by != "nothing" for node in analysis.verdicts.nodes):
        yield (
            "The smallest detectable fault is unknown: there is one value per node, and no spread "
            "to compare it with."
        )
    if smallest is not None:
        verb, note = ("found", "") if analysis.has_independent_evidence else _NEEDS_SECOND_VALUE
        yield f"Smallest fault {verb} in 9 of 10 cases: a node {percent(smallest)} slower.{note}"


def _exclusions(analysis: Analysis) -> Iterator[str]:
    if analysis.failed:
        failed = sorted({h for m in analysis.measured if m.samples_per_s is None for h in m.hosts})
        share = f"{analysis.failed:,} of {pluralize(len(analysis.measured), 'sub-cluster')}"
        yield f"No value for {share}: {_names(failed)}."
    if analysis.excluded:
        series = sorted({group.series for group in analysis.excluded})
        n = len(analysis.excluded)
        yield (
            f"{n} value{' of' if n == 1 else 's of'} {', '.join(series)} excluded: measured "
            "separately, with a smaller hostfile."
        )


def _node_words(node: NodeVerdict, verb: str = "") -> str:
    words = f"{node.host} {verb}".strip() if verb else f"{node.host}, is"
    reference = {"the other nodes": "the median node"}.get(node.by, node.by)
    z = "by the margin alone" if node.z is None else f"z {node.z:.1f}"
    times = f"median of {node.repeats} values" if node.repeats > 1 else "one value"
    return f"{words} {percent(node.loss, 2)} below {reference} ({z}, {times})"


def _confirmation_words(analysis: Analysis, node: NodeVerdict) -> str:
    confirmation = next(
        (candidate for candidate in analysis.confirmations if candidate.host == node.host), None
    )
    if confirmation is None or confirmation.confirmed is None or confirmation.loss is None:
        return _evidence_words(analysis, node)
    return (
        f", and its pairs with known-good nodes are {percent(confirmation.loss)} slower: confirmed"
    )


def _evidence_words(analysis: Analysis, node: NodeVerdict) -> str:
    """Return the evidence other than the node's own value, for a node without pairs."""
    item = next((e for e in analysis.evidence if e.node.host == node.host), None)
    if item is None or item.by == "its repeats" or item.group_loss is None:
        return ", in more than one repeat"
    return f", and its groups are {percent(item.group_loss)} slower than others"


def _suspicion_words(analysis: Analysis, node: NodeVerdict) -> str:
    """Return the result for a suspected node that is not flagged."""
    confirmation = next(
        candidate for candidate in analysis.confirmations if candidate.host == node.host
    )
    if confirmation.loss is None:
        return "but no second measurement confirms it; repeat before draining"
    comparison = f"its pairs with known-good nodes are {percent(abs(confirmation.loss))}"
    comparison += " slower" if confirmation.loss > 0 else " faster"
    if confirmation.confirmed is None:
        return f"and {comparison} than others, but there are too few to confirm it"
    return f"but {comparison} than others, which does not confirm it: not flagged"


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


def _signed_percent(value: float) -> str:
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
        flagged=tuple(node.host for node in analysis.flagged_nodes),
        suspects=tuple(_suspects(analysis)),
        nodes=tuple(
            NodeResult(host=n.host, value=n.value, z=n.z, loss=n.loss, n=n.repeats)
            for n in analysis.verdicts.nodes
        ),
        smallest_fault_found=analysis.verdicts.smallest_fault,
        gains=tuple(
            GainResult(hosts=g.hosts, gain=g.value, low=g.low, high=g.high) for g in analysis.gains
        ),
        failed=analysis.failed,
        sentences=(*sentences(analysis), *notes),
    )


def _suspects(analysis: Analysis) -> Iterator[SuspectResult]:
    confirmations = {confirmation.host: confirmation for confirmation in analysis.confirmations}
    suspect_hosts = {
        node.host for node in (*analysis.verdicts.suspect_nodes, *analysis.suspect_nodes)
    }
    group_loss = {e.node.host: e.group_loss for e in analysis.evidence}
    for node in (node for node in analysis.verdicts.nodes if node.host in suspect_hosts):
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
        spread=size.variation,
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
