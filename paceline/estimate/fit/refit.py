"""Coefficients of one machine: a prior updated by its own probes and step times.

Published steps are of GPUs. Their start latencies, CPU launch overhead and overlap do not apply to
processes that compute, exchange and wait on the same cores, so a CPU has a separate prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.hardware import Dtype
from paceline.core.units import pluralize
from paceline.estimate.fit.evidence import Evidence, evidence_of_fit
from paceline.estimate.fit.interval import Z80
from paceline.estimate.fit.posterior import PRIOR, Fit, posterior, predict
from paceline.estimate.model.block import IMPLEMENTATIONS, block_time, gemm_rate, gemm_seconds
from paceline.estimate.model.case import Case, Cases, Floats, cases_of, cases_with
from paceline.estimate.model.coefficients import CENTRE, NAMES, WIDTH
from paceline.estimate.model.collectives import all_reduce_s

MIN_NOISE = 0.10
"""Minimum noise of a probe, as a standard deviation of the logarithm: a loop over one operation
keeps its caches warmer than a training run does."""
LATENCY_NOISE = 0.7
"""Noise of a block's CPU launch time, counted in small operations."""
LAUNCH_OPERATIONS = 400
"""Number of small additions that take as long as the CPU launches of a block, forward and backward:
a few hundred operations, most of them with autograd and an allocation. LATENCY_NOISE is wide
because this is a rough count."""
OVERLAP_NOISE = 0.3
"""Noise of the exposed share of an exchange."""
NATIVE_BYTES_RATIO = 8 / 6
"""Bytes per parameter that the native trainer exchanges among replicas, divided by those of the
formula."""
MIN_EXPOSED = 0.05
"""Minimum exposed share: full overlap has no logarithm."""


@dataclass(frozen=True)
class Probes:
    """Probe results of one placement of ranks; `case` has its rates and number of devices."""

    case: Case
    gemms: Sequence[tuple[float, ...]] = ()
    """GEMMs: m, n, k, seconds forward and backward, spread."""
    attention: Sequence[tuple[float, ...]] = ()
    """Attention: batch, tokens, heads, key/value heads, head dimension, total seconds, spread."""
    copies: Sequence[tuple[float, float]] = ()
    """Memory copies: bytes/s read and written, spread."""
    exchanges: Sequence[tuple[float, float, float]] = ()
    """All-reduces among all ranks: bytes, seconds, spread."""
    latency_s: float | None = None
    """Seconds of one small operation."""
    exposed: float | None = None
    """Share of an exchange that concurrent GEMMs do not overlap, 0-1."""

    @property
    def size(self) -> int:
        """Number of observations."""
        many = len(self.gemms) + len(self.attention) + len(self.copies) + len(self.exchanges)
        return many + (self.latency_s is not None) + (self.exposed is not None)


Errors = Callable[[Floats], Floats]
"""Function from vectors of log coefficients to deviations in units of their noise: (vectors,
coefficients) to (vectors, observations)."""


def probe_errors(probes: Sequence[Probes]) -> Errors:
    """Return the function for the errors of the formulas on probes, softened as for steps."""
    parts = [part for each in probes for part in _parts(each)]

    def all_of_them(logs: Floats) -> Floats:
        c = dict(zip(NAMES, np.exp(logs).T[:, :, None], strict=True))
        error = np.concatenate([np.zeros((len(logs), 0)), *(part(c) for part in parts)], axis=1)
        return np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))

    return all_of_them


Part = Callable[[Mapping[str, float]], Floats]
"""Function from coefficients by name, each a column of vectors, to the errors of one kind of probe:
ln(predicted / measured) / noise."""


def _parts(probes: Probes) -> list[Part]:
    parts: list[Part] = []
    if probes.gemms:
        parts.append(_gemms(probes))
    if probes.attention:
        parts.append(_attention(probes))
    if probes.copies:
        rates, spreads = np.array(probes.copies, dtype=float).T
        share = rates / probes.case.memory_bytes_per_s
        parts.append(lambda c: np.log(c["memory"] / share) / _noise(spreads))
    if probes.exchanges:
        parts.append(_exchanges(probes))
    if probes.latency_s:
        block_s = LAUNCH_OPERATIONS * probes.latency_s
        parts.append(lambda c: np.log(c["host_torch_s"] / block_s) / LATENCY_NOISE)
    if probes.exposed is not None:
        exposed = NATIVE_BYTES_RATIO * max(MIN_EXPOSED, probes.exposed)
        parts.append(lambda c: np.log(c["dp_exposed"] / exposed) / OVERLAP_NOISE)
    return parts


