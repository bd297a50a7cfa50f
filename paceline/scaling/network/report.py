"""Report of a network measurement: rows, slow hosts and links, and their document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.core.node_groups import GroupThroughput
from paceline.core.text import printable
from paceline.core.units import binary, percent, pluralize, si
from paceline.core.value import Value
from paceline.files.nominal_links import Fabric
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.scaling.analysis.node_speeds import node_speeds
from paceline.scaling.analysis.slow_nodes import MIN_COMPARED_NODES, judge_nodes
from paceline.scaling.network.readings import (
    OPERATIONS,
    CollectiveTiming,
    FabricShare,
    PairRow,
    fabric_shares,
    relative_spread,
    share_sentences,
)

if TYPE_CHECKING:
    import altair as alt

    from paceline.report.theme import ChartTheme


LINK_LOSS = 0.1
"""Minimum loss of a slow link, relative to what its two hosts reach with others."""
MIN_LINK_DISTANCE = 4.0
"""Minimum distance of a slow link, in robust standard deviations of all links."""
MIN_LINKS = 6
MAX_SENTENCES = 8


class HostLinks(Value):
    """Links of one host with all others."""

    host: str
    bytes_per_s: float
    """Median over its partners of the slower direction."""
    latency_s: float | None
    """Median over its partners; None where no direction from it was measured."""
    partners: int
    loss: float | None
    """1 - rate / median of all hosts; None when only two hosts were measured."""
    z: float | None
    slow: bool


class SlowLink(Value):
    """A slow direction between two hosts that are both faster with others."""

    source: str
    target: str
    bytes_per_s: float
    expected_bytes_per_s: float
    """The smaller of the median rates of both hosts."""
    loss: float


class NetworkReport(Value):
    """Collectives among all devices, and every pair of hosts."""

    schema_version: int = 1
    created: str
    identity: dict[str, Any]
    """Device, hosts, devices per host, torch: properties that must be equal to compare two
    reports."""
    elapsed_s: float | None
    """Seconds of the measurement; None for the output of another program."""
    collectives: tuple[CollectiveTiming, ...]
    pairs: tuple[PairRow, ...]
    hosts: tuple[HostLinks, ...]
    pair_spread: float | None
    """1.4826 x MAD / median of all directions' rates."""
    slow_links: tuple[SlowLink, ...]
    fabric: tuple[FabricShare, ...] = ()
    """Measured rates relative to the rates of the stated links."""
    faults: tuple[str, ...]
    """Parts that failed, with the rank's host."""
    sentences: tuple[str, ...]


def host_links(pairs: Sequence[PairRow]) -> tuple[HostLinks, ...]:
    """Return every host's figures, the slowest first; at least eight hosts get a z-score."""
    slower: dict[str, dict[str, float]] = {}
    latencies: dict[str, list[float]] = {}
    for pair in pairs:
        for host, partner in ((pair.source, pair.target), (pair.target, pair.source)):
            rates = slower.setdefault(host, {})
            rates[partner] = min(pair.bytes_per_s, rates.get(partner, pair.bytes_per_s))
        if pair.latency_s is not None:
            latencies.setdefault(pair.source, []).append(pair.latency_s)
    rates = {host: median(partners.values()) for host, partners in slower.items()}
    speeds = node_speeds([GroupThroughput((host,), rate) for host, rate in rates.items()])
    if speeds is None:
        return ()
    verdicts = {node.host: node for node in judge_nodes(speeds).nodes}
    middle = median(rates.values())
    return tuple(
        HostLinks(
            host=host,
            bytes_per_s=rates[host],
            latency_s=median(latencies[host]) if host in latencies else None,
            partners=len(slower[host]),
            loss=1 - rates[host] / middle if len(rates) > 2 else None,
            z=verdicts[host].z,
            slow=verdicts[host].flagged,
        )
        for host in sorted(rates, key=lambda host: rates[host])
    )


def slow_links(pairs: Sequence[PairRow], hosts: Sequence[HostLinks]) -> tuple[SlowLink, ...]:
    """Return directions far below what both of their hosts reach with others, the slowest first."""
    rates = {host.host: host.bytes_per_s for host in hosts}
    if len(pairs) < MIN_LINKS or len(hosts) < 3:
        return ()
    expected = [min(rates[pair.source], rates[pair.target]) for pair in pairs]
    logs = [log(pair.bytes_per_s / rate) for pair, rate in zip(pairs, expected, strict=True)]
    spread = relative_spread([exp(each) for each in logs])
    bound = max(-log(1 - LINK_LOSS), MIN_LINK_DISTANCE * spread)
    links = [
        SlowLink(
            source=pair.source,
            target=pair.target,
            bytes_per_s=pair.bytes_per_s,
            expected_bytes_per_s=rate,
            loss=1 - pair.bytes_per_s / rate,
        )
        for pair, rate, below in zip(pairs, expected, logs, strict=True)
        if below < -bound
    ]
    return tuple(sorted(links, key=lambda link: -link.loss))


