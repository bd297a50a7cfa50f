"""The table of layouts leaves out no pair of features that the rules allow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from paceline.core.layout import Layout, Rule, broken_rules, features
from paceline.core.layout_sizes import layout_problems, native_problems
from tests.numerics.cases import GLOBAL_BATCH, SEQ_LEN, Case, shape, table

FEATURES = (
    "tp+sp", "pp", "vp", "zero-bubble", "cp", "zero1", "zero2", "zero3", "hybrid", "full",
)  # fmt: skip
SINGLES = ("tp", "gpipe", "interleaved", "1f1b", "all-to-all", "ring", "selective", "compile")
"""What has to occur besides, whatever it is paired with."""
MODELS = ("llama", "gpt")
RANKS = 16
CASES = table()

Pair = tuple[str, str]


def every_layout() -> Iterator[Layout]:
    """Layouts of every combination of features, some of them refused; sizes are 2 or left alone."""
    axes = product((1, 2), (1, 2), (1, 2), (1, 2), range(4), (None, 2), ("none", "full"))
    for tp, pp, vp, cp, stage, shard, recompute in axes:
        for schedule in ("1f1b", "zero-bubble"):
            yield Layout.model_validate({
                "tp": tp, "sequence_parallel": tp > 1, "pp": pp, "vp": vp, "cp": cp,
                "zero_stage": stage, "dp_shard": shard, "recompute": recompute,
                "schedule": schedule,
            })  # fmt: skip


def present(layout: Layout, ranks: int, compiled: bool = False) -> frozenset[str]:
    """The layout's features, those of sharding only where there is something to shard."""
    found = features(layout, ranks, dtype="fp64", device="cpu", compiled=compiled)
    if layout.sequence_parallel and layout.tp > 1:
        found |= {"tp+sp"}
    alone = layout.dp(ranks) * layout.cp == 1
    return found - {"zero1", "zero2", "zero3"} if alone else found


def pairs(found: frozenset[str]) -> set[Pair]:
    """The pairs of FEATURES among them."""
    return set(combinations([name for name in FEATURES if name in found], 2))


def allowed() -> set[Pair]:
    """The pairs that occur in any layout without a broken rule."""
    found = [present(layout, RANKS) for layout in every_layout()]
    return {pair for names in found if not broken_rules(names) for pair in pairs(names)}


def refused() -> dict[Pair, str]:
    """The other pairs, each with the reason that stands in the way of an otherwise valid layout."""
    broken: dict[Pair, list[Rule]] = {}
    for layout in every_layout():
        names = present(layout, RANKS)
        rules = broken_rules(names)
        for pair in pairs(names):
            broken[pair] = min(broken.get(pair, rules), rules, key=len)
    found = {pair: " ".join(rule.reason for rule in rules) for pair, rules in broken.items()}
    return {
        pair: found.get(pair, "one setting cannot have both values")
        for pair in combinations(FEATURES, 2)
        if found.get(pair) != ""
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_allowed_pair_of_features_occurs(model: str) -> None:
    found: set[Pair] = set()
    for case in CASES:
        if case.model == model:
            found |= pairs(present(case.layout, case.ranks))

    assert sorted(allowed() - found) == []


@pytest.mark.parametrize("model", MODELS)
def test_everything_else_occurs_as_well(model: str) -> None:
    found = [present(c.layout, c.ranks, c.compiled) for c in CASES if c.model == model]

    assert {name for name in SINGLES if not any(name in names for names in found)} == set()


def test_the_only_pairs_that_are_refused_are_these() -> None:
    reasons = refused()

    assert {pair for pair, reason in reasons.items() if reason.startswith("one setting")} == {
        ("zero1", "zero2"), ("zero1", "zero3"), ("zero2", "zero3"),
    }  # fmt: skip
    assert reasons["zero1", "hybrid"].startswith("dp_shard needs zero_stage 2 or 3")
    assert reasons["zero-bubble", "full"].startswith("schedule zero-bubble cannot recompute")
    assert len(reasons) == 5
    assert set(reasons) | allowed() == set(combinations(FEATURES, 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_layout_of_the_table_is_one_that_a_user_would_be_refused(case: Case) -> None:
    sizes = case.layout, shape(case.model), case.ranks, GLOBAL_BATCH

    assert layout_problems(*sizes, SEQ_LEN) == []
    assert native_problems(*sizes, device="cpu", compiled=case.compiled) == []


def test_the_table_has_about_thirty_layouts_on_two_to_eight_ranks() -> None:
    layouts = {(case.ranks, case.words) for case in CASES if case.ranks > 1}

    assert len(layouts) >= 30
    assert {ranks for ranks, _ in layouts} == {2, 3, 4, 8}
