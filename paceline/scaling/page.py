"""A scaling analysis as table rows and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.node_groups import GroupThroughput
from paceline.core.text import printable
from paceline.core.units import percent
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE
from paceline.scaling.analysis.result import ScaleResult, SizeResult
from paceline.scaling.charts import scaling_charts

MOST_NODE_ROWS = 64
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
    flagged = len(result.flagged)
    chip = f"{flagged} node{'' if flagged == 1 else 's'} flagged" if flagged else "no node flagged"
    judged = result.smallest_fault_found is not None or bool(result.flagged or reference)
    return render_page(
        "scaling.html.j2",
        scaling_charts(result, measured, ON_PAGE, reference),
        name=printable(name),
        chip=chip if judged else "too few to judge",
        tone="alert" if flagged else "good" if judged else "plain",
        setup=[table_note(result), f"{len(measured)} sub-clusters measured"],
        sentences=result.sentences,
        size_heads=SIZE_HEADS,
        size_rows=[_size_cells(size) for size in result.sizes],
        node_heads=NODE_HEADS,
        node_rows=[_node_cells(result, at) for at in range(min(MOST_NODE_ROWS, len(result.nodes)))],
        nodes_left_out=max(0, len(result.nodes) - MOST_NODE_ROWS),
    )


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
