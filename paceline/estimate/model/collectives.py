"""Bandwidth and time of collectives inside an NVLink domain and over the network.

Symbols: n ranks of a group, every `stride`th of neighbouring devices. An all-reduce moves 2 (n - 1)
/ n of its bytes through every rank, both in a ring and by halving and doubling (Thakur et al.,
IJHPCA 19, 2005). An all-gather or a reduce-scatter moves half of that. Seconds are bytes /
(bytes/s) + starts.

A fabric has levels: NVLink domains, leaves that connect domains, pods that connect leaves. A group
uses the levels up to the one that contains all of it, and only data that must cross a level does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paceline.estimate.model.case import Cases, Floats

PROXY_REFERENCE_RANKS = 16
"""Number of ranks at which `ep_proxied_start_s` is defined."""
LATENCIES = ("intra_latency_s", "inter_latency_s", "leaf_latency_s", "pod_latency_s")


class _NetworkLevel(NamedTuple):
    """A level of the network; `unit` is the number of devices that the level below connects."""

    unit: Floats
    bytes_per_s: Floats
    latency_s: Floats


def _levels(x: Cases) -> list[_NetworkLevel]:
    """Return the network levels beyond the NVLink domain that any case has."""
    first = _NetworkLevel(x.domain, x.inter_bytes_per_s, x.inter_latency_s)
    leaf = _NetworkLevel(x.leaf, x.leaf_bytes_per_s, x.leaf_latency_s)
    pod = _NetworkLevel(x.pod, x.pod_bytes_per_s, x.pod_latency_s)
    return [first, *(level for level in (leaf, pod) if np.isfinite(level.unit).any())]


def group_span(x: Cases, span: Floats) -> Floats:
    """Return the devices over which a group of `span` neighbours spreads; all if scattered."""
    return np.where((x.scattered > 0) & (span > x.domain), x.devices, span)


def _neighbours_per_unit(x: Cases, level: _NetworkLevel) -> Floats:
    """Return the neighbours connected below a level; only one domain's if scattered."""
    return np.where((x.scattered > 0) & (x.devices > level.unit), x.domain, level.unit)


