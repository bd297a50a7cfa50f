"""How likely layouts run out of memory after some did."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.estimate.model.case import Floats
from paceline.layouts.search.memory import p_oom_after_runs

NEEDED = 80e9 * np.array([0.3, 0.5, 0.7, 0.8, 0.9, 1.3])
BEFORE = np.array([0.0, 0.0, 0.0, 0.01, 0.15, 1.0])
KNOWN, UNKNOWN = np.full(6, 80e9), np.full(6, np.inf)


def odds(limit: Floats, **ended: bool) -> Floats:
    return p_oom_after_runs(
        NEEDED, limit, {int(row[1:]): out for row, out in ended.items()}, BEFORE
    )


def test_until_one_has_run_out_the_estimate_stands():
    assert odds(KNOWN) is BEFORE and odds(KNOWN, r4=False, r0=False) is BEFORE


@pytest.mark.parametrize("limit", [KNOWN, UNKNOWN])
def test_what_needs_more_than_one_that_ran_out_will_too(limit: Floats):
    chances = odds(limit, r3=True)
    assert list(chances) == sorted(chances) and chances[5] > 0.95 and chances[4] > 0.7
    assert chances[0] < 0.4


@pytest.mark.parametrize("limit", [KNOWN, UNKNOWN])
def test_one_that_fits_keeps_the_smaller_ones_open(limit: Floats):
    chances = odds(limit, r3=True, r2=False)
    assert chances[:2].max() < 0.2 and chances[2] < odds(limit, r3=True)[2]


def test_each_that_runs_out_moves_the_limit_down():
    assert odds(KNOWN, r3=True)[1] < odds(KNOWN, r3=True, r2=True)[1]


def test_one_that_runs_out_far_below_the_limit_says_little_of_the_others():
    needed = np.concatenate([[80e9 * 0.1], NEEDED])
    others = p_oom_after_runs(needed, np.full(7, 80e9), {0: True, 3: False, 4: False}, np.zeros(7))
    assert others[1:4].max() < 0.1


def test_where_no_need_is_known_nothing_is_said_of_others():
    before = np.zeros(3)
    assert p_oom_after_runs(np.ones(3), np.full(3, np.inf), {0: True}, before) is before
