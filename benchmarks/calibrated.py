"""Accuracy of predicted step times on a calibrated machine, in layouts outside the calibration.

    python benchmarks/calibrated.py [--steps N] [--passes N] [--few] [--no-oversubscribed] | --refit

Calibrates this CPU with two tiny models, keeps that in a folder of its own, and then times 4-layer
trainings of both in other layouts and micro-batches, on 1 and 2 processes whose threads fill the
cores, in `--passes` rounds in turn. What needs more processes than cores is measured and told
apart. Prints a table, writes benchmarks/results/calibrated.json; a missed target makes the exit
code 1. Takes about eight minutes on two idle cores. The file keeps every probe and step: `--refit`
weights and predicts them again after a change of the formulas, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _result import FOLDER, Surroundings, keep
from _stored_calibration import from_json, short_from_json, short_to_json, to_json

from paceline.estimate.calibrate import measurement
from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.cases import (
    DEFAULTS,
    MORE_LAYERS,
    Axes,
    ShortTraining,
    recipes_of,
    short_training,
    short_trainings,
)
from paceline.estimate.calibrate.measurement import (
    Measurements,
    case_here,
    fit_calibration,
    measure,
)
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.fit.posterior import predict
from paceline.estimate.model.case import cases_of
from paceline.files.documents import write_text
from paceline.machines.probe.inventory import inventory

MAX_MEDIAN = 0.10
FEWEST_LAYOUTS = 24
BATCH = 8


def layouts(ranks: int) -> Iterator[Axes]:
    """Return the layouts to predict on `ranks` ranks; the calibration times others."""
    if ranks == 1:
        yield from ({"micro_batch": size} for size in (2, 4))
        yield from ({"micro_batch": size, "recompute": "full"} for size in (2, 8))
        return
    if ranks == 2:
        yield from ({"micro_batch": 2, "zero_stage": stage} for stage in (0, 1, 2, 3))
        yield {"micro_batch": 4, "recompute": "full"}
        yield {"micro_batch": 4, "zero_stage": 2}
        yield {"tp": 2, "micro_batch": 2}
        yield {"tp": 2, "micro_batch": 4, "recompute": "full"}
        yield {"tp": 2, "micro_batch": 4, "sequence_parallel": True}
        yield {"pp": 2, "micro_batch": 1}
        yield {"pp": 2, "micro_batch": 2}
        yield {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}
        yield {"cp": 2, "micro_batch": 2}
        yield {"cp": 2, "micro_batch": 8}
        return
    yield {"micro_batch": 2}
    yield {"micro_batch": 2, "zero_stage": 3}
    yield {"tp": 2, "micro_batch": 2}
    yield {"pp": 2, "micro_batch": 2}


def shorts_of(machine: dict[str, Any], dtype: Any, ranks: int, few: bool) -> list[ShortTraining]:
    """Four layers of both models in those layouts."""
    trainings = [
        short_training(recipe, machine, "cpu", dtype, ranks, MORE_LAYERS, axes, BATCH)
        for recipe in recipes_of((), "cpu")
        for axes in list(layouts(ranks))[: 2 if few else None]
    ]
    return [short for short in trainings if short is not None]


def measured(
    trainings: Sequence[ShortTraining], ranks: int, cores: int, passes: int
) -> list[dict[str, Any]]:
    """Seconds of a step of each, the median of its passes; every other pass goes backwards."""
    threads = max(1, cores // ranks)
    times: dict[str, list[float]] = {}
    for turn in range(passes):
        order = list(trainings) if turn % 2 == 0 else list(reversed(trainings))
        for timing in measurement.time_steps(sys.executable, order, ranks, threads):
            times.setdefault(timing.short.name, []).append(timing.seconds)
    return [
        {
            "recipe": training.recipe,
            "layout": training.layout_label,
            "ranks": ranks,
            "threads": threads,
            "step_time_s": float(np.median(times[training.name])),
            "passes_s": times[training.name],
            **short_to_json(training),
        }
        for training in trainings
    ]


def predicted(
    trainings: Sequence[ShortTraining], calibration: Calibration
) -> list[dict[str, float]]:
    """Return the seconds and the 80% interval of each."""
    x, fit = (
        cases_of([case_here(training.spec, calibration) for training in trainings]),
        calibration.evidence.fit(),
    )
    seconds = predict(x, fit.centre)
    low, high = bounds(seconds, log_sd(x, fit, calibration.evidence.residual_sd))
    columns = zip(seconds.tolist(), low.tolist(), high.tolist(), strict=True)
    return [{"predicted_s": s, "low_s": a, "high_s": b} for s, a, b in columns]


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median and mean absolute error, and how often the interval held."""
    error = [abs(row["predicted_s"] / row["step_time_s"] - 1) for row in rows]
    inside = [row["low_s"] <= row["step_time_s"] <= row["high_s"] for row in rows]
    return {
        "n": len(rows),
        "median_error": float(np.median(error)),
        "mape": float(np.mean(error)),
        "worst": max(error),
        "coverage_80": float(np.mean(inside)),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Return a Markdown table of predicted and measured times."""
    print("| model | layout | processes x threads | measured | predicted | error |")
    print("|---|---|---:|---:|---:|---:|")
    for row in rows:
        error = row["predicted_s"] / row["step_time_s"] - 1
        print(
            f"| {row['recipe']} | {row['layout']} | {row['ranks']} x {row['threads']} | "
            f"{row['step_time_s']:.3f} s | {row['predicted_s']:.3f} s | {error:+.0%} |"
        )


def evaluate(
    measurement: Measurements, rows: Sequence[dict[str, Any]], cores: int
) -> dict[str, Any]:
    """The calibration, and the measured rows with their predictions by it; prints the table."""
    calibration = fit_calibration(measurement.about, measurement.rates, measurement.trainings)
    predictions = predicted([short_from_json(row) for row in rows], calibration)
    rows = [{**row, **prediction} for row, prediction in zip(rows, predictions, strict=True)]
    fitting = [row for row in rows if row["ranks"] <= cores]
    beyond = [row for row in rows if row["ranks"] > cores]
    print_table(rows)
    result = figures(fitting)
    print(
        f"{result['n']} layouts: median error {result['median_error']:.1%}, "
        f"MAPE {result['mape']:.1%}, "
        f"{result['coverage_80']:.0%} in the 80% interval"
    )
    return {
        "calibration": calibration.model_dump(mode="json"),
        "measured": to_json(measurement),
        "rows": fitting,
        "overall": result,
        "oversubscribed": beyond,
        "oversubscribed_overall": figures(beyond) if beyond else None,
    }


def refit() -> dict[str, Any]:
    """Weight and predict the stored measurements again; SystemExit for a file without them."""
    path = FOLDER / "calibrated.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if "measured" not in content:
        raise SystemExit(f"{path.name} keeps no measurements; run without --refit first")
    measurement, cores = from_json(content["measured"]), content["machine"]["cpu"]["usable_cores"]
    result = evaluate(measurement, [*content["rows"], *content["oversubscribed"]], cores)
    write_text(path, json.dumps(content | result, indent=2) + "\n")
    return result["overall"]


def timed_here(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, time the other layouts, compare; the figures."""
    around, machine = Surroundings(), inventory()
    cores = machine["cpu"]["usable_cores"]
    calibration = measure(DEFAULTS["cpu"], "cpu", None, print)
    dtype = calibration.about.dtype
    known_names = {
        s.name
        for n in (1, 2)
        for s in short_trainings(recipes_of((), "cpu"), machine, "cpu", dtype, n)
    }
    measurement.STEPS = options.steps
    rows: list[dict[str, Any]] = []
    for ranks in (1, 2, 4):
        if ranks > cores and options.no_oversubscribed:
            continue
        some = [
            s for s in shorts_of(machine, dtype, ranks, options.few) if s.name not in known_names
        ]
        rows += measured(some, ranks, cores, options.passes)
    result = evaluate(calibration, rows, cores)
    keep("calibrated", "seconds of a step", around, **result)
    return result["overall"]


def main() -> int:
    """Calibrate, time, compare; 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="Steps of a timed training.")
    parser.add_argument("--passes", type=int, default=2, help="Passes over all layouts.")
    parser.add_argument(
        "--few",
        action="store_true",
        help="Measure two layouts per model only, to try this program.",
    )
    parser.add_argument("--no-oversubscribed", action="store_true")
    parser.add_argument(
        "--refit", action="store_true", help="Fit the stored measurements again without measuring."
    )
    options = parser.parse_args()
    result = refit() if options.refit else timed_here(options)
    missed = result["median_error"] > MAX_MEDIAN or (
        result["n"] < FEWEST_LAYOUTS and not options.few
    )
    if missed:
        print(f"missed: at most {MAX_MEDIAN:.0%} over at least {FEWEST_LAYOUTS} layouts")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
