"""Rates of flagged slow and healthy nodes, and the coverage of the factors' intervals.

    python benchmarks/blame_power.py [--quick]        (about ten minutes of one core)

Synthetic clusters go through the whole procedure: every size, the second pass of flagged and
suspected nodes, the analysis. What is flagged without those that are only suspected is counted
separately. Stores the rates and writes their tables into docs/dev/evidence/slow-nodes.md. A missed
target makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate
from paceline.files.documents import write_text
from paceline.scaling.analysis.analysis import Analysis
from paceline.scaling.campaigns.plan import parse_sizes

RESULTS = Path(__file__).parent / "results" / "blame_power.json"
DOCS = Path(__file__).parents[1] / "docs" / "dev" / "evidence" / "slow-nodes.md"
MARKS = ("<!-- from benchmarks/blame_power.py -->\n", "<!-- end -->")
Rates = dict[str, dict[str, dict[str, float | None]]]
TRIALS = 1000
FAULTS = (0.0, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
LARGE_FAULTS = (0.0, 0.1, 0.15, 0.2, 0.3)
FINDABLE = "as small as findable"
MAX_FALSE, MIN_POWER, MIN_COVERAGE, MAX_CLAIMED = 0.05, 0.95, 0.9, 0.02
OFTEN = 0.05
"""Share of the clusters of uneven and noisy hosts that need a straggler factor before its
intervals are judged: a factor in fewer clusters is a false claim, with its own target."""
SURE = 0.03
"""Faults from this size on must be found; ten times as large on hosts that differ so much more."""


@dataclass(frozen=True)
class ClusterKind:
    """Kind of cluster, and how it is measured."""

    nodes: int
    rounds: int = 1
    node_spread: float = 0.003
    run_noise: float = 0.0015
    kind: str = ""

    @property
    def name(self) -> str:
        """Name in the tables."""
        arrangements = f", {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.nodes} nodes{arrangements}" + (f", {self.kind}" if self.kind else "")

    @property
    def faults(self) -> tuple[float | None, ...]:
        """Faults to try on one node."""
        if self.kind == ALIKE:
            return (0.0,)
        return (*(LARGE_FAULTS if self.kind else FAULTS), None)

    def cluster(self, seed: int) -> SimulatedCluster:
        """A healthy cluster."""
        return SimulatedCluster(
            self.nodes, (), node_spread=self.node_spread, run_noise=self.run_noise, seed=seed
        )

    def analysis(self, cluster: SimulatedCluster) -> Analysis:
        """All sizes measured, and the second pass."""
        return simulate(cluster, parse_sizes(None, self.nodes), num_rounds=self.rounds)


ALIKE, UNEVEN, SHAKY = "all alike", "uneven", "shaky"
SETTINGS = (
    ClusterKind(8),
    ClusterKind(8, rounds=3),
    ClusterKind(16),
    ClusterKind(64),
    ClusterKind(64, rounds=3),
)
HARD = tuple(
    ClusterKind(nodes, node_spread=spread, run_noise=noise, kind=kind)
    for kind, spread, noise in ((UNEVEN, 0.03, 0.01), (SHAKY, 0.001, 0.03))
    for nodes in (8, 16, 64)
)
"""Hosts that differ ten times as much for good, and ones whose runs do."""


@dataclass(frozen=True)
class Trial:
    """Outcome of one faulty cluster."""

    found: bool
    healthy_flagged: int
    found_at_once: bool
    """Without the suspected ones."""
    healthy_at_once: int
    second_pass: bool
    """True if there was a second pass."""
    separable: bool
    is_covered: bool
    """True if the interval contains the true straggler factor."""


def trial(setting: ClusterKind, fault: float | None, seed: int) -> Trial:
    """One cluster with a slow node; None: as slow as the healthy one's report calls findable."""
    cluster = setting.cluster(seed)
    if fault is None:
        fault = setting.analysis(cluster).verdicts.smallest_fault or 0.0
    victim = int(np.random.default_rng(seed).integers(setting.nodes))
    if fault:
        cluster = replace(cluster, faults=(Fault("slow", victim + 1, fault),))
    analysis = setting.analysis(cluster)
    suspects = {node.host for node in analysis.flagged_nodes}
    at_once = suspects - {node.host for node in analysis.verdicts.suspect_nodes}
    is_victim = {cluster.hosts[victim]} if fault else set[str]()
    straggler = analysis.largest.straggler
    truth = float(cluster.true_speeds.min() / np.median(cluster.true_speeds))
    is_covered = straggler is not None and (straggler.low or 0) <= truth <= (straggler.high or 0)
    return Trial(
        bool(suspects & is_victim),
        len(suspects - is_victim),
        bool(at_once & is_victim),
        len(at_once - is_victim),
        any(group.purpose == "second pass" for group in analysis.measured),
        straggler is not None,
        is_covered,
    )


def rates(setting: ClusterKind, fault: float | None, trials: int) -> dict[str, float | None]:
    """Shares of the trials."""
    trials_done = [trial(setting, fault, seed) for seed in range(trials)]
    separable = [case for case in trials_done if case.separable]
    return {
        "found": None if fault == 0 else sum(case.found for case in trials_done) / trials,
        "healthy flagged": sum(case.healthy_flagged > 0 for case in trials_done) / trials,
        "found at once": None
        if fault == 0
        else sum(case.found_at_once for case in trials_done) / trials,
        "healthy flagged at once": sum(case.healthy_at_once > 0 for case in trials_done) / trials,
        "second pass": sum(case.second_pass for case in trials_done) / trials,
        "separable": len(separable) / trials,
        "true straggler in interval": (
            sum(case.is_covered for case in separable) / len(separable) if separable else None
        ),
    }


