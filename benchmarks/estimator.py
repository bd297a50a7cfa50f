"""How well the time model predicts published step times, and the coefficients that are shipped.

    python benchmarks/estimator.py [TABLE] [--write]

TABLE is a CSV with the columns of docs/estimate.md; default measured_open.csv of the reference data
($PACELINE_REFERENCE_DATA).

Every source is predicted by coefficients that were fitted without it, all sources with equal
weight. `--write` stores the fit to all dense rows as paceline/estimate/fit/coefficients.json. A
missed target makes the exit code 1.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _result import Surroundings, keep

from paceline.estimate.fit.baseline import flat_rule_s
from paceline.estimate.fit.evidence import OUTSIDE, SHIPPED, evidence_of_fit
from paceline.estimate.fit.interval import bounds, log_sd, residual_sd
from paceline.estimate.fit.posterior import fit, predict
from paceline.estimate.fit.published import PublishedStep, UnmodelledError, read_row
from paceline.estimate.model.case import Cases, Floats, cases_of
from paceline.files.documents import write_text

MOST_MAPE, MOST_MEDIAN, COVERAGE = 0.12, 0.12, (0.70, 0.90)
MANY_ROWS = 10
"""Rows from which a source is compared with the flat rule by itself."""


@dataclass(frozen=True)
class Held:
    """Every row predicted without its own source."""

    seconds: Floats
    low: Floats
    high: Floats


def reference_table() -> Path | None:
    """The table among the reference data, None when there are none."""
    folder = os.environ.get("PACELINE_REFERENCE_DATA")
    path = Path(folder) / "references" / "measured_open.csv" if folder else None
    return path if path and path.is_file() else None


def read_table(path: Path) -> tuple[list[PublishedStep], Counter[str]]:
    """The rows that can be modelled, and how many cannot, by reason."""
    rows: list[PublishedStep] = []
    left_out: Counter[str] = Counter()
    with path.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            try:
                rows.append(read_row(line))
            except UnmodelledError as reason:
                left_out[str(reason)] += 1
    return rows, left_out


def held_out(x: Cases, measured_s: Floats, sources: list[str]) -> Held:
    """Predictions and 80 % intervals by fits that never saw a row's source."""
    names = np.array(sources)
    held = Held(*(np.zeros(x.size) for _ in range(3)))
    for name in np.unique(names):
        inside = names == name
        rest, rest_s, rest_names = x.pick(~inside), measured_s[~inside], names[~inside].tolist()
        fitted = fit(rest, rest_s, rest_names)
        residual = residual_sd(rest, rest_s, rest_names, fitted.centre)
        widened = {stack: OUTSIDE * sd for stack, sd in residual.items()}
        seconds = predict(x.pick(inside), fitted.centre)
        held.seconds[inside] = seconds
        held.low[inside], held.high[inside] = bounds(
            seconds, log_sd(x.pick(inside), fitted, widened)
        )
    return held


def figures(predicted: Floats, measured: Floats) -> dict[str, float]:
    """MAPE, median |ln|, bias and shares within 10 and 20 %."""
    error, logs = np.abs(predicted / measured - 1), np.log(predicted / measured)
    return {
        "n": len(error),
        "mape": float(error.mean()),
        "median_abs_log": float(np.median(np.abs(logs))),
        "bias_log": float(logs.mean()),
        "within_10": float((error <= 0.1).mean()),
        "within_20": float((error <= 0.2).mean()),
    }


def advantage(model: Floats, flat: Floats, seed: int = 1) -> tuple[float, float]:
    """95 % bootstrap interval of the mean absolute error of the flat rule minus the model's."""
    gain, draw = flat - model, np.random.default_rng(seed)
    means = [gain[draw.integers(len(gain), size=len(gain))].mean() for _ in range(2000)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def judged(rows: list[PublishedStep], x: Cases, measured: Floats, held: Held) -> dict[str, Any]:
    """The figures of all rows and of each source, beside the flat rule's."""
    flat, sources = flat_rule_s(x), np.array([row.source for row in rows])
    error, flat_error = np.abs(held.seconds / measured - 1), np.abs(flat / measured - 1)
    inside = (held.low <= measured) & (measured <= held.high)
    by_source: dict[str, Any] = {}
    for name, count in Counter(sources.tolist()).most_common():
        of_source = sources == name
        by_source[name] = {
            **figures(held.seconds[of_source], measured[of_source]),
            "flat_mape": float(flat_error[of_source].mean()),
            "coverage_80": float(inside[of_source].mean()),
            "advantage_95": advantage(error[of_source], flat_error[of_source])
            if count >= MANY_ROWS
            else None,
        }
    overall = {
        **figures(held.seconds, measured),
        "flat_mape": float(flat_error.mean()),
        "coverage_80": float(inside.mean()),
        "advantage_95": advantage(error, flat_error),
    }
    return {"overall": overall, "by_source": by_source}


def print_table(result: dict[str, Any]) -> None:
    """The figures as a markdown table."""
    print("| source | rows | MAPE | median abs ln | flat rule's MAPE | 80 % interval holds |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in [("all", result["overall"]), *result["by_source"].items()]:
        print(
            f"| {name} | {row['n']} | {row['mape']:.1%} | {row['median_abs_log']:.3f} | "
            f"{row['flat_mape']:.1%} | {row['coverage_80']:.0%} |"
        )


def missed(result: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    overall = result["overall"]
    worse = [
        name
        for name, row in result["by_source"].items()
        if row["advantage_95"] is not None and row["advantage_95"][1] < 0
    ]
    checks = {
        f"MAPE at most {MOST_MAPE:.0%}": overall["mape"] <= MOST_MAPE,
        f"median |ln| at most {MOST_MEDIAN}": overall["median_abs_log"] <= MOST_MEDIAN,
        "better than the flat rule": overall["advantage_95"][0] > 0,
        f"no source worse than the flat rule beyond noise ({', '.join(worse)})": not worse,
        "80 % intervals hold 70 to 90 %": COVERAGE[0] <= overall["coverage_80"] <= COVERAGE[1],
    }
    return [what for what, met in checks.items() if not met]


def main() -> int:
    """Print the table, keep the result; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true", help="store the fit to all dense rows")
    options = parser.parse_args()
    table = options.table or reference_table()
    if table is None:
        print("no table: name one, or set PACELINE_REFERENCE_DATA")
        return 0
    around = Surroundings()
    every, left_out = read_table(table)
    rows = [row for row in every if row.kind == "dense"]
    x, sources = cases_of([row.case for row in rows]), [row.source for row in rows]
    measured = np.array([row.measured_s for row in rows])
    result = judged(rows, x, measured, held_out(x, measured, sources))
    print_table(result)
    kinds = Counter(row.kind for row in every)
    keep(
        "estimator",
        "seconds of a step",
        around,
        table=table.name,
        modelled=dict(kinds),
        unmodelled=dict(left_out),
        **result,
    )
    if options.write:
        fitted = fit(x, measured, sources)
        residual = residual_sd(x, measured, sources, fitted.centre)
        title = f"{len(rows)} published step times of dense models from {len(set(sources))} sources"
        evidence = evidence_of_fit(title, fitted, residual, len(rows), len(set(sources)))
        folder = Path(__file__).parents[1] / "paceline/estimate/fit"
        write_text(folder / SHIPPED, evidence.model_dump_json(indent=1) + "\n")
    for what in missed(result):
        print(f"missed: {what}")
    return bool(missed(result))


if __name__ == "__main__":
    sys.exit(main())
