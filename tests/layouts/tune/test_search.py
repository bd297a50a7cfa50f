"""The search where the true times are known: it finds the best, stops, learns from failures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.layout import Layout
from paceline.layouts.tune.candidates import Candidates
from paceline.layouts.tune.search import Budget, Learner, TrialOutcome, resume_search, start_search
from tests.layouts.tune.worlds import World, made_up


@pytest.fixture(scope="module")
def some() -> Candidates:
    """Eighty of the layouts, at random."""
    every = made_up(blind=True).layouts
    picked = np.random.default_rng(0).choice(len(every), 80, replace=False)
    return made_up([every[row] for row in sorted(picked.tolist())])


def without_model(layouts: Candidates) -> Candidates:
    return replace(layouts, x=None, seconds=np.ones(len(layouts.layouts)))


def test_few_runs_find_a_layout_close_to_the_best_of_eighty(some: Candidates):
    regrets: list[float] = []
    for seed in range(2):
        world = World(some, seed)
        search = world.searched(16)
        assert len(world.ran) <= 16 and len(set(world.ran)) == len(search.tried_layouts)
        regrets.append(world.regret(search.best))
    assert max(regrets) < 0.05


def test_without_a_time_model_it_still_beats_random_search(some: Candidates):
    blind, random = without_model(some), np.random.default_rng(1)
    ours: list[float] = []
    others: list[float] = []
    for seed in range(12):
        world = World(blind, seed, wrong=0.1)
        ours.append(world.regret(world.searched(12).best))
        draws = [random.choice(80, 12, replace=False) for _ in range(20)]
        others += [world.regret(int(draw[world.truth[draw].argmin()])) for draw in draws]
    assert np.mean(ours) < 0.4 * np.mean(others)


def test_it_stops_by_its_bound_and_says_so(some: Candidates):
    search = World(without_model(some), 3, wrong=0.2).searched(79)
    assert (
        search.stop == "bound" and len(search.tried_layouts) < 40 and not search.is_promising.any()
    )


def test_it_stops_when_the_budget_is_spent(some: Candidates):
    search = World(without_model(some), 0, wrong=0.1).searched(2)
    assert search.stop == "budget" and len(search.took_s) == 2 and search.is_promising.any()


def test_where_everything_was_tried_there_is_nothing_left():
    search = World(made_up([Layout(tp=8, sequence_parallel=True)]), 0).searched(9)
    assert search.stop == "exhausted" and len(search.took_s) == 1


def test_the_recipes_own_layout_comes_first(some: Candidates):
    world = World(replace(without_model(some), recipe_row=17), 0)
    world.searched(3)
    assert world.ran[0] == 17 and len(set(world.ran)) == 3


def layouts_by_micro_batch() -> list[Layout]:
    return [
        Layout(tp=2, pp=2, micro_batch=size, recompute=kind, sequence_parallel=True)
        for size in (1, 2, 4)
        for kind in ("none", "full")
    ]


def test_what_needs_the_memory_of_one_that_ran_out_is_not_tried():
    layouts = without_model(made_up(layouts_by_micro_batch()))
    out = layouts.layouts.index(Layout(tp=2, pp=2, micro_batch=2, sequence_parallel=True))
    worse = layouts.layouts.index(Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True))
    world = World(layouts, 0, runs_out=frozenset({out, worse}))
    search = start_search(layouts, Learner(layouts))
    search.note(out, world.measure(out))
    assert search.is_dominated.nonzero()[0].tolist() == [out, worse]
    resume_search(search, world.measure, Budget(runs=30))
    assert worse not in world.ran and world.ran.count(out) == 1
    assert search.best is not None and search.best not in (out, worse)


def test_by_the_estimate_too_only_what_needs_as_much_is_dominated():
    layouts = without_model(made_up(layouts_by_micro_batch()))
    out = layouts.layouts.index(Layout(tp=2, pp=2, micro_batch=2, sequence_parallel=True))
    worse = layouts.layouts.index(Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True))
    needed = layouts.memory_bytes.copy()
    needed[worse] = 0.5 * needed[out]
    layouts = replace(layouts, memory_bytes=needed)
    search = start_search(layouts, Learner(layouts), [(out, TrialOutcome("oom", None, 1.0))])
    assert search.is_dominated.nonzero()[0].tolist() == [out] and search.is_open[worse]


@pytest.mark.parametrize("has_limit", [True, False])
def test_an_estimate_of_memory_that_is_far_too_low_is_learned_from_few_runs(
    some: Candidates, has_limit: bool
):
    layouts = without_model(some)
    limit = float(np.quantile(layouts.memory_bytes, 0.3))
    world = World(
        layouts,
        0,
        wrong=0.1,
        runs_out=frozenset(np.flatnonzero(layouts.memory_bytes > limit).tolist()),
    )
    limits = np.full(80, 1.6 * limit if has_limit else np.inf)
    world.candidates = replace(layouts, limit_bytes=limits)
    search = world.searched(16)
    assert sum(row in world.runs_out for row in world.ran) <= 9
    assert search.best is not None and search.surely_out.any()
    fitting = layouts.memory_bytes <= limit
    assert world.truth[search.best] <= 1.1 * world.truth[fitting].min()


def test_layouts_that_surely_run_out_are_left_out(some: Candidates):
    odds = np.where(np.arange(80) < 70, 0.99, 0.0)
    search = World(replace(without_model(some), p_oom=odds), 0).searched(30)
    assert min(search.tried_layouts) >= 70


def test_failed_runs_are_rows_and_are_not_repeated(some: Candidates):
    layouts = without_model(some)
    world = World(layouts, 0, wrong=0.1)

    def measure(row: int) -> TrialOutcome:
        good = world.measure(row)
        return good if row % 2 else TrialOutcome("nan", None, 5.0, "the loss is nan")

    search = start_search(layouts, Learner(layouts))
    resume_search(search, measure, Budget(runs=12))
    assert all(n == 1 for row, n in Counter(world.ran).items() if row % 2 == 0)
    assert search.best is not None and search.best % 2 == 1


def test_an_interrupt_keeps_what_has_ended_and_runs_of_before_count(some: Candidates):
    layouts = without_model(some)
    world = World(layouts, 5, wrong=0.1)

    def measure(row: int) -> TrialOutcome:
        if len(world.ran) == 4:
            raise KeyboardInterrupt
        return world.measure(row)

    search = start_search(layouts, Learner(layouts))
    resume_search(search, measure, Budget(runs=10))
    assert search.stop == "interrupted" and len(search.took_s) == 4
    before = [
        (row, outcome) for row, tried in search.tried_layouts.items() for outcome in tried.outcomes
    ]
    again = start_search(layouts, Learner(layouts), before)
    assert again.measured == search.measured
    resume_search(again, world.measure, Budget(runs=10))
    assert len(again.took_s) <= 10 and len(world.ran) == len(again.took_s)


def test_each_layout_keeps_what_was_expected_just_before_its_run(some: Candidates):
    search = World(without_model(some), 0, wrong=0.1).searched(6)
    first, *later = search.tried_layouts.values()
    assert first.expected is search.initial_belief and all(
        tried.expected is not search.initial_belief for tried in later
    )