def _gemms(probes: Probes) -> Part:
    m, n, k, seconds, spreads = np.array(probes.gemms, dtype=float).T
    x = cases_with(probes.case, {"devices": np.full(len(m), probes.case.devices)})

    def error(c: Mapping[str, float]) -> Floats:
        three = 3 * gemm_seconds(x, c, gemm_rate(x, c, narrow=False), m, n, k)
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
    x = cases_with(probes.case, {"devices": ranks})

    def error(c: Mapping[str, float]) -> Floats:
        expected = all_reduce_s(x, c, num_bytes, ranks, np.ones(len(ranks)))
        return np.log(expected / seconds) / _noise(spreads)

    return error


def _noise(spreads: Floats) -> Floats:
    return np.hypot(MIN_NOISE, spreads)


ON_CPU: dict[str, tuple[float, float]] = {
    # Rates are relative to a large GEMM and a large copy on as many cores.
    "gemm_cpu": (0.9, 0.3),
    "gemm_torch": (1.0, 0.05),
    "gemm_odd": (0.9, 0.2),
    "gemm_start_s": (2e-7, 1.0),  # 10 us at 100 GFLOP/s, by the formula's root of the peak
    "memory": (1.0, 0.1),
    "flash": (0.25, 0.5),
    "elementwise": (1.0, 0.6),
    "elementwise_eager": (1.0, 0.05),
    "logits": (1.0, 0.5),
    "optimizer": (1.5, 0.5),
    "host_torch_s": (1e-3, 0.8),
    "host_tp": (0.3, 0.5),
    "host_microbatch_s": (1e-3, 0.8),
    "step_torch_s": (5e-3, 0.8),
    # Processes on one machine, through the loopback device.
    "intra": (0.7, 0.4),
    "intra_start_s": (2e-4, 0.8),
    "inter": (0.7, 0.4),
    # The exchanges of a training run wait until all ranks are scheduled, unlike a loop of nothing
    # else.
    "inter_start_s": (8e-4, 0.8),
    # A core that exchanges does not compute, so nothing overlaps.
    "tp_exposed": (1.0, 0.3),
    "cp_exposed": (1.0, 0.5),
    "pp_exposed_fused": (1.0, 0.4),
    "dp_exposed": (1.3, 0.3),
    "zero3_exposed": (1.0, 0.2),
    "host_sharded_s": (2e-4, 0.8),
}
"""Prior of a CPU: median and standard deviation of the logarithm."""
BYTE_COEFFICIENTS = ("elementwise", "tp_exposed", "cp_exposed", "pp_exposed_fused")
"""Coefficients that double in fp32, because the formulas count two bytes per number."""
CPU_MODEL_SD = 0.2
"""Expected model error of a step on a CPU, as a standard deviation of the logarithm."""
TITLE = "public prior: CPUs in general"


def cpu_prior(dtype: Dtype) -> Evidence:
    """Return the coefficients for a CPU of which only the rates are known."""
    centre, width = CENTRE.copy(), WIDTH.copy()
    for name, (median, sd) in ON_CPU.items():
        at = NAMES.index(name)
        twice = 2.0 if dtype == "fp32" and name in BYTE_COEFFICIENTS else 1.0
        centre[at], width[at] = np.log(twice * median), sd
    residual: dict[str, float] = dict.fromkeys(IMPLEMENTATIONS, CPU_MODEL_SD)
    return evidence_of_fit(TITLE, Fit(centre, np.diag(width**2)), residual, 0, 0)


NOISE = 0.06
"""Expected error of a good model on a step of one machine, as a standard deviation of the
logarithm: half of that on published steps, whose conditions are not fully stated."""
PRIOR_ROWS = 4.0
"""Weight of the previous model error, in rows: a fit always matches a few rows well."""
SPREAD = 0.5
"""Additional deviation of one machine's coefficients, in units of the prior deviations: a fit to
many machines determines their mean better than each of them."""
MIN_INSEPARABLE_CORRELATION = 0.9
"""Correlation from which the data determine only the product or ratio of two coefficients."""


