"""False alarms and detected step changes of `paceline runs history`.

    python benchmarks/step_changes.py [--quick]

Synthetic series of run medians come from tests/compare/over_time/step_series.py and go through the
package's own fit. A missed target makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.compare.over_time.step_changes import fit_series
from paceline.core.steps import FloatColumn
from paceline.files.documents import write_text
from tests.compare.over_time.step_series import (
    NOISE,
    drifting,
    found_at,
    lasting_noise,
    noise,
    stepped,
)

RESULTS = Path(__file__).parent / "results" / "step_changes.json"
FALSE_ALARMS, POWER = 0.01, 0.95
ALARMS, STEPS = "false alarms", "steps found at their place"

Trial = Callable[[int], bool]
"""The answer to one seeded series."""


def share(is_true: Callable[[int], bool], trials: int) -> float:
    """Share of seeded trials of which `found` is true."""
    return sum(map(is_true, range(trials))) / trials


def alarm(make: Callable[[int, int, float], FloatColumn], n: int, spread: float) -> Trial:
    """Return whether a step change or a drift is reported in a series without any."""

    def is_named(seed: int) -> bool:
        fit = fit_series(make(n, seed, spread))
        return bool(fit.changes) or fit.drift is not None

    return is_named


def step(ratio: float, before: int, after: int) -> Trial:
    """Return whether one step change is found at its position, within one run."""
    return lambda seed: found_at(fit_series(stepped(before, after, ratio, seed)), before)


def drift(ratio: float, n: int) -> Trial:
    """Return whether a drift is reported as such."""
    return lambda seed: fit_series(drifting(n, ratio, seed)).drift is not None


def measured(trials: int) -> dict[str, dict[str, float]]:
    """Every table of docs/dev/evidence/statistics.md: name -> row -> share of series."""
    spreads = (NOISE, 5 * NOISE)
    steps = ((1.02, 5, 5), (1.02, 15, 5), (1.02, 45, 5), (1.02, 18, 2), (1.015, 15, 15))
    return {
        ALARMS: {
            f"{n} runs, {spread:.1%} scatter": share(alarm(noise, n, spread), trials)
            for n in (6, 10, 20, 30, 50)
            for spread in spreads
        },
        "false alarms, half of the scatter lasts to the next run": {
            f"{n} runs, {spread:.1%} scatter": share(alarm(lasting_noise, n, spread), trials)
            for n in (20, 50)
            for spread in spreads
        },
        STEPS: {
            f"{ratio - 1:.1%}, {before} runs before, {after} after": share(
                step(ratio, before, after), trials
            )
            for ratio, before, after in steps
        },
        "drifts named as drifts": {
            f"3% over {n} runs": share(drift(1.03, n), trials) for n in (20, 40)
        },
    }


def main() -> int:
    """Measure, print, keep the result, and hold it against the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Fewer series; nothing is written.")
    trials = 300 if parser.parse_args().quick else 5000
    tables = measured(trials)
    for table, rows in tables.items():
        print(f"{table} ({trials} series each)")
        for row, value in rows.items():
            print(f"  {row:45} {value:7.2%}")
    # Two standard errors of the simulation itself.
    slack = 2 * (FALSE_ALARMS / trials) ** 0.5
    alarms = max(tables[ALARMS].values())
    power = next(iter(tables[STEPS].values()))
    is_met = alarms <= FALSE_ALARMS + slack and power >= POWER
    print(f"targets {'kept' if is_met else 'MISSED'}: false alarms {alarms:.2%}, power {power:.2%}")
    if trials == 5000:
        write_text(RESULTS, json.dumps({"series": trials, **tables}, indent=2) + "\n")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
