"""The analysis as the value that is printed and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.core.units import counted
from paceline.scaling.analysis.analysis import Analysis
from paceline.scaling.analysis.factors import SizeFactors
from paceline.scaling.analysis.result import (
    Base,
    GainResult,
    NaiveFactors,
    NodeResult,
    ScaleResult,
    SizeResult,
    SuspectResult,
)
from paceline.scaling.analysis.sentences import sentences


def scale_result(analysis: Analysis, notes: Sequence[str] = ()) -> ScaleResult:
    """The frozen result; `notes` are further sentences, such as on left-over hosts."""
    alone = analysis.base_nodes == 1
    n = analysis.sizes[0].n if analysis.speeds is None else len(analysis.speeds.hosts)
    return ScaleResult(
        base=Base(
            nodes=analysis.base_nodes,
            value=analysis.base * analysis.base_nodes,
            statistic=f"median of {counted(n, 'node' if alone else 'group')}",
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
