"""Error rates of the verdicts on few runs, and on sides of different days, with known truth.

    python benchmarks/few_runs.py [--quick]          (about three minutes of one core)

Each series goes through the rule of `judge`, as the runs of `paceline compare` do. The exit code is
1 if a rate of false alarms is above its bound, or if more runs find a difference less often. Writes
the tables of docs/dev/evidence/statistics.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.compare import metric_comparison
from paceline.compare.few_runs import few_runs_rule
from paceline.compare.metric_comparison import compare_values
from paceline.compare.sides import ComparisonSide, Pair
from paceline.files.documents import write_text
from tests.compare.members import FACTS, hour, member

# The plan of further repeats takes most of the time, and only the verdicts count here.
metric_comparison.further_repeats = lambda *_: 1

RESULTS = Path(__file__).parent / "results" / "few_runs.json"
DOCS = Path(__file__).parents[1] / "docs" / "dev" / "evidence" / "statistics.md"
MARKS = ("<!-- from benchmarks/few_runs.py -->\n", "<!-- end of few runs -->")
SEED = 20_261_129
DEVICES = {"data-center GPU": "H100-SXM", "PCIe card or CPU": "cpu"}
VARIATIONS = (0.003, 0.008, 0.015, 0.03)
CHANGES = (0.0, 0.02, 0.05, 0.08, 0.2)
MARGIN = 0.01
ORDERS = {
    "in turns": ("AB", "ABBA", "ABBAAB", "ABBAABBAAB"),
    "in blocks": ("AB", "AABB", "AAABBB", "AAAAABBBBB"),
    "a day per side": ("A B", "AA BB", "AAA BBB", "AAAAA BBBBB"),
    "unknown order": ("A B", "AA BB", "AAA BBB", "AAAAA BBBBB"),
}
"""Runs of each side in time, by the name of their order."""
LATE = "one late run"
DAY_VARIATIONS = ((0.005, 0.001), (0.005, 0.003), (0.01, 0.003), (0.02, 0.005))
DAY_DEVIATION = 0.005
TABLES = (("data-center GPU", 0.003), ("data-center GPU", 0.008), ("PCIe card or CPU", 0.008))
"""Class and run-to-run variation of the tables in the documentation."""
ERRORS = 3.0
"""Standard errors by which more runs may find less, by the luck of the simulation."""


@dataclass(frozen=True)
class Kind:
    """One kind of comparison: letters of runs in time, a blank between days."""

    device: str
    name: str
    """Name of the order; the dates of an unknown one are not given."""
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
    gpu = "data-center GPU"
    for device in DEVICES:
        for within in VARIATIONS:
            for name, orders in ORDERS.items():
                for order in orders:
                    yield Kind(device, name, order, within, DAY_DEVIATION if " " in order else 0.0)
    for days, within in DAY_VARIATIONS:
        for order in ORDERS["a day per side"][2:]:
            yield Kind(gpu, "a day per side", order, within, days)
        yield Kind(gpu, LATE, "AAA BBB A", within, days)
    for hosts in (0.003, 0.008, 0.02):
        yield Kind(gpu, "a host per side", ORDERS["in turns"][2], 0.003, 0.0, hosts)


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
                    created=None if kind.name == "unknown order" else hour(24 * day + at),
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


def rows_of(trials: int) -> list[dict[str, Any]]:
    """Return one row per kind and true change."""
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(kinds()):
        rng = np.random.default_rng(SEED)
        for change in CHANGES:
            n = trials if change == 0 else max(50, trials // 3)
            shares = rates(kind, change, n, rng)
            row: dict[str, Any] = {**asdict(kind), "change": change, "n": n, **shares}
            if change == 0:
                false = shares.get("higher", 0.0) + shares.get("lower", 0.0)
                error = 100 * (kind.expected * (1 - kind.expected) / n) ** 0.5
                row |= {"false": false, "met": false <= 100 * kind.expected + 3 * error}
            rows.append(row)
    return rows


def weaker_verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the kinds in which more runs find a difference less often, beyond the luck."""
    faults: list[str] = []
    for device in DEVICES:
        usual = 0.008 if device == "data-center GPU" else 0.015
        for within, name, change in product(VARIATIONS, ORDERS, CHANGES[1:]):
            if within > usual:
                continue
            cells = [_cell(rows, device, within, name, order, change) for order in ORDERS[name]]
            for words in (("higher",), ("higher", "likely higher")):
                shares = [sum(cell.get(word, 0.0) for word in words) / 100 for cell in cells]
                for fewer, more in pairwise(shares):
                    spread = fewer * (1 - fewer) + more * (1 - more)
                    if fewer - more > 0.01 + ERRORS * (spread / cells[0]["n"]) ** 0.5:
                        faults.append(
                            f"{device}, {name}, {within:.1%}, {change:.0%}: {words[-1]} in "
                            + ", ".join(f"{share:.0%}" for share in shares)
                        )
    return faults


def _cell(
    rows: Sequence[dict[str, Any]], device: str, within: float, name: str, order: str, change: float
) -> dict[str, Any]:
    return next(
        row
        for row in rows
        if (row["device"], row["within"], row["name"], row["order"], row["change"], row["hosts"])
        == (device, within, name, order, change, 0.0)
    )


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of the documentation: proven and likely, in percent."""
    parts: list[str] = []
    for device, within in TABLES:
        heads = " | ".join(f"{100 * change:g}%" for change in CHANGES[1:])
        parts += [
            f"| {device}, runs vary by {100 * within:g}% | runs per side | equal: false, likely | "
            f"{heads} |",
            "|---|---:|" + "---:|" * len(CHANGES),
        ]
        for name, orders in ORDERS.items():
            for order in orders:
                cells = [_cell(rows, device, within, name, order, change) for change in CHANGES]
                equal = cells[0]
                likely = equal.get("likely higher", 0.0) + equal.get("likely lower", 0.0)
                shares_text = " | ".join(
                    f"{cell.get('higher', 0.0):.0f} + {cell.get('likely higher', 0.0):.0f}"
                    for cell in cells[1:]
                )
                parts.append(
                    f"| {name} | {order.count('A')} | {equal['false']:.1f}, {likely:.1f} | "
                    f"{shares_text} |"
                )
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    """Write the tables; 1 if a rate of false alarms is above its bound, or more runs find less."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials, not written")
    quick = parser.parse_args().quick
    rows = rows_of(100 if quick else 600)
    missed = [row for row in rows if not row.get("met", True)]
    faults = weaker_verdicts(rows)
    print(tables(rows))
    for row in missed:
        print("above its bound:", json.dumps(row))
    for fault in faults:
        print("more runs find less:", fault)
    if not quick:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        write_text(RESULTS, f'{{"margin": {MARGIN}, "rows": [\n{lines}\n]}}\n')
        before, tail = DOCS.read_text(encoding="utf-8").split(MARKS[0])
        after = MARKS[1] + tail.partition(MARKS[1])[2]
        write_text(DOCS, before + MARKS[0] + tables(rows) + after)
    return int(bool(missed or faults))


if __name__ == "__main__":
    sys.exit(main())
