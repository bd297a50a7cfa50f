"""Report of a network measurement: rows, slow hosts and slow links."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import Any

from paceline.core.node_groups import GroupThroughput
from paceline.core.units import binary, percent, pluralize, si
from paceline.core.value import Value
from paceline.scaling.analysis.node_speeds import node_speeds
from paceline.scaling.analysis.slow_nodes import MIN_COMPARED_NODES, judge_nodes
from paceline.scaling.network.readings import (
    OPERATIONS,
    CollectiveTiming,
    Fabric,
    FabricShare,
    PairRow,
    fabric_shares,
    relative_spread,
    share_sentences,
)

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
    elapsed_s: float
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
    elapsed_s: float,
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
    one_way_s = median(pair.latency_s for pair in pairs)
    line = (
        f"{pluralize(len(pairs), 'direction')} between {pluralize(len(hosts), 'host')}: median "
        f"{si(median(rates), 'B/s')}"
        f"{around}, slowest {si(min(rates), 'B/s')}; {1e6 * one_way_s:,.0f} us one way."
    )
    few = f"Hosts are compared with each other if there are at least {MIN_COMPARED_NODES}."
    return [line, few] if len(hosts) < MIN_COMPARED_NODES else [line]


def _best_rates(collectives: Sequence[CollectiveTiming]) -> list[str]:
    lines: list[str] = []
    for operation, title in OPERATIONS.items():
        rows = [row for row in collectives if row.operation == operation]
        if rows:
            best = max(rows, key=lambda row: row.bus_bytes_per_s)
            lines.append(
                f"{title} of {pluralize(best.ranks, 'rank')}: {si(best.bus_bytes_per_s, 'B/s')} "
                "bus rate at best"
                f" (payload {binary(best.bytes)}, spread {percent(best.spread)}), "
                f"{1e6 * rows[0].latency_s:,.0f} us for {binary(rows[0].bytes)}."
            )
    return lines
