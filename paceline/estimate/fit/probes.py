"""Probes as observations of coefficients: what the formulas say of each, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.estimate.model.block import block_time, product_rate, product_s
from paceline.estimate.model.case import Case, Cases, Floats, cases_of, varied
from paceline.estimate.model.coefficients import NAMES
from paceline.estimate.model.collectives import all_reduce_s

LEAST_NOISE = 0.10
"""Of a probe, as a deviation of the logarithm: a loop over one operation keeps its caches warmer
than a training does."""
LATENCY_NOISE = 0.7
"""The same of the host's time of a block, counted in small operations."""
OPERATIONS = 400
"""Small additions that take as long as the host needs for a block, forward and backward: some
hundred operations, most of them with autograd and an allocation. The wide noise says how rough
that is."""
OVERLAP_NOISE = 0.3
"""The same of the share of an exchange that work does not hide."""
TWICE = 8 / 6
"""Bytes a parameter that the native trainer exchanges among replicas over those of the formula."""
LEAST_EXPOSED = 0.05
"""Of that share: what is hidden wholly has no logarithm."""


@dataclass(frozen=True)
class Probes:
    """What one placement of ranks measured; `case` has its rates and number of devices."""

    case: Case
    products: Sequence[tuple[float, ...]] = ()
    """m, n, k, seconds forward and backward, spread."""
    attention: Sequence[tuple[float, ...]] = ()
    """Batch, tokens, heads, key/value heads, width of a head, seconds both ways, spread."""
    copies: Sequence[tuple[float, float]] = ()
    """Bytes/s read and written, spread."""
    exchanges: Sequence[tuple[float, float, float]] = ()
    """Bytes, seconds, spread of all-reduces among all ranks."""
    latency_s: float | None = None
    """Of one small operation."""
    exposed: float | None = None
    """Share of an exchange that products beside it do not hide, 0-1."""

    @property
    def size(self) -> int:
        """How many observations that is."""
        many = len(self.products) + len(self.attention) + len(self.copies) + len(self.exchanges)
        return many + (self.latency_s is not None) + (self.exposed is not None)


Errors = Callable[[Floats], Floats]
"""From vectors of coefficients' logarithms to deviations in units of their noise: (vectors,
coefficients) to (vectors, observations)."""


def errors(probes: Sequence[Probes]) -> Errors:
    """How far the formulas are from what was measured, each softened like a step's."""
    parts = [part for placed in probes for part in _parts(placed)]

    def all_of_them(logs: Floats) -> Floats:
        c = dict(zip(NAMES, np.exp(logs).T[:, :, None], strict=True))
        error = np.concatenate([np.zeros((len(logs), 0)), *(part(c) for part in parts)], axis=1)
        return np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))

    return all_of_them


Part = Callable[[Mapping[str, float]], Floats]
"""From coefficients by name, a column of vectors each, to errors of one kind of probe:
ln(predicted / measured) / noise."""


def _parts(probes: Probes) -> list[Part]:
    parts: list[Part] = []
    if probes.products:
        parts.append(_products(probes))
    if probes.attention:
        parts.append(_attention(probes))
    if probes.copies:
        rates, spreads = np.array(probes.copies, dtype=float).T
        share = rates / probes.case.memory_bytes_per_s
        parts.append(lambda c: np.log(c["memory"] / share) / _noise(spreads))
    if probes.exchanges:
        parts.append(_exchanges(probes))
    if probes.latency_s:
        block_s = OPERATIONS * probes.latency_s
        parts.append(lambda c: np.log(c["host_torch_s"] / block_s) / LATENCY_NOISE)
    if probes.exposed is not None:
        exposed = TWICE * max(LEAST_EXPOSED, probes.exposed)
        parts.append(lambda c: np.log(c["dp_exposed"] / exposed) / OVERLAP_NOISE)
    return parts


def _products(probes: Probes) -> Part:
    m, n, k, seconds, spreads = np.array(probes.products, dtype=float).T
    x = varied(probes.case, {"devices": np.full(len(m), probes.case.devices)})

    def error(c: Mapping[str, float]) -> Floats:
        three = 3 * product_s(x, c, product_rate(x, c, narrow=False), m, n, k)
        return np.log(three / seconds) / _noise(spreads)

    return error


def _attention(probes: Probes) -> Part:
    cases = [
        replace(
            probes.case, micro_batch=batch, seq_len=tokens, heads=heads, kv_heads=kv, head_dim=width
        )
        for batch, tokens, heads, kv, width, *_ in probes.attention
    ]
    x: Cases = cases_of(cases)
    seconds, spreads = np.array(probes.attention, dtype=float)[:, 5:].T
    return lambda c: np.log(block_time(x, c).attention / seconds) / _noise(spreads)


def _exchanges(probes: Probes) -> Part:
    num_bytes, seconds, spreads = np.array(probes.exchanges, dtype=float).T
    ranks = np.full(len(num_bytes), probes.case.devices)
    x = varied(probes.case, {"devices": ranks})

    def error(c: Mapping[str, float]) -> Floats:
        expected = all_reduce_s(x, c, num_bytes, ranks, np.ones(len(ranks)))
        return np.log(expected / seconds) / _noise(spreads)

    return error


def _noise(spreads: Floats) -> Floats:
    return np.hypot(LEAST_NOISE, spreads)
