"""The page of a measured network: collectives over payloads, hosts against hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.text import printable
from paceline.core.units import binary, counted, percent, si
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.scaling.network.readings import OPERATIONS
from paceline.scaling.network.report import NetworkReport

HEIGHT = 300
MOST_ROWS = 64
MOST_HOSTS = 128
"""Hosts of a map at most: those with the slowest links."""
COLLECTIVE_HEADS = (
    "operation",
    "payload",
    "time",
    "slowest rank",
    "payload rate",
    "bus rate",
    "blocks",
    "spread",
    "wrong",
)
HOST_HEADS = ("host", "rate", "one way", "partners", "below the median", "z", "slow")


def network_html(report: NetworkReport) -> str:
    """The page; it opens without a network."""
    return render_page(
        "network.html.j2",
        _head(report),
        network_charts(report, ON_PAGE),
        sentences=report.sentences[2:],
        faults=report.faults,
        collective_heads=COLLECTIVE_HEADS,
        collective_rows=list(_collective_cells(report)),
        host_heads=HOST_HEADS,
        host_rows=list(_host_cells(report)),
        hosts_left_out=max(0, len(report.hosts) - MOST_ROWS),
    )


def network_charts(report: NetworkReport, look: Look) -> dict[str, alt.LayerChart]:
    """Time and bus rate over payload, both axes logarithmic, and a map of all pairs."""
    charts: dict[str, alt.LayerChart] = {}
    if report.collectives:
        charts["time"] = _over_payload(report, look, "latency_s", "Time of a collective", "time")
        charts["bus"] = _over_payload(report, look, "bus_bytes_per_s", "Bus rate", "bus rate")
    if report.pairs:
        charts["rates"] = _map(report, look, "bytes_per_s", "From host to host", 1e-9, "GB/s")
        charts["latencies"] = _map(report, look, "latency_s", "One way", 1e6, "us")
    return charts


def _over_payload(
    report: NetworkReport, look: Look, field: str, title: str, axis: str
) -> alt.LayerChart:
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
        f"{counted(report.collectives[0].ranks, 'rank')}; the mean of all ranks' medians. Bus "
        "rate: payload / "
        "time x 2 (n - 1) / n for all-reduce, (n - 1) / n for gather, scatter and all-to-all."
    )
    lines = base.properties(name=f"{field}_lines").mark_line(strokeWidth=1.5)
    dots = base.properties(name=f"{field}_dots").mark_circle(size=36, opacity=1)
    return finish([lines, dots], look, title, [note], HEIGHT)


def _map(
    report: NetworkReport, look: Look, field: str, title: str, scale: float, unit: str
) -> alt.LayerChart:
    kept = {host.host for host in report.hosts[:MOST_HOSTS]}
    rows = [
        {
            "source": printable(pair.source),
            "target": printable(pair.target),
            "value": scale * getattr(pair, field),
        }
        for pair in report.pairs
        if pair.source in kept and pair.target in kept
    ]
    # The page's colours are CSS variables, between which nothing can be mixed: steps, no gradient.
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
    left_out = f" The {MOST_HOSTS} slowest hosts." if len(report.hosts) > MOST_HOSTS else ""
    if field == "bytes_per_s":
        note = (
            f"All {counted(report.pairs[0].devices, 'device')} of a host at once, "
            "one direction at a time."
        )
    else:
        note = "Half of a small message's way there and back, of the slowest device."
    return finish([chart], look, title, [note + left_out], HEIGHT)


def _head(report: NetworkReport) -> PageHead:
    wrong = any(row.wrong for row in report.collectives)
    slow = sum(host.slow for host in report.hosts) + len(report.slow_links)
    bad = wrong or bool(report.faults)
    text = "wrong results" if wrong else "parts failed" if bad else f"{slow or 'nothing'} slow"
    identity = report.identity
    return PageHead(
        eyebrow=f"network, {report.created}",
        name=f"{identity['nodes']} x {identity['devices_per_node']} {identity['device']}",
        chip=text,
        tone="alert" if bad or slow else "good",
        title="Network",
        setup=(f"measured in {report.elapsed_s:.0f} s",),
        sentences=report.sentences[:2],
        cards=tuple(_cards(report)),
    )


def _cards(report: NetworkReport) -> Iterator[Card]:
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        rows = [row for row in report.collectives if row.operation == operation]
        label = f"Bus rate, {OPERATIONS[operation]}"
        if not rows:
            yield unknown_card(label, "was not measured")
            continue
        best = max(rows, key=lambda row: row.bus_bytes_per_s)
        yield card(
            label,
            si(best.bus_bytes_per_s, "B/s"),
            f"spread {percent(best.spread)}, {counted(best.n, 'block')} of "
            f"{counted(best.ranks, 'rank')}",
            [f"payload {binary(best.bytes)}"],
        )
    if not report.pairs:
        yield unknown_card("Slowest direction", "one host has no other")
        return
    slowest = min(report.pairs, key=lambda pair: pair.bytes_per_s)
    yield card(
        "Slowest direction",
        si(slowest.bytes_per_s, "B/s"),
        f"{counted(slowest.n, 'message')} of each of {counted(slowest.devices, 'device')}",
        [f"{printable(slowest.source)} to {printable(slowest.target)}"],
    )


def _collective_cells(report: NetworkReport) -> Iterator[tuple[str, ...]]:
    for row in report.collectives:
        yield (
            OPERATIONS[row.operation],
            binary(row.bytes),
            f"{1e6 * row.latency_s:,.1f} us",
            f"{1e6 * row.slowest_s:,.1f} us",
            si(row.bytes_per_s, "B/s"),
            si(row.bus_bytes_per_s, "B/s"),
            str(row.n),
            percent(row.spread),
            str(row.wrong),
        )


def _host_cells(report: NetworkReport) -> Iterator[Sequence[Any]]:
    for host in report.hosts[:MOST_ROWS]:
        yield (
            printable(host.host),
            si(host.bytes_per_s, "B/s"),
            "-" if host.latency_s is None else f"{1e6 * host.latency_s:,.1f} us",
            str(host.partners),
            "-" if host.loss is None else percent(host.loss),
            "-" if host.z is None else f"{host.z:.1f}",
            "yes" if host.slow else "no",
        )
