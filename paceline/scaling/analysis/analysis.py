"""Analysis of all measured groups: efficiency factors, slow nodes, and next measurements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.errors import UserError
from paceline.core.node_groups import (
    GroupThroughput,
    Purpose,
    ScalingKind,
    Split,
    by_size,
    main_series,
)
from paceline.scaling.analysis.corroboration import (
    MIN_TYPICAL_GROUPS,
    Bisection,
    Confirmation,
    Group,
    NodeEvidence,
    SlowGroup,
    bisect,
    confirmations,
    evidence,
    known_good_hosts,
    refuted_hosts,
    second_pass,
    slow_groups,
    with_switch,
)
from paceline.scaling.analysis.factors import SizeFactors, corrected_logs, size_factors
from paceline.scaling.analysis.node_speeds import (
    NodeSpeeds,
    NotSeparable,
    PersistentComponent,
    node_speeds,
    persistent_component,
)
from paceline.scaling.analysis.slow_nodes import (
    HealthySpeed,
    NodeVerdict,
    ReplacementGain,
    SlowNodeReport,
    gains,
    judge_nodes,
)

MAX_SEARCHES = 4
"""Maximum number of slow groups that are bisected at a time, the smallest first."""


@dataclass(frozen=True)
class AnalysisContext:
    """Inputs of the analysis in addition to the measured values."""

    scaling: ScalingKind = "weak"
    resolution: float = 0.0
    """Rounding step of the printed values, in samples/s."""
    reference: HealthySpeed | None = None
    history: Mapping[str, Sequence[float]] | None = None
    """Earlier values of each node, in samples/s."""
    split: Split | None = None
    """Method that split the hosts into groups; None if it is unknown."""


@dataclass(frozen=True)
class Analysis:
    """Measured groups and the results of their analysis."""

    context: AnalysisContext
    measured: tuple[GroupThroughput, ...]
    excluded: tuple[GroupThroughput, ...]
    """Excluded groups, measured with another, smaller hostfile."""
    base_nodes: int
    base: float
    """Throughput of one node that counts as ideal, in samples/s."""
    speeds: NodeSpeeds | None
    component: PersistentComponent | NotSeparable
    sizes: tuple[SizeFactors, ...]
    verdicts: SlowNodeReport
    gains: tuple[ReplacementGain, ...]
    confirmations: tuple[Confirmation, ...]
    evidence: tuple[NodeEvidence, ...]
    """Evidence for every node that is slow by its own values."""
    slow: tuple[SlowGroup, ...]
    """Groups that are slower than their slowest member and their size explain."""
    searches: tuple[Bisection, ...]

    @property
    def flagged_nodes(self) -> tuple[NodeVerdict, ...]:
        """Nodes that two independent measurements find slow, the slowest first."""
        return _flagged_nodes(self.verdicts, self.confirmations, self.evidence)

    @property
    def suspect_nodes(self) -> tuple[NodeVerdict, ...]:
        """Slow nodes that independent evidence could confirm, but that have none; slowest first."""
        alone = {e.node.host for e in self.evidence if e.verdict == "alone"}
        return tuple(
            node
            for node in self.verdicts.nodes
            if node.host in alone or (node.suspected and node not in self.flagged_nodes)
        )

    @property
    def has_independent_evidence(self) -> bool:
        """True if repeats, pairs or groups could have confirmed a slow node's value."""
        by_repeats = self.speeds is not None and bool((self.speeds.repeats > 1).any())
        return by_repeats or any(
            size > 1 and len(groups) > MIN_TYPICAL_GROUPS
            for size, groups in by_size(self.measured).items()
        )

    @property
    def failed(self) -> int:
        """Number of groups without a value."""
        return sum(group.samples_per_s is None for group in self.measured)

    @property
    def largest(self) -> SizeFactors:
        """Factors of the largest size."""
        return self.sizes[-1]


def analyse(
    measured: Sequence[GroupThroughput], context: AnalysisContext | None = None
) -> Analysis:
    """Analyse all groups.

    Raises UserError when none of them has a value.
    """
    context = context or AnalysisContext()
    if not any(group.samples_per_s is not None for group in measured):
        raise UserError("results", "no sub-cluster has a value", allowed="samples/s above 0")
    groups, excluded = main_series(measured)
    sizes = by_size(groups)
    if not sizes:
        raise UserError("results", "the hostfile with the most hosts has no values")
    speeds = node_speeds([group for group in groups if group.purpose == "plan"])
    base_nodes, base = _base(sizes, speeds)
    verdicts = (
        SlowNodeReport((), None)
        if speeds is None
        else judge_nodes(speeds, context.resolution, context.reference, context.history)
    )
    pair_results = confirmations(verdicts, groups)
    node_evidence = evidence(verdicts, pair_results, groups)
    if speeds is not None:
        speeds = replace(speeds, refuted_hosts=refuted_hosts(node_evidence))
    component = (
        NotSeparable("no node was measured alone")
        if speeds is None
        else persistent_component(speeds, sizes)
    )
    flagged_hosts = {node.host for node in _flagged_nodes(verdicts, pair_results, node_evidence)}
    explained_hosts = flagged_hosts | (speeds.noisy_hosts if speeds is not None else set[str]())
    slow = _unexplained_slow_groups(groups, base, speeds, component, explained_hosts)
    return Analysis(
        context=context,
        measured=tuple(groups),
        excluded=tuple(excluded),
        base_nodes=base_nodes,
        base=base,
        speeds=speeds,
        component=component,
        sizes=tuple(size_factors(sizes, base_nodes, base, speeds, component)),
        verdicts=verdicts,
        gains=(
            tuple(gains(speeds, component, len(flagged_hosts)))
            if speeds is not None and isinstance(component, PersistentComponent)
            else ()
        ),
        confirmations=tuple(pair_results),
        evidence=tuple(node_evidence),
        slow=tuple(slow),
        searches=tuple(_searches(slow, groups, verdicts)),
    )