def network_report(
    collectives: tuple[CollectiveTiming, ...],
    pairs: tuple[PairRow, ...],
    identity: dict[str, Any],
    created: str,
    elapsed_s: float | None,
    faults: Sequence[str] = (),
    fabric: Fabric | None = None,
) -> NetworkReport:
    """Return the report of these rows, with its sentences."""
    hosts = host_links(pairs)
    links = slow_links(pairs, hosts)
    spread = relative_spread([pair.bytes_per_s for pair in pairs]) if len(pairs) > 2 else None
    shares = fabric_shares(collectives, pairs, identity["nodes"], fabric) if fabric else ()
    return NetworkReport(
        created=created,
        identity=identity,
        elapsed_s=elapsed_s,
        collectives=collectives,
        pairs=pairs,
        hosts=hosts,
        pair_spread=spread,
        slow_links=links,
        fabric=shares,
        faults=tuple(dict.fromkeys(faults)),
        sentences=(
            *_sentences(collectives, pairs, hosts, links, spread),
            *share_sentences(shares),
        ),
    )


def _sentences(
    collectives: Sequence[CollectiveTiming],
    pairs: Sequence[PairRow],
    hosts: Sequence[HostLinks],
    links: Sequence[SlowLink],
    spread: float | None,
) -> list[str]:
    """Return sentences on wrong results first, then on slow parts, then on the rates."""
    wrong = dict.fromkeys(OPERATIONS[row.operation] for row in collectives if row.wrong)
    return [
        *([f"WRONG RESULTS of {', '.join(wrong)}: do not train here."] if wrong else []),
        *[_slow_host(host) for host in hosts if host.slow][:MAX_SENTENCES],
        *[_slow_link(link) for link in links[:MAX_SENTENCES]],
        *(_all_pairs(pairs, hosts, spread) if pairs else []),
        *_best_rates(collectives),
    ]


def _slow_host(host: HostLinks) -> str:
    z = "" if host.z is None else f" (z = {host.z:.1f})"
    rate, loss = si(host.bytes_per_s, "B/s"), percent(host.loss or 0)
    return f"{host.host} is slow with all partners: {rate}, {loss} below the others' median{z}."


def _slow_link(link: SlowLink) -> str:
    rate, loss = si(link.bytes_per_s, "B/s"), percent(link.loss)
    return f"{link.source} to {link.target}: {rate}, {loss} below what both reach with others."


def _all_pairs(
    pairs: Sequence[PairRow], hosts: Sequence[HostLinks], spread: float | None
) -> list[str]:
    rates = [pair.bytes_per_s for pair in pairs]
    around = f", spread {percent(spread)}" if spread is not None else ""
    latencies = [pair.latency_s for pair in pairs if pair.latency_s is not None]
    one_way = f"; {1e6 * median(latencies):,.0f} us one way" if latencies else ""
    line = (
        f"{pluralize(len(pairs), 'direction')} between {pluralize(len(hosts), 'host')}: median "
        f"{si(median(rates), 'B/s')}"
        f"{around}, slowest {si(min(rates), 'B/s')}{one_way}."
    )
    few = f"Hosts are compared with each other if there are at least {MIN_COMPARED_NODES}."
    return [line, few] if len(hosts) < MIN_COMPARED_NODES else [line]


def _best_rates(collectives: Sequence[CollectiveTiming]) -> list[str]:
    lines: list[str] = []
    for operation, title in OPERATIONS.items():
        rows = [row for row in collectives if row.operation == operation]
        if rows:
            best = max(rows, key=lambda row: row.bus_bytes_per_s)
            spread = f", spread {percent(best.spread)}" if best.spread is not None else ""
            lines.append(
                f"{title} of {pluralize(best.ranks, 'rank')}: {si(best.bus_bytes_per_s, 'B/s')} "
                f"bus rate at best (payload {binary(best.bytes)}{spread}), "
                f"{1e6 * rows[0].latency_s:,.0f} us for {binary(rows[0].bytes)}."
            )
    return lines


HEIGHT = 300
MAX_ROWS = 64
MAX_HOSTS = 128
"""Maximum number of hosts on a map: those with the slowest links."""


def network_document(report: NetworkReport, source: Path) -> Document:
    """Return the document of a report.

    `source` is the folder of the measurement, or the output of another program.
    """
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
        setup=() if report.elapsed_s is None else (f"measured in {report.elapsed_s:.0f} s",),
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
        notes=(str(source),),
        charts=lambda look: network_charts(report, look),
        data={**report.model_dump(mode="json"), "folder": str(source)},
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
        spread = "" if best.spread is None else f"spread {percent(best.spread)}, "
        yield Figure(
            label,
            si(best.bus_bytes_per_s, "B/s"),
            f"{spread}{blocks}",
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
