"""A scaling analysis as table rows and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.node_groups import GroupThroughput
from paceline.core.text import printable
from paceline.core.units import counted, percent
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE
from paceline.scaling.analysis.result import ScaleResult, SizeResult
from paceline.scaling.charts import scaling_charts

MOST_NODE_ROWS = 64
MOST_LEADING = 2
"""Slow nodes that the head of the page describes."""
SIZE_HEADS = (
    "nodes",
    "sub-clusters",
    "samples/s",
    "spread",
    "efficiency",
    "95 % interval",
    "straggler",
    "communication",
    "naive straggler",
    "naive communication",
)
NODE_HEADS = ("host", "samples/s", "values", "z", "below its measure", "flagged")


def size_rows(result: ScaleResult) -> Iterator[dict[str, Any]]:
    """One flat row a size, fractions and samples/s unrounded."""
    for size in result.sizes:
        row = size.model_dump(exclude={"naive"})
        yield {**row, **{f"naive_{name}": v for name, v in size.naive.model_dump().items()}}


def table_note(result: ScaleResult) -> str:
    """What stands below the table: kind of scaling and base."""
    base = result.base
    return f"{result.scaling} scaling, base: {base.statistic}, {base.value:.6g} samples/s"


def scaling_html(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    name: str,
    reference: float | None = None,
) -> str:
    """The page of one analysis; it opens without a network."""
    return render_page(
        "scaling.html.j2",
        _head(result, measured, name, reference),
        scaling_charts(result, measured, ON_PAGE, reference, name),
        more_sentences=[each for each in result.sentences if each not in leading(result)],
        size_heads=SIZE_HEADS,
        size_rows=[_size_cells(size) for size in result.sizes],
        node_heads=NODE_HEADS,
        node_rows=[_node_cells(result, at) for at in range(min(MOST_NODE_ROWS, len(result.nodes)))],
        nodes_left_out=max(0, len(result.nodes) - MOST_NODE_ROWS),
    )


def _head(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    name: str,
    reference: float | None,
) -> PageHead:
    flagged = len(result.flagged)
    suspects = sum(suspect.confirmed is None for suspect in result.suspects)
    n, word = (suspects, "suspected") if suspects and not flagged else (flagged, "flagged")
    chip = f"{n or 'no'} node{'s' if n > 1 else ''} {word}"
    judged = result.smallest_fault_found is not None or bool(result.flagged or reference)
    return PageHead(
        eyebrow="scaling and slow nodes",
        name=printable(name),
        title=f"Scaling of {printable(name)}",
        chip=chip if judged else "too few to judge",
        tone="alert" if flagged else "good" if judged and not suspects else "plain",
        setup=(table_note(result), f"{counted(len(measured), 'sub-cluster')} measured"),
        sentences=leading(result),
        cards=scaling_cards(result),
    )


def leading(result: ScaleResult) -> tuple[str, ...]:
    """The sentences that answer: how it scales, and which nodes are slow."""
    named = [s for s in result.sentences[1:] if s.split(",")[0].split(" ")[0] in result.flagged]
    return (*result.sentences[:1], *named[:MOST_LEADING])


def scaling_cards(result: ScaleResult) -> tuple[Card, ...]:
    """Efficiency of the largest size, its two factors, and the slowest node."""
    largest = result.sizes[-1]
    return (
        _efficiency_card(result, largest),
        _factor_card("Waiting leaves", largest, "straggler"),
        _factor_card("Communication leaves", largest, "communication"),
        _node_card(result),
    )


def _efficiency_card(result: ScaleResult, largest: SizeResult) -> Card:
    speed = f"{largest.value:.6g} samples/s, {counted(largest.n, 'sub-cluster')}"
    label = f"Efficiency on {counted(largest.nodes, 'node')}"
    if largest.nodes == result.base.nodes:
        return unknown_card(label, "only one size was measured, it is its own base", [speed])
    return card(
        label,
        percent(largest.efficiency, 2),
        interval(largest.low, largest.high),
        [speed, f"100 %: {largest.nodes / result.base.nodes:g} x the {result.base.statistic}"],
    )


def _factor_card(label: str, largest: SizeResult, factor: str) -> Card:
    value = getattr(largest, factor)
    if value is None:
        naive = getattr(largest.naive, factor)
        told = None if naive is None else f"{percent(naive, 2)} straight from the measured values"
        return unknown_card(label, "cannot be told from these values", [told])
    low, high = getattr(largest, f"{factor}_low"), getattr(largest, f"{factor}_high")
    cause = {"straggler": "for the slowest node"}.get(factor, "and synchronisation")
    lines = [f"{cause}, a factor of the efficiency"]
    return card(label, percent(value, 2), interval(low, high), lines)


def _node_card(result: ScaleResult) -> Card:
    if not result.nodes:
        return unknown_card("Slowest node", "no node was measured alone")
    slowest, smallest = result.nodes[0], result.smallest_fault_found
    least = "how small a fault would have been found is not known"
    if smallest is not None:
        least = f"from {percent(smallest)} slower on one would have been found in 9 of 10 cases"
    z = "z not known" if slowest.z is None else f"z {slowest.z:.1f}"
    return card(
        "Slowest node",
        share(slowest.loss),
        f"below its measure, {z}, {counted(slowest.n, 'value')}",
        [slowest.host + (", flagged" if slowest.host in result.flagged else ""), least],
    )


def interval(low: float | None, high: float | None) -> str:
    """Both ends of a 95 % interval of a share, or that there is none."""
    if low is None or high is None:
        return "no interval: too few values"
    return f"{100 * low:.2f} to {percent(high, 2)} (95 %)"


def _size_cells(size: SizeResult) -> list[str]:
    interval = "-"
    if size.low is not None and size.high is not None:
        interval = f"{100 * size.low:.2f} to {percent(size.high, 2)}"
    shares = (size.straggler, size.communication, size.naive.straggler, size.naive.communication)
    return [
        str(size.nodes),
        str(size.n),
        f"{size.value:.6g}",
        share(size.spread),
        percent(size.efficiency, 2),
        interval,
        *map(share, shares),
    ]


def _node_cells(result: ScaleResult, at: int) -> list[str]:
    node = result.nodes[at]
    z = "-" if node.z is None else f"{node.z:.1f}"
    return [
        printable(node.host),
        f"{node.value:.6g}",
        str(node.n),
        z,
        share(node.loss),
        "yes" if node.host in result.flagged else "no",
    ]


def share(value: float | None) -> str:
    """A fraction as per cent with two decimals, `-` where there is none."""
    # Adding 0.0 turns a rounded minus zero into zero.
    return "-" if value is None else percent(round(value, 4) + 0.0, 2)
