"""Reported step times and verdicts on runs whose truth is known: the short form of the benchmark.

`make bench-verdicts` runs the same code thousands of times; its table is in
docs/dev/evidence/statistics.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.core.series import RULES, SCENARIOS, Machine, Trial, Workload, errors, rmse

ROOT = Path(__file__).parents[2]
OURS, *OTHERS = RULES
REAL = Machine(workload=Workload(spike_rate=0.03))
LONG_ENOUGH = [name for name, workload in SCENARIOS.items() if workload.steps >= 100]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("scenario", LONG_ENOUGH)
def test_the_reported_step_time_is_within_a_quarter_of_a_per_cent(scenario: str):
    n = 100 if SCENARIOS[scenario].steps < 300 else 40
    assert rmse(errors(SCENARIOS[scenario], RULES[OURS], rng(), n)) <= 0.0025


def test_other_rules_would_fail_that_test():
    spiky = SCENARIOS["3% spikes, 100 steps"]
    rmse_of = {rule: rmse(errors(spiky, RULES[rule], rng(), 1500)) for rule in OTHERS}
    assert rmse_of["last step"] > 0.05 and rmse_of["mean of steps 35-44"] > 0.015
    assert rmse_of["mean without the first 5"] > 0.02


def test_false_alarms_of_three_against_three_are_rare():
    rates = Trial(3, 3, 0.0, REAL, REAL).rates(rng(), 400)
    assert rates["slower"] <= 0.01 and rates["faster"] <= 0.01


def test_without_a_margin_there_would_be_too_many_false_alarms():
    assert Trial(3, 3, margin=0.0).rates(rng(), 400)["slower"] > 0.01


def test_three_against_three_find_a_slowdown_of_two_per_cent():
    assert Trial(3, 3, 0.02, REAL, REAL).rates(rng(), 400)["slower"] >= 0.95


def test_five_against_five_find_identical_sides_the_same():
    assert Trial(5, 5, 0.0, REAL, REAL).rates(rng(), 400)["same"] >= 0.90


@pytest.mark.parametrize("n", [3, 5])
def test_what_differs_by_the_margin_is_seldom_called_the_same(n: int):
    assert Trial(n, n, 0.01).rates(rng(), 400)["same"] <= 0.06


def test_the_repeats_that_are_asked_for_do_decide_without_false_alarms():
    rates = Trial(3, 3, follow_up=True).rates(rng(), 400)
    assert rates["undecided"] <= 0.05 and rates["slower"] + rates["faster"] <= 0.01


@pytest.mark.parametrize(
    "machine",
    [Machine(heavy_tails=True), Machine(between_runs=0.001)],
    ids=["heavy tails", "quiet"],
)
def test_other_scatter_makes_no_more_false_alarms(machine: Machine):
    rates = Trial(3, 3, 0.0, machine, machine).rates(rng(), 400)
    assert rates["slower"] <= 0.01 and rates["faster"] <= 0.01


def test_the_table_in_the_docs_is_the_committed_result():
    result = json.loads((ROOT / "benchmarks" / "results" / "verdicts.json").read_text())
    lines = (ROOT / "docs" / "dev" / "evidence" / "statistics.md").read_text().splitlines()
    rows = {cells[1].strip(): cells[2:-1] for line in lines if (cells := line.split("|"))[1:]}
    for table, words in (
        ("step_time_rmse", [*RULES, "called drifting"]),
        ("verdicts", ["slower", "faster", "same", "undecided"]),
    ):
        for name, figures in result[table].items():
            printed = [cell.strip() for cell in rows[name]][: len(words)]
            values = ["-" if figures[w] is None else f"{100 * figures[w]:.2f}" for w in words]
            assert printed == values, name
    assert all(figures["met"] for figures in result["verdicts"].values())
