"""Accuracy of the time model on published step times, and the shipped coefficients.

    python benchmarks/estimator.py [TABLE ...] [--leave-out KIND] [--write]

TABLE is a CSV with the columns of docs/reference/tables.md; default are measured_open.csv,
measured_2026_open.csv and measured_2026b_open.csv of the reference data ($PACELINE_REFERENCE_DATA).

Every source is predicted by coefficients that were fitted without it, all sources with equal
weight; then every stack, every family of devices and every year. `--write` stores the fit to all
rows as paceline/estimate/fit/coefficients.json. A missed target makes the exit code 1.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _left_out import GROUPS, HeldOut, evaluate, held_out, of_kind, print_table
from _result import Surroundings, keep

from benchmarks._step_fit import between_sd, fit_with_experts, model_error
from paceline.estimate.fit.evidence import COEFFICIENTS_FILE, evidence_of_fit
from paceline.estimate.fit.interval import coefficient_variance, slopes
from paceline.estimate.fit.posterior import Fit
from paceline.estimate.fit.published import PublishedStep, UnsupportedRowError, read_row
from paceline.estimate.model.case import cases_of
from paceline.files.documents import write_text

TABLES = ("measured_open.csv", "measured_2026_open.csv", "measured_2026b_open.csv")
ALWAYS = ("stack", "device", "source")
"""Groups that say how wide intervals are, none of which may be worse than the flat rule."""
MAX_MAPE, MAX_MEDIAN, COVERAGE = 0.09, 0.075, (0.75, 0.85)
MAX_EXPERTS_MAPE = 0.15


def reference_tables() -> list[Path]:
    """The tables among the reference data, none where there are none."""
    folder = Path(os.environ.get("PACELINE_REFERENCE_DATA") or "none") / "references"
    return [path for name in TABLES if (path := folder / name).is_file()]


def read_tables(paths: Sequence[Path]) -> tuple[list[PublishedStep], Counter[str]]:
    """The rows that can be modelled, and how many cannot, by reason."""
    rows: list[PublishedStep] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                try:
                    rows.append(read_row(line))
                except UnsupportedRowError as reason:
                    left_out[str(reason)] += 1
    return rows, left_out


def write_evidence(
    rows: Sequence[PublishedStep],
    fitted: Fit,
    predictions: Mapping[str, HeldOut],
    unseen: Mapping[str, int],
) -> None:
    """Store the fit to all rows, with how far sources, stacks and devices lay from fits without
    them, beyond what this fit leaves open.

    `unseen` is the number of sources and of those with most rows in their interval.
    """
    x = cases_of([row.case for row in rows])
    variance, dense = coefficient_variance(slopes(x, fitted.centre), fitted), of_kind(rows, "dense")
    sources = predictions["source"].names[dense].tolist()
    missed = predictions["source"].missed(rows)[dense]
    source_sd, residual = model_error(x.pick(dense), missed, variance[dense], sources)
    measured_rows = [row for row in rows if row.kind != "lora"]
    title = f"{len(measured_rows)} published step times from {unseen['n']} sources"
    evidence = evidence_of_fit(title, fitted, residual, len(measured_rows), unseen["n"])
    unseen_sd = {"source": source_sd} | {
        "software" if kind == "stack" else kind: between_sd(
            out.missed(rows)[dense], out.names[dense].tolist(), variance[dense]
        )
        for kind, out in predictions.items()
        if kind in ("stack", "device")
    }
    whole = evidence.model_copy(
        update={
            "unseen_sd": {kind: round(width, 4) for kind, width in unseen_sd.items()},
            "software": tuple(sorted({row.software for row in measured_rows})),
            "devices": tuple(sorted({row.device for row in measured_rows})),
            "unseen_sources_in_interval": unseen["in_interval"],
        }
    )
    folder = Path(__file__).parents[1] / "paceline/estimate/fit"
    write_text(folder / COEFFICIENTS_FILE, whole.model_dump_json(indent=1) + "\n")


def missed(left_out: str, result: dict[str, Any]) -> list[str]:
    """The targets that were not met where groups of a kind were left out."""
    overall = result["overall"]
    worse = [
        name
        for group in ALWAYS
        for name, row in result[f"by_{group}"].items()
        if row["advantage_95"] is not None and row["advantage_95"][1] < 0
    ]
    checks = {
        f"MAPE at most {MAX_MAPE:.0%}": overall["mape"] <= MAX_MAPE,
        f"median |ln| at most {MAX_MEDIAN}": overall["median_abs_log"] <= MAX_MEDIAN,
        "better than the flat rule": overall["advantage_95"][0] > 0,
        f"no group worse than the flat rule beyond noise ({', '.join(worse)})": not worse,
        "80% intervals hold 75 to 85%": COVERAGE[0] <= overall["coverage_80"] <= COVERAGE[1],
    }
    if experts := result.get("experts"):
        in_range = COVERAGE[0] <= experts["coverage_80"] <= COVERAGE[1]
        checks |= {
            f"experts: MAPE at most {MAX_EXPERTS_MAPE:.0%}": experts["mape"] <= MAX_EXPERTS_MAPE,
            "experts: 80% intervals hold 75 to 85%": in_range,
        }
    return [f"{left_out} left out: {what}" for what, is_met in checks.items() if not is_met]


def main() -> int:
    """Print the tables, keep the result; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="*")
    parser.add_argument("--write", action="store_true", help="Store the fit to all rows.")
    parser.add_argument(
        "--leave-out", choices=(*GROUPS, "none"), help="Leave out one kind of group only."
    )
    options = parser.parse_args()
    tables = options.table or reference_tables()
    if not tables:
        print("no table: name one, or set PACELINE_REFERENCE_DATA")
        return 0
    around = Surroundings()
    every, left_out = read_tables(tables)
    rows = [row for row in every if row.kind in ("dense", "moe")]
    x, sources = cases_of([row.case for row in rows]), [row.source for row in rows]
    measured = np.array([row.measured_s for row in rows])
    fitted = fit_with_experts(x, measured, sources, [row.software for row in rows])
    rows += [row for row in every if row.kind == "lora"]
    x = cases_of([row.case for row in rows])
    predictions, results = dict[str, HeldOut](), dict[str, Any]()
    for what in GROUPS:
        if options.leave_out in (None, what) or what in ALWAYS:
            predictions[what] = held_out(rows, x, what, fitted.centre)
    for what in predictions:
        results[what] = evaluate(rows, x, predictions[what], predictions)
        whole = {
            name: results[what][name]
            for name in ("overall", "experts", "adapters")
            if name in results[what]
        }
        print_table(f"{what} left out", whole)
        groups = results[what]["groups"]
        print(
            f"\n{groups['n']} groups of equal weight: {groups['coverage_80']:.0%} in 80%, "
            f"the mean of {groups['mean_inside']:.0%}; with experts, most rows of "
            f"{results[what]['unseen']['in_interval']} of {results[what]['unseen']['n']}"
        )
        print_table(what, results[what][f"by_{what}"])
        print_table(f"kind, {what} left out", results[what]["by_kind"])
    if options.write:
        write_evidence(rows, fitted, predictions, results["source"]["unseen"])
    failed = [line for what, result in results.items() for line in missed(what, result)]
    if not options.leave_out:
        kinds = Counter(row.kind for row in every)
        keep(
            "estimator",
            "seconds of a step",
            around,
            table=", ".join(table.name for table in tables),
            modelled=dict(kinds),
            unmodelled=dict(left_out),
            left_out=results,
        )
    for what in failed:
        print(f"missed: {what}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
