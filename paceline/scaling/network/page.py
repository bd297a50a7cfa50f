"""Network measurement as a document: collectives over payloads, and a map of hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.text import printable
from paceline.core.units import binary, percent, pluralize, si
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.scaling.network.readings import OPERATIONS
from paceline.scaling.network.report import NetworkReport

if TYPE_CHECKING:
    import altair as alt

    from paceline.report.theme import ChartTheme

HEIGHT = 300
MAX_ROWS = 64
MAX_HOSTS = 128
"""Maximum number of hosts on a map: those with the slowest links."""


def network_document(report: NetworkReport, folder: Path) -> Document:
    """Return the document of a report; `folder` is where the measurement is stored."""
    identity = report.identity
    left_out = len(report.hosts) - MAX_ROWS
    collectives = Table(
        title="Collectives",
        name="collectives",
        columns=COLLECTIVE_COLUMNS,
        rows=[row.model_dump(mode="json") for row in report.collectives],
    )
    pairs = Table(columns=PAIR_COLUMNS, rows=[pair.model_dump() for pair in report.pairs])
    return Document(
        kind=f"network, {report.created}",
        title=f"{identity['nodes']} x {identity['devices_per_node']} {identity['device']}",
        verdict=_verdict(report),
        setup=(f"measured in {report.elapsed_s:.0f} s",),
        answer=report.sentences[:2],
        figures=tuple(_figures(report)),
        sections=(
            Notes(
                title="Details",
                name="answer",
                lines=[*report.sentences[2:], *(f"Failed: {fault}" for fault in report.faults)],
            ),
            collectives,
            Table(
                title="Hosts, slowest first",
                name="hosts",
                columns=HOST_COLUMNS,
                rows=[host.model_dump() for host in report.hosts[:MAX_ROWS]],
                note="Rate: median over all partners of the slower direction."
                + (f" {left_out} more hosts are in the JSON." if left_out > 0 else ""),
            ),
        ),
        notes=(str(folder),),
        charts=lambda look: network_charts(report, look),
        data={**report.model_dump(mode="json"), "folder": str(folder)},
        csv=collectives if report.collectives else pairs,
    )


def _with_unit(factor: float, form: str, unit: str) -> Callable[[float], str]:
    return lambda value: f"{factor * value:{form}} {unit}"


def _rate(key: str, title: str) -> Column:
    return Column(key, title, lambda value: si(value, "B/s"), "right")


_MICROSECONDS = _with_unit(1e6, ",.1f", "us")
COLLECTIVE_COLUMNS = (
    Column("operation", "operation", lambda value: OPERATIONS[value]),
    Column("bytes", "payload", binary, "right"),
    Column("latency_s", "time", _MICROSECONDS, "right"),
    Column("slowest_s", "slowest rank", _MICROSECONDS, "right"),
    _rate("bytes_per_s", "payload rate"),
    _rate("bus_bytes_per_s", "bus rate"),
    Column("n", "blocks", justify="right"),
    Column("spread", "spread", percent, "right"),
    Column("wrong", "wrong", justify="right"),
)
PAIR_COLUMNS = (
    Column("source", "from"),
    Column("target", "to"),
    Column("latency_s", "one way", _MICROSECONDS, "right"),
    _rate("bytes_per_s", "rate"),
    Column("n", "n", justify="right"),
)
HOST_COLUMNS = (
    Column("host", "host"),
    _rate("bytes_per_s", "rate"),
    Column("latency_s", "one way", _MICROSECONDS, "right"),
    Column("partners", "partners", justify="right"),
    Column("loss", "below the median", percent, "right"),
    Column("z", "z", "{:.1f}".format, "right"),
    Column("slow", "slow", lambda value: "yes" if value else "no"),
)


def network_charts(report: NetworkReport, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return time and bus rate over payload, both axes logarithmic, and a map of all pairs."""
    charts: dict[str, alt.LayerChart] = {}
    if report.collectives:
        charts["time"] = _over_payload(report, look, "latency_s", "Time of a collective", "time")
        charts["bus"] = _over_payload(report, look, "bus_bytes_per_s", "Bus rate", "bus rate")
    if report.pairs:
        charts["rates"] = _map(report, look, "bytes_per_s", "Rate between hosts", 1e-9, "GB/s")
        charts["latencies"] = _map(report, look, "latency_s", "One-way latency", 1e6, "us")
    return charts