def next_groups(
    analysis: Analysis, planned_groups: Collection[Group] = ()
) -> tuple[Purpose, list[list[Group]]] | None:
    """Return the next measurements, in rounds of groups that can run at once; None at the end.

    The second pass of flagged and suspected nodes comes first, then the bisection of slow groups. A
    call with the new values continues from there. Groups that failed or are in `planned` are not
    requested again.
    """
    measured_groups = {
        *planned_groups,
        *(group.hosts for group in analysis.measured if group.purpose != "plan"),
    }
    known_good = {*known_good_hosts(analysis.verdicts)}
    rounds = [
        list(pairs)
        for pairs in second_pass(analysis.verdicts)
        if not all(pair in measured_groups for pair in pairs if not known_good >= {*pair})
    ]
    if rounds:
        return "second pass", rounds
    groups = [group for search in analysis.searches for group in search.ask]
    rounds = _disjoint(dict.fromkeys(group for group in groups if group not in measured_groups))
    return ("bisection", rounds) if rounds else None


def _flagged_nodes(
    verdicts: SlowNodeReport,
    pair_results: Sequence[Confirmation],
    node_evidence: Sequence[NodeEvidence],
) -> tuple[NodeVerdict, ...]:
    """Return the slow nodes that independent evidence confirms, the slowest first."""
    confirmed_hosts = {e.node.host for e in node_evidence if e.verdict == "confirmed"}
    confirmed_by_pairs = {
        confirmation.host for confirmation in pair_results if confirmation.confirmed
    }
    return tuple(
        node
        for node in verdicts.nodes
        if node.host in confirmed_hosts or (node.suspected and node.host in confirmed_by_pairs)
    )


def _base(
    sizes: Mapping[int, Sequence[GroupThroughput]], speeds: NodeSpeeds | None
) -> tuple[int, float]:
    """Return the nodes of the smallest size, and its median samples/s per node."""
    if speeds is not None:
        return 1, speeds.base
    nodes, groups = next(iter(sizes.items()))
    return nodes, float(np.median([group.samples_per_s or 0.0 for group in groups])) / nodes


def _unexplained_slow_groups(
    measured: Sequence[GroupThroughput],
    base: float,
    speeds: NodeSpeeds | None,
    component: PersistentComponent | NotSeparable,
    explained_hosts: set[str],
) -> list[SlowGroup]:
    """Return the slow groups without a flagged or noisy member, the smallest first."""
    if speeds is None:
        return []
    minimum = (
        corrected_logs(speeds, component) if isinstance(component, PersistentComponent) else {}
    )
    slow = slow_groups(measured, base, minimum)
    remaining = [group for group in slow if not explained_hosts & set(group.hosts)]
    return sorted(remaining, key=lambda group: (len(group.hosts), -group.loss))


def _searches(
    slow: Sequence[SlowGroup], measured: Sequence[GroupThroughput], verdicts: SlowNodeReport
) -> list[Bisection]:
    """Return the search in each slow planned group of the smallest slow size."""
    with_value = [group for group in measured if group.samples_per_s is not None]
    by_hosts = {frozenset(group.hosts) for group in with_value}
    in_plan = {frozenset(group.hosts) for group in with_value if group.purpose == "plan"}
    slow_planned = [group for group in slow if frozenset(group.hosts) in in_plan]
    slow_sets = {frozenset(group.hosts) for group in slow}
    smallest = [group for group in slow_planned if len(group.hosts) == len(slow_planned[0].hosts)]
    in_slow = {host for group in smallest for host in group.hosts}

    def is_slow(group: Group) -> bool | None:
        hosts = frozenset(group)
        return True if hosts in slow_sets else False if hosts in by_hosts else None

    known_good = [host for host in known_good_hosts(verdicts) if host not in in_slow]
    # If most groups of a size are slow, the others look fast; a fast one contains no slow group.
    fast_groups = [
        set(hosts)
        for hosts in by_hosts
        if len(hosts) > 1 and not any(slow_hosts <= hosts for slow_hosts in slow_sets)
    ]
    searches = [bisect(group, is_slow, known_good) for group in smallest[:MAX_SEARCHES]]
    return [with_switch(search, fast_groups) for search in searches]


def _disjoint(groups: Mapping[Group, None]) -> list[list[Group]]:
    """Return the groups in rounds, each in the first with room: no host is in a round twice."""
    rounds: list[tuple[set[str], list[Group]]] = []
    for group in groups:
        slot = next((slot for slot in rounds if not slot[0] & set(group)), None)
        if slot is None:
            slot = (set[str](), list[Group]())
            rounds.append(slot)
        slot[0].update(group)
        slot[1].append(group)
    return [members for _, members in rounds]