def refit(
    evidence: Evidence,
    x: Cases,
    measured_s: Floats,
    title: str,
    noise: float | Floats = NOISE,
    extra_residuals: Errors | None = None,
) -> Evidence:
    """Return the evidence updated by step times of one machine, with their own residual deviation.

    The prior is the medians and the covariance of `evidence`, widened if that is of other machines.
    Every row counts once, with `noise` as the standard deviation of its logarithm (a number, or one
    per row). Pass all rows in one call with the original evidence: a row that is passed twice
    counts twice. Rows without a positive time are ignored. `extra_residuals` are those of probes
    (`probe_errors`).
    """
    usable = np.isfinite(measured_s) & (measured_s > 0)
    if not usable.any():
        return evidence.model_copy(update={"title": title})
    scale = np.broadcast_to(np.asarray(noise, dtype=np.float64), measured_s.shape)[usable]
    x, measured_s = x.pick(usable), measured_s[usable]
    fit = posterior(prior_of(evidence), x, measured_s, scale, np.ones(x.size), extra_residuals)
    residual = _residual(evidence, x, measured_s, fit.centre)
    after = evidence_of_fit(title, fit, residual, evidence.rows + x.size, evidence.sources + 1)
    provenance = {"own_rows": evidence.own_rows + x.size, "provenance": "stored profile"}
    return after.model_copy(update=provenance)


def adjusted_to(evidence: Evidence, steps: Sequence[tuple[Case, float]], name: str) -> Evidence:
    """Return `refit` to measured steps (case, seconds); `name` joins the title."""
    x, measured_s = cases_of([case for case, _ in steps]), np.array([s for _, s in steps])
    title = f"{evidence.title}, adjusted to {pluralize(len(steps), 'step time')} of {name}"
    return refit(evidence, x, measured_s, title)


def prior_of(evidence: Evidence) -> Fit:
    """Return the prior of one machine's coefficients, before or after its own steps."""
    fit = evidence.fit()
    if evidence.own_rows:
        return fit
    return Fit(fit.centre, fit.covariance + SPREAD**2 * np.diag(np.diag(PRIOR.covariance)))


def undetermined_coefficients(before: Evidence, after: Evidence) -> list[str]:
    """Return the coefficients whose deviation the rows narrowed by less than a tenth."""
    old, new = (np.sqrt(np.diag(fit.covariance)) for fit in (prior_of(before), after.fit()))
    return [NAMES[i] for i in np.flatnonzero(new > 0.9 * old)]


def inseparable_coefficients(before: Evidence, after: Evidence) -> list[tuple[str, str]]:
    """Return pairs of coefficients that the rows cannot separate: they moved only together.

    Their correlation is above 0.9 now and was not before.
    """
    old, new = _correlation(prior_of(before)), _correlation(after.fit())
    return [
        (NAMES[i], NAMES[j])
        for i in range(len(NAMES))
        for j in range(i + 1, len(NAMES))
        if abs(new[i, j]) > MIN_INSEPARABLE_CORRELATION >= abs(old[i, j])
    ]


def _residual(evidence: Evidence, x: Cases, measured_s: Floats, centre: Floats) -> dict[str, float]:
    """Return the model error by implementation; one without rows keeps its previous value."""
    missed = np.log(predict(x, centre) / measured_s)
    deviations = dict(evidence.residual_sd)
    for stack, before in deviations.items():
        rows = missed[x.is_category("implementation", stack)]
        if not rows.size:
            continue
        now = float(np.quantile(np.abs(rows), 0.8)) / Z80
        variance = (PRIOR_ROWS * before**2 + rows.size * now**2) / (PRIOR_ROWS + rows.size)
        deviations[stack] = float(np.sqrt(variance))
    return deviations


def _correlation(fit: Fit) -> Floats:
    sd = np.sqrt(np.diag(fit.covariance))
    return np.asarray(fit.covariance / np.outer(sd, sd), dtype=np.float64)
