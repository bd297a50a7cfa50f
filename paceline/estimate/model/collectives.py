"""Collectives: rates and times over the fast links of a domain and the network between domains.

Symbols: n ranks of a group, every `stride`th of neighbouring devices. An all-reduce moves
2 (n - 1) / n of its bytes through every rank, in a ring as by halving and doubling (Thakur et al.,
IJHPCA 19, 2005); a gather or a scatter moves half of that. Seconds are bytes / (bytes/s) + starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.estimate.model.case import Cases, Floats


def group_rate(x: Cases, c: Mapping[str, float], span: Floats, stride: Floats) -> Floats:
    """Bytes/s of one rank in a group of every `stride`th of `span` neighbouring devices.

    Inside the fast domain it is that of the links. A group that leaves it has domain / stride
    members a domain, which share what they exchange: each moves its part through its own port.
    Without a switch a group has the links between its own members alone: (n - 1)/(domain - 1) of
    a device's.
    """
    inside, between = x.intra_bytes_per_s * c["intra"], x.inter_bytes_per_s * c["inter"]
    linked = (span / stride - 1) / np.maximum(1.0, x.domain - 1)
    inside = inside * np.where((x.mesh > 0) & (linked > 0), np.minimum(1.0, linked), 1.0)
    members = np.maximum(1.0, x.domain / stride)
    return np.where(span <= x.domain, inside, np.minimum(inside, between * members))


def start_s(x: Cases, c: Mapping[str, float]) -> Floats:
    """Seconds before a collective between nodes moves anything; hosts begin it."""
    return c["inter_start_s"] * x.crowding


def all_reduce_s(
    x: Cases,
    c: Mapping[str, float],
    num_bytes: Floats,
    size: Floats,
    stride: Floats,
    starts: float | Floats = 1.0,
) -> Floats:
    """Seconds of an all-reduce among `size` ranks: 2 (n - 1) / n bytes / rate + start x log2 n.

    A gather and a scatter in its place move as much, with two starts.
    """
    span = size * stride
    start = starts * np.where(span <= x.domain, c["intra_start_s"] * x.crowding, start_s(x, c))
    moved = 2 * (size - 1) / size * num_bytes / group_rate(x, c, span, stride)
    return np.where(size > 1, moved + start * np.log2(np.maximum(size, 2)), 0.0)


def all_to_all_s(
    x: Cases,
    c: Mapping[str, float],
    num_bytes: Floats,
    size: Floats,
    stride: Floats,
    receivers: Floats,
) -> Floats:
    """Seconds of an all-to-all among `size` ranks, each of which sends `num_bytes` in all.

    Every rank has bytes of its own for each other one, so what leaves a domain goes through its own
    port, unlike what a domain shares. `receivers` ranks get a copy of each piece, but a domain gets
    one for all of its own, so that (D - 1)(1 - (1 - 1/D)^receivers) copies leave one of D domains
    on average.
    """
    near = np.clip(x.domain / stride, 1.0, size)
    domains = size / near
    copies = (domains - 1) * (1 - (1 - 1 / domains) ** receivers) / receivers
    inside = num_bytes * (near - 1) / size / (x.intra_bytes_per_s * c["intra"])
    outside = num_bytes * copies / (x.inter_bytes_per_s * c["inter"])
    start = np.where(domains > 1, c["inter_start_s"], c["intra_start_s"])
    return np.maximum(inside, outside) + start * x.crowding
