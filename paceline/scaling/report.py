"""Scaling analysis as a document: the answer, the sizes, the nodes and the charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.node_groups import GroupThroughput
from paceline.core.units import percent, pluralize
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.scaling.analysis.result import ScaleResult, SizeResult
from paceline.scaling.campaigns.result import CampaignResult

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

MAX_NODE_ROWS = 64
MAX_LEADING = 2
"""Maximum number of slow nodes in the answer."""
FACTORS = ("straggler", "communication")


def scaling_document(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    name: str,
    reference: float | None = None,
) -> Document:
    """Return the document of an analysis or a scaling test.

    `measured` are the sub-clusters that charts show, `reference` is a healthy node's samples/s.
    """
    answer = leading_sentences(result)
    sizes = size_columns(result)
    rows = list(size_rows(result))
    return Document(
        kind="scaling and slow nodes",
        title=name,
        headline=answer[0] if answer else f"Scaling of {name}",
        verdict=_verdict(result, reference),
        setup=(table_note(result), f"{pluralize(len(measured), 'sub-cluster')} measured"),
        answer=answer,
        figures=scaling_figures(result),
        sections=(
            Notes(
                title="Details",
                name="answer",
                lines=[sentence for sentence in result.sentences if sentence not in answer],
            ),
            Table(
                title="Sizes",
                name="sizes",
                columns=sizes,
                rows=rows,
                note="samples/s: geometric mean of the sub-clusters. Spread: standard deviation "
                "between them. low, high: 95% interval of the efficiency.",
            ),
            Table(
                title="Slowest measured values",
                name="naive",
                media="page",
                columns=[Column("nodes", "nodes", justify="right"), *_share_columns(_NAIVE)],
                rows=rows,
                note="Naive factors use the slowest measured value. The slowest of many noisy "
                "values is biased low.",
            ),
            _node_table(result),
        ),
        charts=lambda look: _charts(result, measured, look, reference, name),
        data=result.model_dump(mode="json"),
        csv=Table(columns=[*sizes, *_csv_columns(result)], rows=rows),
    )


def size_rows(result: ScaleResult) -> Iterator[dict[str, Any]]:
    """Return one flat row per size, parts of a node first; fractions and rates are unrounded."""
    if isinstance(result, CampaignResult):
        for part in result.below_one_node:
            row = part.model_dump()
            yield {"nodes": 1, "gpus": part.devices, "scaling": result.scaling, **row}
    for size in result.sizes:
        row = size.model_dump(exclude={"naive"})
        naive = {f"naive_{name}": value for name, value in size.naive.model_dump().items()}
        gpus: Mapping[str, Any] = {}
        if isinstance(result, CampaignResult):
            gpus = {"gpus": size.nodes * result.devices_per_node, "scaling": result.scaling}
        yield {**row, **naive, **gpus}


def size_columns(result: ScaleResult) -> list[Column]:
    """Return the columns of the sizes; a scaling test also has the number of GPUs."""
    gpus = [Column("gpus", "gpus", justify="right")] if isinstance(result, CampaignResult) else []
    return [
        Column("nodes", "nodes", justify="right"),
        *gpus,
        Column("n", "sub-clusters", justify="right"),
        Column("value", "samples/s", "{:.6g}".format, "right"),
        *_share_columns(("spread", "efficiency", "low", "high", *FACTORS)),
    ]


_NAIVE = tuple(f"naive_{factor}" for factor in FACTORS)


def _csv_columns(result: ScaleResult) -> list[Column]:
    ends = [f"{factor}_{end}" for factor in FACTORS for end in ("low", "high")]
    scaling = [Column("scaling", "scaling")] if isinstance(result, CampaignResult) else []
    return [*_share_columns([*ends, *_NAIVE]), *scaling]


def _share_columns(keys: Sequence[str]) -> list[Column]:
    return [Column(key, key.replace("_", " "), share, "right") for key in keys]


def _node_table(result: ScaleResult) -> Table:
    left_out = len(result.nodes) - MAX_NODE_ROWS
    flag_words = {True: "yes", False: "no"}
    return Table(
        title="Nodes, slowest first",
        name="nodes",
        media="page",
        columns=(
            Column("host", "host"),
            Column("value", "samples/s", "{:.6g}".format, "right"),
            Column("n", "values", justify="right"),
            Column("z", "z", "{:.1f}".format, "right"),
            Column("loss", "below reference", share, "right"),
            Column("flagged", "flagged", lambda value: flag_words[value]),
        ),
        rows=[
            {**node.model_dump(), "flagged": node.host in result.flagged}
            for node in result.nodes[:MAX_NODE_ROWS]
        ],
        note=f"{left_out} more nodes are in the JSON." if left_out > 0 else "",
    )


def _charts(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    look: ChartTheme,
    reference: float | None,
    name: str,
) -> dict[str, LayerChart]:
    from paceline.scaling.charts import scaling_charts  # Altair is slow to import.

    return scaling_charts(result, measured, look, reference, name)


def table_note(result: ScaleResult) -> str:
    """Return the kind of scaling and its base."""
    base = result.base
    return f"{result.scaling} scaling, base: {base.statistic}, {base.value:.6g} samples/s"


def _verdict(result: ScaleResult, reference: float | None) -> Verdict:
    num_flagged = len(result.flagged)
    suspects = sum(suspect.confirmed is None for suspect in result.suspects)
    if result.smallest_fault_found is None and not (num_flagged or reference):
        return Verdict("too few to judge")
    n, word = (suspects, "suspected") if suspects and not num_flagged else (num_flagged, "flagged")
    tone = "alert" if num_flagged else "plain" if suspects else "good"
    return Verdict(f"{n or 'no'} node{'s' if n > 1 else ''} {word}", tone)


def leading_sentences(result: ScaleResult) -> tuple[str, ...]:
    """Return the leading sentences: how it scales, and which nodes are slow."""
    slow = [s for s in result.sentences[1:] if s.split(",")[0].split(" ")[0] in result.flagged]
    return (*result.sentences[:1], *slow[:MAX_LEADING])


def scaling_figures(result: ScaleResult) -> tuple[Figure, ...]:
    """Return the efficiency of the largest size, its two factors, and the slowest node."""
    largest = result.sizes[-1]
    return (
        _efficiency_figure(result, largest),
        _factor_figure("Straggler efficiency", largest, "straggler"),
        _factor_figure("Communication efficiency", largest, "communication"),
        _node_figure(result),
    )


def _efficiency_figure(result: ScaleResult, largest: SizeResult) -> Figure:
    speed = f"{largest.value:.6g} samples/s, {pluralize(largest.n, 'sub-cluster')}"
    label = f"Efficiency on {pluralize(largest.nodes, 'node')}"
    if largest.nodes == result.base.nodes:
        return unknown_figure(label, "only one size was measured", [speed])
    base = f"100%: {largest.nodes / result.base.nodes:g} x the {result.base.statistic}"
    span = interval(largest.low, largest.high)
    return Figure(label, percent(largest.efficiency, 2), span, (speed, base))


def _factor_figure(label: str, largest: SizeResult, factor: str) -> Figure:
    value = getattr(largest, factor)
    if value is None:
        naive = getattr(largest.naive, factor)
        measured = f"{percent(naive, 2)} from uncorrected values" if naive else None
        return unknown_figure(
            label, "cannot be separated with these values", filter(None, [measured])
        )
    cause = {"straggler": "waiting for the slowest node"}.get(factor, "with synchronisation")
    low, high = getattr(largest, f"{factor}_low"), getattr(largest, f"{factor}_high")
    lines = (f"{cause}, a factor of the efficiency",)
    return Figure(label, percent(value, 2), interval(low, high), lines)


def _node_figure(result: ScaleResult) -> Figure:
    if not result.nodes:
        return unknown_figure("Slowest node", "no node was measured alone")
    slowest, smallest = result.nodes[0], result.smallest_fault_found
    detection = "smallest detectable fault unknown"
    if smallest is not None:
        detection = f"a node {percent(smallest)} slower would be detected in 9 of 10 cases"
    z = "z unknown" if slowest.z is None else f"z {slowest.z:.1f}"
    return Figure(
        "Slowest node",
        share(slowest.loss),
        f"below reference, {z}, {pluralize(slowest.n, 'value')}",
        (slowest.host + (", flagged" if slowest.host in result.flagged else ""), detection),
    )


def interval(low: float | None, high: float | None) -> str:
    """Return both ends of a 95% interval of a share, or a note that there is none."""
    if low is None or high is None:
        return "no interval: too few values"
    return f"{100 * low:.2f} to {percent(high, 2)} (95%)"


def share(value: float) -> str:
    """Return a fraction as a percentage with two decimals."""
    # Adding 0.0 turns a rounded minus zero into zero.
    return percent(round(value, 4) + 0.0, 2)
