"""Layouts as points: what differs is apart, what is the same is not."""

from __future__ import annotations

import numpy as np

from paceline.core.layout import Layout
from paceline.layouts.search.residuals import FEATURE_NAMES, features


def test_sizes_count_by_their_doublings_and_stages_of_zero_add_up():
    rows = features([Layout(), Layout(tp=4, sequence_parallel=True), Layout(zero_stage=2)])
    assert rows.shape == (3, len(FEATURE_NAMES)) and not rows[0].any()
    assert rows[1][FEATURE_NAMES.index("tp")] == 2.0 and np.count_nonzero(rows[1]) == 1
    assert [
        rows[2][FEATURE_NAMES.index(name)] for name in ("zero >= 1", "zero >= 2", "zero 3")
    ] == [
        1,
        1,
        0,
    ]


def test_schedules_and_recomputation_are_told_apart():
    layouts = [
        Layout(pp=2),
        Layout(pp=2, schedule="gpipe"),
        Layout(pp=2, schedule="zero-bubble"),
        Layout(pp=2, vp=2),
        Layout(pp=2, recompute="full"),
        Layout(pp=2, recompute="selective"),
        Layout(pp=2, recompute="budget", recompute_budget=0.3),
    ]
    assert len({tuple(row) for row in features(layouts).tolist()}) == len(layouts)


def test_a_budget_lies_between_a_full_recomputation_and_none():
    shares = (0.0, 0.3, 1.0)
    rows = features([Layout(recompute="budget", recompute_budget=share) for share in shares])
    assert rows[:, FEATURE_NAMES.index("full")].tolist() == [1.0, 0.7, 0.0]


def test_no_layouts_are_no_rows():
    assert features([]).shape == (0, len(FEATURE_NAMES))