def _inter_share(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the share of the network's rate that collectives reach; 1 of a measured rate."""
    return np.where(x.inter_measured > 0, 1.0, c["inter"])


def group_rate(x: Cases, c: Mapping[str, float], span: Floats, stride: Floats) -> Floats:
    """Return the bytes/s of one rank in a group of every `stride`th of `span` neighbours.

    Inside the NVLink domain it is the rate of the links. A group that leaves the domain has domain
    / stride members per domain. They share the exchanged data: each moves its part through its own
    port. The same holds for the members in a leaf and in a pod, unless domains are scattered.
    Without a switch a group has only the links between its own members: (n - 1)/(domain - 1) of a
    device's rate.
    """
    inside = x.intra_bytes_per_s * c["intra"]
    link_share = (span / stride - 1) / np.maximum(1.0, x.domain - 1)
    inside = inside * np.where((x.mesh > 0) & (link_share > 0), np.minimum(1.0, link_share), 1.0)
    rate, spread = inside, group_span(x, span)
    for level in _levels(x):
        members = np.maximum(1.0, _neighbours_per_unit(x, level) / stride)
        shared = np.minimum(rate, level.bytes_per_s * _inter_share(x, c) * members)
        rate = np.where(spread <= level.unit, rate, shared)
    return rate


def port_rate(x: Cases, c: Mapping[str, float], span: Floats) -> Floats:
    """Return the bytes/s of point-to-point transfers of one rank within `span` devices."""
    rate, spread = x.intra_bytes_per_s * c["intra"], group_span(x, span)
    for level in _levels(x):
        rate = np.where(spread <= level.unit, rate, level.bytes_per_s * _inter_share(x, c))
    return rate


def one_way_s(x: Cases, span: Floats) -> Floats:
    """Return the sum of the declared latencies of all levels within `span` devices, in seconds."""
    spread = group_span(x, span)
    return x.intra_latency_s + sum(
        np.where(spread > level.unit, level.latency_s, 0.0) for level in _levels(x)
    )


def latency_s(x: Cases, size: Floats, stride: Floats) -> Floats:
    """Return the seconds that declared latencies add to a collective among `size` ranks.

    Each level counts its latency log2 u times, where a group has members in u units of the level
    below.
    """
    if not any(getattr(x, name).any() for name in LATENCIES):
        return np.zeros(x.size)
    seconds, members = np.zeros(x.size), np.ones(x.size)
    latency = x.intra_latency_s
    for level in _levels(x):
        inside = np.clip(_neighbours_per_unit(x, level) / stride, 1.0, size)
        seconds = seconds + latency * np.log2(inside / members)
        latency, members = level.latency_s, inside
    return seconds + latency * np.log2(np.maximum(size, members) / members)


def start_s(x: Cases, c: Mapping[str, float], span: Floats) -> Floats:
    """Return the start latency of a collective over `span` devices in seconds.

    The CPU starts it, or the device in a captured CUDA graph.
    """
    graph = np.where(span <= x.domain, c["intra_start_graph_s"], c["inter_start_graph_s"])
    return np.where(
        x.is_category("cuda_graphs", "none"), c["inter_start_s"] * x.cpu_oversubscription, graph
    )


def _own_start_s(x: Cases, c: Mapping[str, float], span: Floats) -> Floats:
    """Return the same, with the shorter latency of the NVLink domain."""
    by_host = (span <= x.domain) & x.is_category("cuda_graphs", "none")
    return np.where(by_host, c["intra_start_s"] * x.cpu_oversubscription, start_s(x, c, span))


def all_reduce_s(
    x: Cases,
    c: Mapping[str, float],
    num_bytes: Floats,
    size: Floats,
    stride: Floats,
    starts: float | Floats = 1.0,
) -> Floats:
    """Return the seconds of an all-reduce: 2 (n - 1) / n bytes / rate + start x log2 n, n = size.

    An all-gather plus a reduce-scatter moves as much, with two starts.
    """
    span = size * stride
    start = starts * _own_start_s(x, c, span)
    transfer_s = 2 * (size - 1) / size * num_bytes / group_rate(x, c, span, stride)
    latency = start * np.log2(np.maximum(size, 2)) + starts * latency_s(x, size, stride)
    return np.where(size > 1, transfer_s + latency, 0.0)


def all_to_all_s(
    x: Cases,
    c: Mapping[str, float],
    num_bytes: Floats,
    size: Floats,
    stride: Floats,
    receivers: Floats,
) -> Floats:
    """Return the seconds of an all-to-all among `size` ranks, each sending `num_bytes` in total.

    Every rank has different bytes for each other rank, so data that leaves a domain goes through
    the rank's own port. `receivers` ranks get a copy of each piece, but a domain gets one copy for
    all of its ranks, so that (D - 1)(1 - (1 - 1/D)^receivers) copies leave one of D domains on
    average. With group-limited routing a token reaches only R domains, so that R (1 - (1 -
    1/R)^receivers) (D - 1) / D copies leave. NCCL's all-to-all sends every copy separately. CPU
    threads that drive the ports start one transfer after the other.
    """
    near = np.clip(x.domain / stride, 1.0, size)
    domains = size / near
    token_domains = np.maximum(1.0, domains * np.minimum(1.0, x.groups_per_token / x.expert_groups))
    copies = (
        token_domains
        * (1 - (1 - 1 / token_domains) ** receivers)
        / receivers
        * (domains - 1)
        / domains
    )
    plain = x.is_category("dispatcher", "alltoall")
    copies = np.where(plain, (domains - 1) / domains, copies)
    bandwidth_share = np.where(
        plain, c["all_to_all"], np.where(x.proxied > 0, c["ep_proxied"], 1.0)
    )
    inside = num_bytes * (near - 1) / size / (x.intra_bytes_per_s * c["intra"])
    slowest, spread = inside, group_span(x, size * stride)
    for level in _levels(x):
        connected_ranks = np.clip(_neighbours_per_unit(x, level) / stride, near, size)
        beyond = copies * (size - connected_ranks) / np.maximum(size - near, 1.0)
        rate = level.bytes_per_s * _inter_share(x, c) * bandwidth_share
        crossing = num_bytes * beyond / rate
        slowest = np.where(spread > level.unit, np.maximum(slowest, crossing), slowest)
    start = _own_start_s(x, c, np.where(domains > 1, np.inf, 0.0))
    by_cpu = (domains > 1) & (x.proxied > 0) & ~plain
    start = np.where(by_cpu, c["ep_proxied_start_s"] * size / PROXY_REFERENCE_RANKS, start)
    return slowest + start + one_way_s(x, size * stride)
