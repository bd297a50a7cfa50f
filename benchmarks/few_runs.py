"""Error rates of the verdicts on few runs, and on sides of different days, with known truth.

    python benchmarks/few_runs.py [--quick]

Each series goes through `judge`, as the runs of `paceline compare` do. The exit code is 1 if a rate
of false alarms is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.compare.few_runs import few_runs_rule
from paceline.compare.metric_comparison import compare_values
from paceline.compare.sides import ComparisonSide, Pair
from paceline.files.documents import write_text
from tests.compare.members import FACTS, hour, member

RESULTS = Path(__file__).parent / "results" / "few_runs.json"
SEED = 20_261_129
DEVICES = {"data-center GPU": "H100-SXM", "PCIe card or CPU": "cpu"}
VARIATIONS = (0.003, 0.008, 0.015, 0.03)
CHANGES = (0.0, 0.05, 0.08, 0.2)
MARGIN = 0.01
ORDERS = {1: "AB", 2: "ABBA", 3: "ABBAAB", 5: "ABBAABBAAB"}
DAYS = ("AAA BBB", "AAAAA BBBBB", "AAA BBB A")
DAY_VARIATIONS = ((0.005, 0.001), (0.005, 0.003), (0.01, 0.003), (0.02, 0.005))


@dataclass(frozen=True)
class Kind:
    """One kind of comparison: letters of runs in time, a blank between days."""

    device: str
    order: str
    within: float
    days: float = 0.0
    hosts: float = 0.0
    """Standard deviation between the hosts of A and B; 0 for one host."""

    @property
    def expected(self) -> float:
        """Largest share of false alarms that the documentation states for this kind."""
        is_usual = self.within <= (0.008 if DEVICES[self.device] != "cpu" else 0.015)
        return 0.05 if is_usual and self.days <= 0.01 and self.hosts <= 0.01 else 1.0


def kinds() -> Iterator[Kind]:
    """Every kind of the tables."""
    for device in DEVICES:
        for order in ORDERS.values():
            for within in VARIATIONS:
                yield Kind(device, order, within)
    for order in DAYS:
        for days, within in DAY_VARIATIONS:
            yield Kind("data-center GPU", order, within, days)
    for hosts in (0.003, 0.008, 0.02):
        yield Kind("data-center GPU", ORDERS[3], 0.003, 0.0, hosts)


def rates(kind: Kind, change: float, n: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the share of each verdict on `n` comparisons, B slower than A by `change`."""
    letters = [(letter, day) for day, runs in enumerate(kind.order.split()) for letter in runs]
    facts = FACTS.model_copy(update={"device": DEVICES[kind.device]})
    sides = [
        ComparisonSide(
            side,
            tuple(
                member(
                    f"{side}{at}",
                    facts=facts,
                    created=hour(24 * day + at),
                    hosts=(side if kind.hosts else "x",),
                )
                for at, (letter, day) in enumerate(letters)
                if letter == side
            ),
        )
        for side in "AB"
    ]
    rule = few_runs_rule(Pair(*sides), None)
    is_b = np.array([letter == "B" for letter, _ in letters])
    of_day = np.array([day for _, day in letters])
    counts: Counter[str] = Counter()
    for _ in range(n):
        logs = rng.normal(0, kind.within, len(letters)) + is_b * np.log1p(change)
        logs += rng.normal(0, kind.days, of_day[-1] + 1)[of_day] if kind.days else 0.0
        logs += rng.normal(0, kind.hosts * 2**0.5) * is_b if kind.hosts else 0.0
        values = np.exp(logs)
        counts[compare_values(values[~is_b], values[is_b], MARGIN, rule=rule).change] += 1
    return {word: 100 * count / n for word, count in sorted(counts.items())}


def table(trials: int) -> list[dict[str, object]]:
    """Return one row per kind and true change."""
    rows: list[dict[str, object]] = []
    for kind in kinds():
        rng = np.random.default_rng(SEED)
        for change in CHANGES:
            n = trials if change == 0 else max(50, trials // 5)
            shares = rates(kind, change, n, rng)
            row: dict[str, object] = {**asdict(kind), "change": change, "n": n, **shares}
            if change == 0:
                false = shares.get("higher", 0.0) + shares.get("lower", 0.0)
                error = 100 * (kind.expected * (1 - kind.expected) / n) ** 0.5
                row |= {"false": false, "met": false <= 100 * kind.expected + 3 * error}
            rows.append(row)
    return rows


def main() -> int:
    """Write the table; 1 if a rate of false alarms is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials, not written")
    quick = parser.parse_args().quick
    rows = table(100 if quick else 1000)
    for row in rows:
        print(json.dumps(row))
    if not quick:
        write_text(RESULTS, json.dumps({"margin": MARGIN, "rows": rows}, indent=1) + "\n")
    return int(not all(row.get("met", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
