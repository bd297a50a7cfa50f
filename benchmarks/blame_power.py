"""How often a slow node is named, how often a healthy one, and how well the factors are known.

    python benchmarks/blame_power.py [--quick]

Synthetic clusters go through the whole procedure: every size, the second pass, the analysis. A
missed target makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.core.scaling.analysis import Analysis
from paceline.core.scaling.procedure import simulate
from paceline.core.scaling.sizes import parse_sizes
from paceline.core.scaling.synthetic import Cluster, Fault
from paceline.rundir import write_text

RESULTS = Path(__file__).parent / "results" / "blame_power.json"
TRIALS = 1000
FAULTS = (0.0, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
FINDABLE = "as small as findable"
MOST_FALSE, LEAST_POWER, LEAST_COVERAGE, MOST_CLAIMED = 0.05, 0.95, 0.9, 0.02
SURE = 0.03
"""Faults from this size on must be found."""


@dataclass(frozen=True)
class Setting:
    """A kind of cluster and how it is measured."""

    nodes: int
    rounds: int = 1
    node_spread: float = 0.003
    run_noise: float = 0.0015

    @property
    def name(self) -> str:
        """As the tables call it."""
        arrangements = f", {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.nodes} nodes{arrangements}"

    def cluster(self, seed: int) -> Cluster:
        """A healthy cluster."""
        return Cluster(self.nodes, (), node_spread=self.node_spread, run_noise=self.run_noise,
                       seed=seed)  # fmt: skip

    def analysis(self, cluster: Cluster) -> Analysis:
        """All sizes measured, and the second pass."""
        return simulate(cluster, parse_sizes(None, self.nodes), num_rounds=self.rounds)[0]


SETTINGS = (Setting(8), Setting(8, rounds=3), Setting(16), Setting(64), Setting(64, rounds=3))


@dataclass(frozen=True)
class Trial:
    """What one faulty cluster led to."""

    found: bool
    healthy_flagged: int
    separable: bool
    covered: bool
    """Whether the true straggler factor lies in its interval."""


def trial(setting: Setting, fault: float | None, seed: int) -> Trial:
    """One cluster with a slow node; None: as slow as the healthy cluster's report calls findable."""
    cluster = setting.cluster(seed)
    if fault is None:
        fault = setting.analysis(cluster).blame.smallest_fault or 0.0
    victim = int(np.random.default_rng(seed).integers(setting.nodes))
    if fault:
        cluster = replace(cluster, faults=(Fault("slow", victim + 1, fault),))
    analysis = setting.analysis(cluster)
    flagged = {node.host for node in analysis.flagged}
    found = cluster.hosts[victim] in flagged and fault > 0
    straggler = analysis.largest.straggler
    truth = float(cluster.true_speeds.min() / np.median(cluster.true_speeds))
    covered = straggler is not None and (straggler.low or 0) <= truth <= (straggler.high or 0)
    return Trial(found, len(flagged) - found, straggler is not None, covered)


def rates(setting: Setting, fault: float | None, trials: int) -> dict[str, float | None]:
    """Shares of the trials."""
    done = [trial(setting, fault, seed) for seed in range(trials)]
    separable = [one for one in done if one.separable]
    return {
        "found": None if fault == 0 else sum(one.found for one in done) / trials,
        "healthy flagged": sum(one.healthy_flagged > 0 for one in done) / trials,
        "separable": len(separable) / trials,
        "true straggler in interval": (
            sum(one.covered for one in separable) / len(separable) if separable else None
        ),
    }


def label(fault: float | None) -> str:
    """The fault's size as the tables write it."""
    return FINDABLE if fault is None else f"{100 * fault:g} %" if fault else "none"


def measured(trials: int) -> dict[str, dict[str, dict[str, float | None]]]:
    """Setting -> fault -> rates; last, nodes that differ by luck alone."""
    found = {
        setting.name: {label(fault): rates(setting, fault, trials) for fault in (*FAULTS, None)}
        for setting in SETTINGS
    }
    alike = Setting(64, rounds=2, node_spread=0.0)
    return {**found, "64 nodes, 2 rounds, all alike": {"none": rates(alike, 0.0, trials)}}


def missed(result: dict[str, dict[str, dict[str, float | None]]], trials: int) -> list[str]:
    """Targets that were not met, with two standard errors of the simulation as slack."""
    slack = 2 * (0.05 / trials) ** 0.5
    faults: list[str] = []
    for setting, rows in result.items():
        for fault, row in rows.items():
            size = float(fault.removesuffix(" %")) / 100 if fault.endswith("%") else 0.0
            checks = {
                "healthy flagged": (row["healthy flagged"] or 0.0) <= MOST_FALSE + slack,
                "found": size < SURE or (row["found"] or 0.0) >= LEAST_POWER - slack,
                "coverage": "alike" in setting
                or (row["true straggler in interval"] or 1.0) >= LEAST_COVERAGE - slack,
                "claimed": "alike" not in setting
                or (row["separable"] or 0) <= MOST_CLAIMED + slack,
            }
            faults += [f"{setting}, {fault}: {name}" for name, met in checks.items() if not met]
    return faults


def main() -> int:
    """Print and store the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 trials a row, not stored")
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
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
