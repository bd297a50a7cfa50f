"""Which layouts need at least the memory of another."""

from __future__ import annotations

import pytest

from paceline.core.layout import Layout
from paceline.layouts.search.memory import needs_at_least_memory_of

BASE = Layout(
    tp=2, cp=2, zero_stage=1, micro_batch=2, recompute="selective", sequence_parallel=True
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch": 4},
        {"recompute": "none"},
        {"zero_stage": 0},
        {"cp": 1},
        {"tp": 1, "sequence_parallel": False},
        {"micro_batch": 8, "recompute": "none", "cp": 1},
    ],
)
def test_less_sharing_and_more_kept_needs_as_much(changes: dict[str, object]):
    more = BASE.model_copy(update=changes)
    assert needs_at_least_memory_of(more, BASE)
    assert needs_at_least_memory_of(BASE, more) == (not changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 1},
        {"recompute": "full"},
        {"zero_stage": 3},
        {"cp": 4},
        {"tp": 4},
        {"micro_batch": 4, "zero_stage": 3},
        {"pp": 2},
        {"pp": 2, "micro_batch": 8},
    ],
)
def test_what_saves_somewhere_may_fit(changes: dict[str, object]):
    assert not needs_at_least_memory_of(BASE.model_copy(update=changes), BASE)


def test_sequence_parallelism_saves_beside_equal_tensor_ranks():
    without = BASE.model_copy(update={"sequence_parallel": False})
    assert needs_at_least_memory_of(without, BASE) and not needs_at_least_memory_of(BASE, without)


def test_other_schedules_are_not_compared():
    pipe = Layout(pp=2)
    assert not needs_at_least_memory_of(Layout(pp=2, schedule="gpipe"), pipe)
    assert not needs_at_least_memory_of(Layout(pp=2, vp=2), pipe)


@pytest.mark.parametrize("changes", [{"micro_batch": 4}, {"cp": 1}, {"tp": 1}])
def test_fewer_micro_batches_may_fit_into_a_gpipe(changes: dict[str, object]):
    many = Layout(tp=2, pp=2, cp=2, micro_batch=2, schedule="gpipe")
    assert not needs_at_least_memory_of(many.model_copy(update=changes), many)
    assert needs_at_least_memory_of(
        many.model_copy(update={"recompute": "none", "zero_stage": 0}), many
    )


def test_smaller_tensor_groups_with_sequence_parallelism_may_fit():
    wide = Layout(tp=8)
    assert not needs_at_least_memory_of(Layout(tp=4, sequence_parallel=True), wide)
    assert needs_at_least_memory_of(Layout(tp=4), wide)
