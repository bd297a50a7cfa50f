"""Published steps predicted by coefficients that never saw their group, and the figures of that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._step_fit import between_sd, fit_with_experts, model_error
from paceline.estimate.fit.interval import (
    Levels,
    bounds,
    coefficient_variance,
    model_variance,
    slopes,
)
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.published import Kind, PublishedStep
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.validation import flat_rule_step_time

MANY_ROWS = 10
"""Rows from which a group is compared with the flat rule by itself."""
GROUPS: Mapping[str, Callable[[PublishedStep], str]] = {
    "stack": lambda row: row.software,
    "device": lambda row: row.device,
    "year": lambda row: str(row.year),
    "source": lambda row: re.sub(r" \((via|stored) [^)]*\)", "", row.source),
}
"""Grouping of the rows, left out one at a time."""
SIZES = ((8, "1-8 devices"), (64, "9-64 devices"), (512, "65-512 devices"))


@dataclass(frozen=True)
class HeldOut:
    """Predictions of every row by a fit without its own group."""

    names: NDArray[np.str_]
    """Names of the rows' groups."""
    seconds: Floats
    slope: Floats
    fit_variance: Floats
    """Variance of the logarithm from the coefficients' covariance."""
    new_stack: NDArray[np.bool_]
    """Mask of rows whose software occurs in no other group."""
    new_device: NDArray[np.bool_]

    def missed(self, rows: Sequence[PublishedStep]) -> Floats:
        """Logarithms of predicted over measured."""
        return np.log(self.seconds / np.array([row.measured_s for row in rows]))


def held_out(rows: Sequence[PublishedStep], x: Cases, what: str, start: Floats) -> HeldOut:
    """Predictions by fits that never saw a row's group, and what these leave open.

    Rows with adapters are predicted, and never fitted.
    """
    columns = {kind: np.array([of(row) for row in rows]) for kind, of in GROUPS.items()}
    measured_s = np.array([row.measured_s for row in rows])
    fitted_rows = ~of_kind(rows, "lora")
    seconds, fit_variance, slope = (
        np.zeros(x.size),
        np.zeros(x.size),
        np.zeros((x.size, len(start))),
    )
    new = {kind: np.zeros(x.size, dtype=bool) for kind in ("stack", "device")}
    for name in np.unique(columns[what]):
        inside = columns[what] == name
        others = ~inside & fitted_rows
        sources, stacks = (columns[kind][others].tolist() for kind in ("source", "stack"))
        fitted = fit_with_experts(x.pick(others), measured_s[others], sources, stacks, start)
        inside_cases = x.pick(inside)
        seconds[inside] = predict(inside_cases, fitted.centre)
        slope[inside] = slopes(inside_cases, fitted.centre)
        fit_variance[inside] = coefficient_variance(slope[inside], fitted)
        for kind, where in new.items():
            where[inside] = ~np.isin(columns[kind][inside], columns[kind][others])
    return HeldOut(columns[what], seconds, slope, fit_variance, new["stack"], new["device"])


def intervals(
    rows: Sequence[PublishedStep], x: Cases, predictions: HeldOut, by: Mapping[str, HeldOut]
) -> tuple[Floats, Floats]:
    """Return 80% intervals from the errors of fits without a row's source.

    They are wider for new software and devices, by the errors on other software and devices. Errors
    on a row's own group do not count.
    """
    variance, dense = predictions.fit_variance.copy(), of_kind(rows, "dense")
    sources, missed = np.array([GROUPS["source"](row) for row in rows]), by["source"].missed(rows)
    for name in np.unique(predictions.names):
        inside = predictions.names == name
        others = dense & ~inside
        variances, names = by["source"].fit_variance[others], sources[others].tolist()
        source_sd, residual = model_error(x.pick(others), missed[others], variances, names)
        variance[inside] += model_variance(
            x.pick(inside), predictions.slope[inside], residual, Levels(source_sd)
        )
    for kind, new in (("stack", predictions.new_stack), ("device", predictions.new_device)):
        names, missed = by[kind].names, by[kind].missed(rows)
        for name in np.unique(names[new]):
            others = (names != name) & dense
            width = between_sd(
                missed[others], names[others].tolist(), by[kind].fit_variance[others]
            )
            variance = variance + width**2 * (new & (names == name))
    return bounds(predictions.seconds, np.sqrt(variance))


def of_kind(rows: Sequence[PublishedStep], kind: Kind) -> NDArray[np.bool_]:
    """Return a mask of the rows of a kind."""
    return np.array([row.kind == kind for row in rows])