def _over_payload(
    report: NetworkReport, look: ChartTheme, field: str, title: str, axis: str
) -> alt.LayerChart:
    import altair as alt  # Imported here because it is slow to import.

    from paceline.report.step_charts import finish_chart

    scale, unit = (1e6, "us") if field == "latency_s" else (1e-9, "GB/s")
    rows = [
        {
            "operation": OPERATIONS[row.operation],
            "bytes": row.bytes,
            "value": scale * getattr(row, field),
        }
        for row in report.collectives
        if getattr(row, field) > 0
    ]
    colours = [
        *(look.palette.steady, look.palette.accent, look.palette.good, look.palette.warmup),
        *(look.palette.steady_soft, look.palette.good_soft, look.palette.ink),
    ]
    names = [name for name in OPERATIONS.values() if any(row["operation"] == name for row in rows)]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("bytes:Q", title="payload (bytes)", scale=alt.Scale(type="log")),
        y=alt.Y("value:Q", title=f"{axis} ({unit})", scale=alt.Scale(type="log", nice=False)),
        color=alt.Color(
            "operation:N",
            title=None,
            legend=alt.Legend(columns=4),
            scale=alt.Scale(domain=names, range=colours[: len(names)]),
        ),
        tooltip=["operation:N", "bytes:Q", alt.Tooltip("value:Q", title=unit, format=".4~g")],
    )
    note = (
        f"{pluralize(report.collectives[0].ranks, 'rank')}; the mean of all ranks' medians. Bus "
        "rate: payload / "
        "time x 2 (n - 1) / n for all-reduce, (n - 1) / n for gather, scatter and all-to-all."
    )
    lines = base.properties(name=f"{field}_lines").mark_line(strokeWidth=1.5)
    dots = base.properties(name=f"{field}_dots").mark_circle(size=36, opacity=1)
    return finish_chart([lines, dots], look, title, [note], HEIGHT)


def _map(
    report: NetworkReport, look: ChartTheme, field: str, title: str, scale: float, unit: str
) -> alt.LayerChart:
    import altair as alt  # Imported here because it is slow to import.

    from paceline.report.step_charts import finish_chart

    hosts = {host.host for host in report.hosts[:MAX_HOSTS]}
    rows = [
        {
            "source": printable(pair.source),
            "target": printable(pair.target),
            "value": scale * getattr(pair, field),
        }
        for pair in report.pairs
        if pair.source in hosts and pair.target in hosts
    ]
    # The page's colours are CSS variables, which cannot be interpolated: steps instead of a
    # gradient.
    palette = look.palette
    steps = [palette.accent, palette.warmup_soft, palette.band, palette.steady_soft, palette.steady]
    chart = (
        alt.Chart(alt.Data(values=rows), name=f"{field}_map")
        .mark_rect()
        .encode(
            x=alt.X("target:N", title="to"),
            y=alt.Y("source:N", title="from"),
            color=alt.Color(
                "value:Q",
                title=unit,
                scale=alt.Scale(
                    type="quantize", range=steps if field == "bytes_per_s" else steps[::-1]
                ),
            ),
            tooltip=["source:N", "target:N", alt.Tooltip("value:Q", title=unit, format=".4~g")],
        )
    )
    left_out = f" The {MAX_HOSTS} slowest hosts." if len(report.hosts) > MAX_HOSTS else ""
    if field == "bytes_per_s":
        note = (
            f"All {pluralize(report.pairs[0].devices, 'device')} of a host at once, "
            "one direction at a time."
        )
    else:
        note = "Half the round-trip time of a small message, for the slowest device."
    return finish_chart([chart], look, title, [note + left_out], HEIGHT)


def _verdict(report: NetworkReport) -> Verdict:
    wrong = any(row.wrong for row in report.collectives)
    slow = sum(host.slow for host in report.hosts) + len(report.slow_links)
    bad = wrong or bool(report.faults)
    text = "wrong results" if wrong else "parts failed" if bad else f"{slow or 'nothing'} slow"
    return Verdict(text, "alert" if bad or slow else "good")


def _figures(report: NetworkReport) -> Iterator[Figure]:
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        rows = [row for row in report.collectives if row.operation == operation]
        label = f"Bus rate, {OPERATIONS[operation]}"
        if not rows:
            yield unknown_figure(label, "was not measured")
            continue
        best = max(rows, key=lambda row: row.bus_bytes_per_s)
        blocks = f"{pluralize(best.n, 'block')} of {pluralize(best.ranks, 'rank')}"
        yield Figure(
            label,
            si(best.bus_bytes_per_s, "B/s"),
            f"spread {percent(best.spread)}, {blocks}",
            (f"payload {binary(best.bytes)}",),
        )
    if not report.pairs:
        yield unknown_figure("Slowest direction", "needs two hosts")
        return
    slowest = min(report.pairs, key=lambda pair: pair.bytes_per_s)
    yield Figure(
        "Slowest direction",
        si(slowest.bytes_per_s, "B/s"),
        f"{pluralize(slowest.n, 'message')} of each of {pluralize(slowest.devices, 'device')}",
        (f"{slowest.source} to {slowest.target}",),
    )
