"""A node that is really slow is named, and no other; a nightly benchmark runs more trials."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clusters.bed import Bed
from tests.clusters.conftest import started
from tests.clusters.slow_nodes import (
    HOSTS,
    MIN_SLOWDOWN,
    PLAN,
    SHARES,
    Fault,
    Trial,
    broken_rules,
    planned,
    run_trial,
)

SLOW = Fault("node-003", 0.5)
GOOD = Trial(SLOW, {"node-003": 2.0}, {}, ("node-003",), ("node-003",), (), 1.0)


FOUND = re.compile(r"in 9 of 10 cases: a node ([\d.]+)% slower")


def is_hidden(trial: Trial) -> bool:
    """Whether the campaign itself says that hosts scattered too much for such a fault to show."""
    found = [float(each) / 100 for text in trial.sentences for each in FOUND.findall(text)]
    return not trial.flagged and max(found, default=0.0) > (trial.true_slowdown or 1.0) - 1


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Eight hosts that come before all else that runs here."""
    yield from started("slow", PLAN)


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize("fault", planned(1), ids=str)
def test_the_slowed_node_is_named_and_no_other(
    bed: Bed, tmp_path: Path, fault: Fault | None
) -> None:
    trial = run_trial(bed, fault, tmp_path)
    for again in ("second", "third"):
        if is_hidden(trial):
            (tmp_path / again).mkdir()
            trial = run_trial(bed, fault, tmp_path / again)
    assert trial.flagged == ((fault.host,) if fault else ()), trial
    assert fault is None or (trial.true_slowdown or 0.0) >= MIN_SLOWDOWN
    assert len(trial.slowdowns) == len(trial.losses) == HOSTS


def test_a_third_of_the_trials_has_no_fault_and_the_seed_decides_the_others() -> None:
    faults = planned(20, seed=5)
    assert faults == planned(20, seed=5) != planned(20, seed=6)
    real = [fault for fault in faults if fault]
    assert (len(faults), len(real)) == (20, 13)
    assert {fault.share for fault in real} <= set(SHARES)
    assert len({fault.host for fault in real}) > 1
    assert None not in planned(1)  # a trial without a fault tells less: there are seven such hosts


def test_the_rules_are_broken_by_what_they_forbid() -> None:
    missed, late = replace(GOOD, flagged=()), replace(GOOD, slowdowns={"node-003": 1.2})
    unfair = replace(GOOD, flagged=("node-001", "node-003"))
    healthy = replace(GOOD, fault=None)
    assert (unfair.named, unfair.blamed, healthy.blamed) == (True, ("node-001",), ("node-003",))
    assert broken_rules([GOOD] * 20) == broken_rules([*[GOOD] * 19, unfair]) == []
    assert broken_rules([*[GOOD] * 19, missed]) == []
    assert broken_rules([*[GOOD] * 18, missed, missed]) == ["18 of 20 slowed hosts were named"]
    assert "blamed in 2 of 20" in broken_rules([*[GOOD] * 18, unfair, healthy])[0]
    assert "slowed its host 1.20 times" in broken_rules([late])[0]


def test_a_campaign_that_says_what_it_could_not_see_is_asked_again() -> None:
    blind = "could have been detected in 9 of 10 cases: a node 161.2% slower."
    assert is_hidden(replace(GOOD, flagged=(), sentences=(blind,)))
    assert not is_hidden(replace(GOOD, sentences=(blind,)))
    assert not is_hidden(replace(GOOD, flagged=(), sentences=(blind.replace("161.2", "4.0"),)))
