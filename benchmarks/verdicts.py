"""Accuracy of the reported step time and of `paceline compare`'s verdicts on known truth.

    python benchmarks/verdicts.py [--quick]

Synthetic runs come from tests/core/series.py and go through the package's own window and
comparison. Every target that is missed makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.files.documents import write_text
from tests.core.series import (
    RULES,
    SCENARIOS,
    Machine,
    Trial,
    Workload,
    errors,
    rmse,
    unless_drifting,
)

RESULTS = Path(__file__).parent / "results" / "verdicts.json"
SEED = 20_261_120
LARGEST_RMSE = 0.0025

REAL = Machine(workload=Workload(spike_rate=0.03))
"""Runs of 100 steps with warm-up and 3% spikes, 0.4% apart from run to run."""
STEADY, SHAKY = Machine(between_runs=0.002), Machine(between_runs=0.008)
HEAVY = Machine(heavy_tails=True)

TRIALS: dict[str, tuple[Trial, str, float, float]] = {
    "false alarms, 3 against 3": (Trial(3, 3, 0.0, REAL, REAL), "slower", 0.0, 0.01),
    "slower by 2%, 3 against 3": (Trial(3, 3, 0.02, REAL, REAL), "slower", 0.95, 1.0),
    "identical, 5 against 5": (Trial(5, 5, 0.0, REAL, REAL), "same", 0.90, 1.0),
    "slower by 2%, 5 against 5": (Trial(5, 5, 0.02, REAL, REAL), "slower", 0.95, 1.0),
    "identical, 3 against 3": (Trial(3, 3), "same", 0.0, 1.0),
    "slower by 0.5%, 3 against 3": (Trial(3, 3, 0.005), "slower", 0.0, 1.0),
    "slower by 1.0% (the margin), 3 against 3": (Trial(3, 3, 0.01), "same", 0.0, 0.055),
    "slower by 1.5%, 3 against 3": (Trial(3, 3, 0.015), "slower", 0.0, 1.0),
    "slower by 3%, 3 against 3": (Trial(3, 3, 0.03), "slower", 0.95, 1.0),
    "slower by 0.5%, 5 against 5": (Trial(5, 5, 0.005), "slower", 0.0, 1.0),
    "slower by 1.0% (the margin), 5 against 5": (Trial(5, 5, 0.01), "same", 0.0, 0.055),
    "slower by 1.5%, 5 against 5": (Trial(5, 5, 0.015), "slower", 0.0, 1.0),
    "identical, 3 against 5": (Trial(3, 5), "slower", 0.0, 0.01),
    "slower by 2%, 3 against 5": (Trial(3, 5, 0.02), "slower", 0.95, 1.0),
    "identical, 0.2% against 0.8%, 3 each": (
        Trial(3, 3, 0.0, STEADY, SHAKY),
        "slower",
        0.0,
        0.03,
    ),
    "identical, 0.8% and 0.8%, 3 each": (Trial(3, 3, 0.0, SHAKY, SHAKY), "slower", 0.0, 0.03),
    "slower by 2%, 0.8% and 0.8%, 3 each": (Trial(3, 3, 0.02, SHAKY, SHAKY), "slower", 0.0, 1.0),
    "identical, heavy tails, 3 against 3": (Trial(3, 3, 0.0, HEAVY, HEAVY), "slower", 0.0, 0.01),
    "slower by 2%, heavy tails, 3 against 3": (
        Trial(3, 3, 0.02, HEAVY, HEAVY),
        "slower",
        0.9,
        1.0,
    ),
    "identical, 1 against 1": (Trial(1, 1), "slower", 0.0, 1.0),
    "slower by 2%, 1 against 1": (Trial(1, 1, 0.02), "slower", 0.0, 1.0),
    "identical, 3 and 3, with the requested repeats": (
        Trial(3, 3, follow_up=True),
        "slower",
        0.0,
        0.01,
    ),
    "slower by 0.5%, 3 and 3, with the requested repeats": (
        Trial(3, 3, 0.005, follow_up=True),
        "undecided",
        0.0,
        0.25,
    ),
    "slower by 2%, 3 and 3, with the requested repeats": (
        Trial(3, 3, 0.02, follow_up=True),
        "slower",
        0.99,
        1.0,
    ),
}
"""Trial, the answer that has a limit, and between which rates it must lie."""


def step_times(n: int) -> dict[str, dict[str, float | None]]:
    """RMSE of the reported step time by scenario and rule."""
    table: dict[str, dict[str, float | None]] = {}
    for scenario, workload in SCENARIOS.items():
        rmse_of = {
            rule: rmse(errors(workload, of, np.random.default_rng(SEED), n))
            for rule, of in RULES.items()
        }
        table[scenario] = {
            rule: value if np.isfinite(value) else None for rule, value in rmse_of.items()
        }
        rng = np.random.default_rng(SEED)
        table[scenario]["called drifting"] = float(
            np.mean(np.isnan(errors(workload, unless_drifting, rng, n)))
        )
    return table


def verdicts(n: int) -> dict[str, dict[str, object]]:
    """Rates of each answer by trial."""
    table: dict[str, dict[str, object]] = {}
    for name, (trial, word, least, most) in TRIALS.items():
        rates = trial.rates(np.random.default_rng(SEED), n)
        target = {"answer": word, "least": least, "most": most}
        table[name] = {**rates, "wanted": target, "met": least <= rates[word] <= most}
    return table


def missed(result: dict[str, dict[str, dict[str, object]]]) -> list[str]:
    """The targets that were not met."""
    ours = next(iter(RULES))
    late = [
        f"{scenario}: RMSE {float(str(figures[ours])):.3%}"
        for scenario, figures in result["step_time_rmse"].items()
        if SCENARIOS[scenario].steps >= 100 and float(str(figures[ours])) > LARGEST_RMSE
    ]
    return late + [name for name, figures in result["verdicts"].items() if not figures["met"]]


def show(result: dict[str, dict[str, dict[str, object]]]) -> None:
    """Print both tables in per cent."""
    for title, table in result.items():
        columns = [name for name in next(iter(table.values())) if name not in ("wanted", "met")]
        print(f"\n{title}, %\n{'':46}" + "  ".join(columns))
        for name, figures in table.items():
            cells = [
                "-" if figures[c] is None else f"{100 * float(str(figures[c])):.2f}"
                for c in columns
            ]
            row = "  ".join(cell.rjust(len(c)) for cell, c in zip(cells, columns, strict=True))
            print(f"{name:46}{row}")


def main() -> int:
    """Print and store both tables; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="A tenth of the repetitions; nothing is stored."
    )
    quick = parser.parse_args().quick
    begin = time.perf_counter()
    n_series, n_trials = (300, 1000) if quick else (3000, 10_000)
    result = {"step_time_rmse": step_times(n_series), "verdicts": verdicts(n_trials)}
    show(result)  # type: ignore[arg-type]
    faults = missed(result)  # type: ignore[arg-type]
    elapsed_s = time.perf_counter() - begin
    print(f"\n{n_series} series a scenario, {n_trials} comparisons a trial, {elapsed_s:.0f} s")
    print("missed: " + "; ".join(faults) if faults else "every target is met")
    if not quick:
        content = {
            "benchmark": "verdicts",
            "seed": SEED,
            "largest_rmse": LARGEST_RMSE,
            "series": n_series,
            "comparisons": n_trials,
            **result,
        }
        write_text(RESULTS, json.dumps(content, indent=2) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
