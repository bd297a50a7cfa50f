"""Consistency check of the figures that a log prints with its own step times.

The printed figure is divided by the one computed from the step times and the settings. A known
mistake or another way of counting has a known ratio. The first candidate that explains the ratio is
reported as the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.core.flops import CONVENTIONS, flops_per_token, hardware_flops_per_token
from paceline.core.run import RunSettings
from paceline.core.units import TERA, significant
from paceline.logs.parsed_log import Disagreement
from paceline.machines.placement import find_device

TOLERANCE = 0.005
"""Relative difference that is ignored, because printed figures are rounded and averaged."""

CAUSE_TOLERANCES = (0.002, 0.01)
"""Relative tolerances of a cause; a close match is preferred to a rough one."""

UNKNOWN = "no known cause gives this ratio; check the settings that were given"

RUNNING_AVERAGE = "it is a running average that includes warm-up or skipped steps"
Candidates = Iterator[tuple[str, float]]
"""Pairs of a cause and the ratio printed / computed that it would give."""


@dataclass(frozen=True)
class PrintedFigure:
    """One printed figure with the computed one, and the peak and precision that the log used."""

    figure: str
    printed: float
    computed: float
    unit: str
    sparse_peak: float | None = None
    """Ratio of sparse to dense peak, if the figure is a share of a peak."""
    rounding: float | None = None
    """Half the last printed digit, relative to the figure; None derives it from the figure."""

    @property
    def tolerance(self) -> float:
        """Relative error that rounding alone can cause."""
        return last_digit(self.printed) if self.rounding is None else self.rounding


def find_disagreements(
    facts: RunSettings, figures: list[PrintedFigure], other_rates: Mapping[str, float] | None = None
) -> tuple[Disagreement, ...]:
    """Return the figures that differ by more than rounding, each with its likely cause.

    `other_rates` are the samples per second that a cause would print, by cause.
    """
    disagreements: list[Disagreement] = []
    for figure in figures:
        ratio = figure.printed / figure.computed
        if abs(ratio - 1) > max(TOLERANCE, figure.tolerance):
            disagreements.append(
                Disagreement(
                    figure=figure.figure,
                    printed=figure.printed,
                    computed=figure.computed,
                    unit=figure.unit,
                    ratio=ratio,
                    cause=likely_cause(facts, figure, ratio, other_rates or {}),
                )
            )
    return tuple(disagreements)


def likely_cause(
    facts: RunSettings, figure: PrintedFigure, ratio: float, other_rates: Mapping[str, float]
) -> str:
    """Return the first known cause whose ratio matches `ratio` within 0.2%, else within 1%.

    Both tolerances are widened to the figure's own rounding.
    """
    candidates = [c for c in _candidates(facts, figure, other_rates) if c[1] > 0]
    for tolerance in (max(t, figure.tolerance) for t in CAUSE_TOLERANCES):
        for cause, expected in candidates:
            if abs(ratio / expected - 1) <= tolerance:
                return cause
    return UNKNOWN


def last_digit(printed: float) -> float:
    """Return half of the last printed digit relative to the figure: 0.1 for 0.005."""
    mantissa, _, _ = f"{abs(printed):.7e}".partition("e")
    digits = mantissa.replace(".", "").rstrip("0")
    return 0.5 / float(digits) if digits else 0.0


def _candidates(
    facts: RunSettings, figure: PrintedFigure, other_rates: Mapping[str, float]
) -> Candidates:
    if figure.unit in ("FLOP/s", "fraction"):
        yield from _other_counts(facts)
    if figure.unit == "fraction":
        yield from _other_peaks(facts, figure)
    if figure.unit != "samples/s":
        yield from _other_devices(facts)
        return
    for cause, rate in other_rates.items():
        yield cause, rate / figure.computed
    yield "milliseconds were divided by as if they were seconds", 1e-3
    for cause, ratio in _other_samples(facts):
        yield cause, ratio
        for other, rate in other_rates.items():
            yield f"{cause}, and {other}", ratio * rate / figure.computed


def _other_counts(facts: RunSettings) -> Candidates:
    """Yield ratios of FLOPs counted in another convention than the computed figure."""
    x, convention = facts.flops_input, facts.flops_convention
    if x is None or convention is None:
        return
    plain = replace(x, recompute="none")
    base = flops_per_token(convention, plain)
    for name in CONVENTIONS:
        if name != convention:
            is_causal_pair = {convention, name} == {"causal", "full-attention"}
            why = " (the causal mask halves attention)" if is_causal_pair else ""
            yield (
                f"counted in {name}, not in {convention}{why}",
                flops_per_token(name, plain) / base,
            )
    if x.lora is not None:
        full = flops_per_token(convention, replace(plain, lora=None))
        yield "counted as if every weight were trained, not only the adapters", full / base
    for recompute in ("full", "selective"):
        with_recompute = replace(x, recompute=recompute)
        for name in dict.fromkeys((convention, *CONVENTIONS)):
            hardware = hardware_flops_per_token(name, with_recompute)
            yield f"{recompute} recomputation is counted as work, in {name}", hardware / base


def _other_peaks(facts: RunSettings, figure: PrintedFigure) -> Candidates:
    if figure.sparse_peak:
        yield "divided by the sparse peak, twice the dense one", 1 / figure.sparse_peak
        yield "divided by half the dense peak", figure.sparse_peak
    for cause, ratio in list(_other_counts(facts)):
        if figure.sparse_peak:
            yield f"divided by the sparse peak, and {cause}", ratio / figure.sparse_peak


def _other_devices(facts: RunSettings) -> Candidates:
    """Yield ratios of per-device to total figures, and of a batch divided once too often."""
    n = facts.num_devices
    if not n or n == 1:
        return
    dp = facts.layout.dp(n) if facts.layout else n
    yield f"the batch of one device was divided by all {n} devices", 1 / n
    yield f"it is of all {n} devices together, not of one", float(n)
    if dp not in (1, n):
        yield f"the batch of one replica was divided by all {dp} replicas", 1 / dp
        yield f"it is of {dp} replicas, not of one", float(dp)
    per_node = facts.devices_per_node
    if per_node and per_node not in (1, n):
        yield f"it is of one node of {per_node} devices", float(per_node)


def _other_samples(facts: RunSettings) -> Candidates:
    """Yield ratios of a rate of another unit than samples per second of all devices."""
    n = facts.num_devices or 1
    dp = facts.layout.dp(n) if facts.layout else n
    if n > 1:
        yield f"it is of one device, not of all {n}", 1 / n
        yield f"every device counted the whole batch, and all {n} were added", float(n)
    if dp not in (1, n):
        yield f"it is of one replica, not of all {dp}", 1 / dp
    if (per_node := facts.devices_per_node or 1) not in (1, n):
        yield f"it is of one node of {per_node} devices, not of all {n}", per_node / n
    if facts.seq_len:
        yield f"it counts tokens, {facts.seq_len:,} of each sample", float(facts.seq_len)
        if n > 1:
            yield f"it counts tokens of one device of {n}", facts.seq_len / n


def peak_doubt(flops_per_s: float | None, device: str | None, dtype: str | None) -> str | None:
    """Return why a rate in FLOP/s of one device is implausible, or None if it is plausible.

    The rate is compared with the device's dense peak of the dtype. If that is unknown, it is
    compared with the device's largest peak, which belongs to the narrowest dtype.
    """
    kind = find_device(device) if device else None
    if kind is None or not kind.peaks or not flops_per_s:
        return None
    peaks = {str(name): peak.flops_per_s for name, peak in kind.peaks.items()}
    has_peak = dtype in peaks
    name = dtype if dtype in peaks else max(peaks, key=peaks.__getitem__)
    share = flops_per_s / peaks[name]
    if share <= 1:
        return None
    rate = f"{significant(flops_per_s / TERA, 4)} TFLOP/s"
    figure = f"MFU {share:.0%}" if has_peak else f"{rate}, {share:.0%} of the dense peak in {name},"
    return (
        f"{figure} is more than a device can reach: model, device, number of devices, batch and "
        "length cannot all be right"
    )