def kinds_of(row: PublishedStep) -> list[str]:
    """The kinds of rows that a row counts among."""
    case = row.case
    size = next((name for most, name in SIZES if case.devices <= most), "over 512 devices")
    dtype = "4 bit" if case.four_bit else "8 bit" if case.peak_narrow else "16 bit"
    model = "experts" if case.experts > 1 else "gated" if case.gated else "plain"
    axes = [f"{name} > 1" for name in ("tp", "pp", "cp", "ep") if getattr(case, name) > 1]
    return [row.device, size, f"ZeRO {case.zero_stage:.0f}", dtype, model, *axes]


@dataclass(frozen=True)
class Evaluation:
    """Predicted and measured step times, and those of the flat rule."""

    seconds: Floats
    inside: NDArray[np.bool_]
    """Mask of rows whose measured time is in the 80% interval."""
    measured: Floats
    flat: Floats


def evaluate(
    rows: Sequence[PublishedStep], x: Cases, predictions: HeldOut, by: Mapping[str, HeldOut]
) -> dict[str, Any]:
    """The figures of all dense rows, of each source, stack, device, year and kind, and of the
    rows with experts and with adapters.
    """
    measured = np.array([row.measured_s for row in rows])
    low, high = intervals(rows, x, predictions, by)
    inside = (low <= measured) & (measured <= high)
    whole = Evaluation(predictions.seconds, inside, measured, flat_rule_step_time(x))
    dense = of_kind(rows, "dense")
    groups = {f"by_{what}": [[of(row)] for row in rows] for what, of in GROUPS.items()}
    groups["by_kind"] = [kinds_of(row) for row in rows]
    result: dict[str, Any] = {"overall": _figures(whole, dense)}
    # Of half an interval: a group whose rows share their error is all inside or all outside.
    missed = np.log(predictions.seconds / measured) / np.log(high / predictions.seconds)
    left_out = [(predictions.names == name) & dense for name in np.unique(predictions.names[dense])]
    result["groups"] = {
        "n": len(left_out),
        "coverage_80": float(np.mean([inside[group].mean() for group in left_out])),
        "mean_inside": float(np.mean([abs(missed[group].mean()) <= 1 for group in left_out])),
    }
    fitted = ~of_kind(rows, "lora")
    shares = [
        inside[(predictions.names == name) & fitted].mean()
        for name in np.unique(predictions.names[fitted])
    ]
    # With experts: groups with more than half of their rows inside.
    result["unseen"] = {"n": len(shares), "in_interval": int(np.sum(np.array(shares) > 0.5))}
    for name, mask in (("experts", x.experts > 1), ("adapters", of_kind(rows, "lora"))):
        if mask.any():
            result[name] = _figures(whole, mask)
    for what, names in groups.items():
        counts = Counter(name for of_row in names for name in of_row).most_common()
        result[what] = {
            name: _figures(whole, np.array([name in members for members in names]) & mask)
            for name, _ in counts
            for mask in (x.experts > 1 if what == "by_kind" and name == "experts" else dense,)
            if (np.array([name in members for members in names]) & mask).any()
        }
    return result


def _figures(whole: Evaluation, of: NDArray[np.bool_]) -> dict[str, Any]:
    """Errors, bias and coverage of some rows, and the flat rule's error."""
    ratio = (whole.seconds / whole.measured)[of]
    error, flat_error = np.abs(ratio - 1), np.abs(whole.flat / whole.measured - 1)[of]
    logs, inside = np.log(ratio), whole.inside[of]
    return {
        "n": len(error),
        "mape": float(error.mean()),
        "median_abs_log": float(np.median(np.abs(logs))),
        "bias_log": float(logs.mean()),
        "within_10": float((error <= 0.1).mean()),
        "within_20": float((error <= 0.2).mean()),
        "flat_mape": float(flat_error.mean()),
        "coverage_80": float(inside.mean()),
        "advantage_95": advantage(error, flat_error) if len(error) >= MANY_ROWS else None,
    }


def advantage(model: Floats, flat: Floats, seed: int = 1) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the flat rule's mean error minus the model's."""
    gain, draw = flat - model, np.random.default_rng(seed)
    means = [gain[draw.integers(len(gain), size=len(gain))].mean() for _ in range(2000)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def print_table(title: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """The figures of some groups as a markdown table."""
    print(f"\n| {title} | rows | MAPE | median abs ln | bias | flat rule's MAPE | in 80% |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in figures.items():
        print(
            f"| {name} | {row['n']} | {row['mape']:.1%} | {row['median_abs_log']:.3f} | "
            f"{row['bias_log']:+.3f} | {row['flat_mape']:.1%} | {row['coverage_80']:.0%} |"
        )
