"""All layouts of a recipe ranked: the order, what is pruned, and what the contract promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.layout_checks import layout_problems
from paceline.estimate import estimates
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.memory.device_memory import UNLIKELY
from paceline.estimate.model.case import Cases
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.layouts.search import space
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune.candidates import layout_overrides
from paceline.layouts.tune.ranking import MAX_BORDERLINE, Ranking, rank_layouts

QUESTION = EstimateRequest("llama31-70b", "H100-SXM", 64)
SPACE = SearchSpace(micro_batches=(1, 2), recompute=("none", "full"))


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return rank_layouts(QUESTION, shipped_evidence(), SPACE, top=10_000)


def test_the_fastest_that_fits_comes_first(ranking: Ranking):
    """Layouts that fit come before borderline ones, and these before those that are too large."""
    fits = [row.fits for row in ranking.layouts]
    assert fits == sorted(fits, reverse=True) and fits[0] and not fits[-1]
    classes = [row.memory if row.fits else "too large" for row in ranking.layouts]
    assert list(dict.fromkeys(classes)) == ["fits", "borderline", "too large"]
    for name in ("fits", "borderline"):
        seconds = [row.step_time_s for row in ranking.layouts if row.fits and row.memory == name]
        assert seconds == sorted(seconds) and seconds
    assert ranking.n_pruned == fits.count(False) and ranking.n_layouts == len(fits)


def test_borderline_layouts_are_listed_apart_if_they_are_faster():
    short = rank_layouts(QUESTION, shipped_evidence(), SearchSpace(), top=3)
    assert [row.memory for row in short.layouts] == ["fits"] * 3
    assert 0 < len(short.borderline) <= MAX_BORDERLINE
    for row in short.borderline:
        assert row.memory == "borderline" and row.fits
        assert row.step_time_s < short.layouts[0].step_time_s


def test_every_layout_has_its_interval_and_its_odds(ranking: Ranking):
    for row in ranking.layouts:
        assert row.low_s < row.step_time_s < row.high_s
        assert row.fits == (row.p_oom <= MAX_P_OOM_TO_FIT) and row.memory_bytes > 0


def test_a_ranked_layout_is_what_estimate_says_of_it(ranking: Ranking):
    best = ranking.layouts[0]
    alone = estimate(
        replace(QUESTION, overrides=tuple(layout_overrides(best.layout))), shipped_evidence()
    )
    assert alone.step_time_s == pytest.approx(best.step_time_s)
    assert alone.memory_bytes.device_used == pytest.approx(best.memory_bytes)
    assert alone.p_oom == pytest.approx(best.p_oom)


def test_what_fits_by_a_budget_alone_is_listed_with_the_largest_that_fits():
    question = EstimateRequest("llama31-405b", "H100", 512)
    space = SearchSpace(micro_batches=(1,), recompute=("none", "full"), zero_stages=(3,), max_cp=2)
    found = rank_layouts(question, shipped_evidence(), space, top=20)
    best = next(row for row in found.layouts if row.layout.recompute == "budget")
    assert best.memory == "fits" and found.borderline[0].layout.recompute == "budget"
    none, full = (
        estimate(
            replace(
                question, overrides=tuple(layout_overrides(best.layout.model_copy(update=kind)))
            ),
            shipped_evidence(),
        )
        for kind in (
            {"recompute": "none", "recompute_budget": None},
            {"recompute": "full", "recompute_budget": None},
        )
    )
    assert none.p_oom is not None and none.p_oom > UNLIKELY
    assert full.p_oom is not None and full.p_oom < UNLIKELY
    assert none.step_time_s < best.step_time_s < full.step_time_s
    without = rank_layouts(
        replace(question, overrides=("engine=megatron",)), shipped_evidence(), space, top=20
    )
    assert {row.layout.recompute for row in without.layouts} <= {"none", "full"}
    assert without.layouts[0].step_time_s > found.borderline[0].step_time_s


def test_the_published_layout_is_close_to_the_best(ranking: Ranking):
    published = ranking.recipe_layout
    assert published is not None and published.fits and ranking.recipe_problem is None
    assert published.step_time_s < 1.15 * ranking.layouts[0].step_time_s


def test_the_list_is_cut_and_the_counts_are_not():
    short = rank_layouts(QUESTION, shipped_evidence(), SPACE, top=3)
    assert len(short.layouts) == 3 and short.n_layouts > 1000


def test_a_device_of_unknown_size_is_refused():
    with pytest.raises(UserError):
        rank_layouts(replace(QUESTION, device="cpu"), shipped_evidence(), SPACE, 1)


@pytest.mark.parametrize(("recipe", "devices"), [("llama31-70b", 8), ("llama31-8b", 7)])
def test_devices_that_the_recipes_own_layout_does_not_divide(recipe: str, devices: int):
    ranked = rank_layouts(
        EstimateRequest(recipe, "B200", devices), shipped_evidence(), SPACE, top=3
    )
    assert ranked.recipe_layout is None and ranked.layouts[0].step_time_s > 0
    assert ranked.recipe_problem
    assert ranked.devices == devices


def test_a_layout_that_a_rule_refuses_is_told_by_that_rule():
    changes = ("layout.tp=1", "layout.cp=1", "layout.sequence_parallel=true")
    ranked = rank_layouts(replace(QUESTION, overrides=changes), shipped_evidence(), SPACE, top=1)
    assert ranked.recipe_layout is None and ranked.recipe_problem
    assert ranked.recipe_problem.startswith("sequence_parallel needs tp > 1, because")


def test_zero_3_over_context_ranks_alone_is_not_free():
    changes = ("layout.tp=4", "layout.pp=1", "layout.vp=1", "layout.cp=16")
    whole = replace(QUESTION, overrides=(*changes, "layout.zero_stage=3"))
    assert estimate(whole, shipped_evidence()).parts["zero"] > 0


def test_65536_devices_take_one_estimate_a_layout_and_few_that_are_followed(
    monkeypatch: pytest.MonkeyPatch,
):
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(estimates, name)

        def call(x: Cases, *rest: Any) -> Any:
            counted[name] += x.size
            return function(x, *rest)

        return call

    def checked(*arguments: Any) -> list[str]:
        counted["checked"] += 1
        return layout_problems(*arguments)

    for name in ("step_time", "simulated_step", "log_sd", "memory"):
        monkeypatch.setattr(estimates, name, counting(name))
    monkeypatch.setattr(space, "layout_problems", checked)
    found = rank_layouts(
        replace(QUESTION, devices=65_536), shipped_evidence(), SearchSpace(), top=20
    )
    # Of nine recompute budgets per split, the largest that fits and the largest that is borderline
    # count.
    assert found.n_layouts > 10_000 and counted["step_time"] < 1.5 * found.n_layouts
    assert counted["simulated_step"] == counted["log_sd"] == 20 + MAX_BORDERLINE + 1
    assert counted["memory"] <= 2 * found.n_layouts + 50
    combinations = found.n_layouts + found.n_infeasible
    assert counted["checked"] < 0.55 * combinations


def test_the_smallest_layout_is_told_where_none_fits():
    space = SearchSpace(micro_batches=(1, 2), recompute=("none", "full"))
    few = rank_layouts(replace(QUESTION, devices=8), shipped_evidence(), space, top=3)
    assert few.n_pruned == few.n_layouts and not any(row.fits for row in few.layouts)
    assert 80 * 2**30 < few.least_memory_bytes <= min(row.memory_bytes for row in few.layouts)
    assert few.bound.endswith("exceed 79.65 GiB")