def label(fault: float | None) -> str:
    """The fault's size as the tables write it."""
    return FINDABLE if fault is None else f"{100 * fault:g}%" if fault else "none"


def measured(trials: int) -> Rates:
    """Setting -> fault -> rates; last, nodes that differ by luck alone."""
    alike = ClusterKind(64, rounds=2, node_spread=0.0, kind=ALIKE)
    return {
        setting.name: {label(fault): rates(setting, fault, trials) for fault in setting.faults}
        for setting in (*SETTINGS, *HARD, alike)
    }


def missed(result: Rates, trials: int) -> list[str]:
    """Targets that were not met, with two standard errors of the simulation as slack."""
    slack = 2 * (0.05 / trials) ** 0.5
    faults: list[str] = []
    for setting, rows in result.items():
        for fault, row in rows.items():
            size = float(fault.removesuffix("%")) / 100 if fault.endswith("%") else 0.0
            hard = UNEVEN in setting or SHAKY in setting
            sure = SURE * (10 if hard else 1)
            coverage = _coverage(row, OFTEN if hard else 0.0)
            checks = {
                "healthy flagged": (row["healthy flagged"] or 0.0) <= MAX_FALSE + slack,
                "found": size < sure or (row["found"] or 0.0) >= MIN_POWER - slack,
                "coverage": ALIKE in setting
                or coverage is None
                or coverage >= MIN_COVERAGE - slack,
                "claimed": ALIKE not in setting or (row["separable"] or 0) <= MAX_CLAIMED + slack,
            }
            faults += [
                f"{setting}, {fault}: {name}" for name, is_met in checks.items() if not is_met
            ]
    return faults


def tables(result: Rates) -> str:
    """Both tables and what else the rates say, as docs/dev/evidence/slow-nodes.md has them."""
    usual, hard = ([setting.name for setting in kind] for kind in (SETTINGS, HARD))
    alike = next(name for name in result if ALIKE in name)
    shares = [
        f"{100 * (result[name]['none']['separable'] or 0):.0f}% of healthy clusters ({name})"
        for name in usual
    ]
    coverage = _min_coverage(result, [*usual, *hard])
    first = (
        f"A healthy node was flagged in at most {_most(result, usual)}% of the clusters of a cell. "
        "The next table has hosts with ten times the differences (*uneven*: 3% persistent, 1% "
        "noise per run) or ten times the noise (*shaky*: 0.1% and 3%):"
    )
    second = (
        f"A healthy node was flagged in at most {_most(result, hard)}% of these clusters, "
        f"{_most(result, hard, ' at once')}% without second passes of suspects. A straggler "
        f"efficiency was reported in {'; '.join(shares)}. Wherever it was reported in at least "
        f"{100 * OFTEN:.0f}% of the clusters, its interval contained the true value in at least "
        f"{coverage}%. Of clusters whose nodes differ by noise alone (64 nodes, 2 rounds), "
        f"{100 * (result[alike]['none']['separable'] or 0):.1f}% reported one."
    )
    parts = (
        _table(result, usual),
        fill(first, 125) + "\n",
        _table(result, hard),
        fill(second, 125),
    )
    return "\n".join(parts) + "\n"


def _coverage(row: dict[str, float | None], least_told: float) -> float | None:
    """Return the coverage of the straggler factor's interval; None if reported too rarely."""
    return row["true straggler in interval"] if (row["separable"] or 0.0) >= least_told else None


def _min_coverage(result: Rates, names: list[str]) -> str:
    """The smallest share of true straggler factors in their intervals, in per cent."""
    coverages = [_coverage(row, OFTEN) for name in names for row in result[name].values()]
    return f"{100 * min(coverage for coverage in coverages if coverage is not None):.0f}"


def _table(result: Rates, names: list[str]) -> str:
    """A row a fault; a cell has what is flagged without suspects, and with them."""
    rows = [["slowed by", *names], ["---", *("---:" for _ in names)]]
    for fault in result[names[0]]:
        what = "healthy flagged" if fault == "none" else "found"
        cells = [
            (result[name][fault][f"{what} at once"], result[name][fault][what]) for name in names
        ]
        rows.append([fault, *(f"{100 * (a or 0):.1f} → {100 * (b or 0):.1f}" for a, b in cells)])
    passes = [f"{100 * (result[name]['none']['second pass'] or 0):.1f}" for name in names]
    rows.append(["second pass, none slowed", *passes])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _most(result: Rates, names: list[str], when: str = "") -> str:
    """The largest share of clusters with a healthy node flagged, in per cent."""
    shares = [
        row[f"healthy flagged{when}"] or 0.0 for name in names for row in result[name].values()
    ]
    return f"{100 * max(shares):.1f}"


def with_tables(text: str, result: Rates) -> str:
    """The page with today's tables between their marks."""
    before, tail = text.split(MARKS[0])
    return before + MARKS[0] + tables(result) + MARKS[1] + tail.partition(MARKS[1])[2]


def main() -> int:
    """Print and store the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 trials per row; nothing is stored")
    trials = 50 if parser.parse_args().quick else TRIALS
    result = measured(trials)
    for setting, rows in result.items():
        print(setting)
        for fault, row in rows.items():
            cells = [f"{name} " + ("-" if v is None else f"{v:.1%}") for name, v in row.items()]
            print(f"  {fault:22} {'  '.join(cells)}")
    faults = missed(result, trials)
    print("missed: " + "; ".join(faults) if faults else "every target is met")
    if trials == TRIALS:
        content = {"benchmark": "blame_power", "trials": trials, **result}
        write_text(RESULTS, json.dumps(content, indent=2) + "\n")
        write_text(DOCS, with_tables(DOCS.read_text(encoding="utf-8"), result))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
