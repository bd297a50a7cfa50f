"""Published steps predicted by coefficients that never saw their group, and the figures of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.estimate.fit.baseline import flat_rule_s
from paceline.estimate.fit.interval import bounds, log_sd, residual_sd
from paceline.estimate.fit.posterior import fit, predict
from paceline.estimate.fit.published import PublishedStep
from paceline.estimate.model.case import Cases, Floats

OUTSIDE = 1.15
MANY_ROWS = 10
"""Rows from which a group is compared with the flat rule by itself."""
GROUPS: Mapping[str, Callable[[PublishedStep], str]] = {
    "source": lambda row: row.source,
    "stack": lambda row: row.software,
    "device": lambda row: row.device,
    "year": lambda row: str(row.year),
}
"""What is left out at a time."""
SIZES = ((8, "1-8 devices"), (64, "9-64 devices"), (512, "65-512 devices"))


@dataclass(frozen=True)
class Held:
    """Every row predicted without its own group."""

    seconds: Floats
    low: Floats
    high: Floats


def held_out(rows: Sequence[PublishedStep], x: Cases, groups: Sequence[str], start: Floats) -> Held:
    """Predictions and 80 % intervals by fits that never saw a row's group."""
    names, sources = np.array(groups), np.array([row.source for row in rows])
    measured_s = np.array([row.measured_s for row in rows])
    held = Held(*(np.zeros(x.size) for _ in range(3)))
    for name in np.unique(names):
        inside = names == name
        rest, rest_s, rest_names = x.pick(~inside), measured_s[~inside], sources[~inside].tolist()
        fitted = fit(rest, rest_s, rest_names, start)
        residual = residual_sd(rest, rest_s, rest_names, fitted.centre)
        widened = {stack: OUTSIDE * sd for stack, sd in residual.items()}
        seconds = predict(x.pick(inside), fitted.centre)
        held.seconds[inside] = seconds
        held.low[inside], held.high[inside] = bounds(
            seconds, log_sd(x.pick(inside), fitted, widened)
        )
    return held


def kinds_of(row: PublishedStep) -> list[str]:
    """The kinds of rows that a row counts among."""
    case = row.case
    size = next((name for most, name in SIZES if case.devices <= most), "over 512 devices")
    dtype = "4 bit" if case.four_bit else "8 bit" if case.peak_narrow else "16 bit"
    model = "experts" if case.experts > 1 else "gated" if case.gated else "plain"
    axes = [f"{name} > 1" for name in ("tp", "pp", "cp", "ep") if getattr(case, name) > 1]
    return [row.device, size, f"ZeRO {case.zero_stage:.0f}", dtype, model, *axes]


def judged(rows: Sequence[PublishedStep], x: Cases, held: Held) -> dict[str, Any]:
    """The figures of all rows, of each source, stack, device, year and kind."""
    measured, flat = np.array([row.measured_s for row in rows]), flat_rule_s(x)
    groups = {f"by_{what}": [[of(row)] for row in rows] for what, of in GROUPS.items()}
    groups["by_kind"] = [kinds_of(row) for row in rows]
    result: dict[str, Any] = {"overall": _figures(held, measured, flat, np.full(x.size, True))}
    for what, names in groups.items():
        counts = Counter(name for of_row in names for name in of_row).most_common()
        result[what] = {
            name: _figures(held, measured, flat, np.array([name in own for own in names]))
            for name, _ in counts
        }
    return result


def _figures(held: Held, measured: Floats, flat: Floats, of: NDArray[np.bool_]) -> dict[str, Any]:
    """Errors, bias and coverage of some rows, and the flat rule's error."""
    error, flat_error = np.abs(held.seconds / measured - 1)[of], np.abs(flat / measured - 1)[of]
    logs = np.log(held.seconds / measured)[of]
    inside = ((held.low <= measured) & (measured <= held.high))[of]
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
    """95 % bootstrap interval of the mean absolute error of the flat rule minus the model's."""
    gain, draw = flat - model, np.random.default_rng(seed)
    means = [gain[draw.integers(len(gain), size=len(gain))].mean() for _ in range(2000)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def print_table(title: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """The figures of some groups as a markdown table."""
    print(f"\n| {title} | rows | MAPE | median abs ln | bias | flat rule's MAPE | in 80 % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in figures.items():
        print(
            f"| {name} | {row['n']} | {row['mape']:.1%} | {row['median_abs_log']:.3f} | "
            f"{row['bias_log']:+.3f} | {row['flat_mape']:.1%} | {row['coverage_80']:.0%} |"
        )
