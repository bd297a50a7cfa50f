"""The table of layouts leaves out no workload and no pair of features that its structure allows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from paceline.core.axes.axis import Rule
from paceline.core.layout import Layout
from paceline.core.layout_checks import features, layout_problems, native_problems, violated_rules
from paceline.core.mmdit import MMDiTShape
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.files.recipe import load_recipe, recipe_names
from tests.core.shapes import FLUX, LLAMA_8B
from tests.numerics import expert_layouts
from tests.numerics.cases import (
    ALL,
    GLOBAL_BATCH,
    RAMP_UP,
    ROUNDED_MODELS,
    SMALL_LAYOUTS_BY_DAY,
    Case,
    by_inductor,
    rounded,
    table,
    trained_table,
)
from tests.numerics.models import MODELS
from tests.numerics.test_faults import BROKEN

FEATURES = (
    "tp",
    "tp+sp",
    "pp",
    "vp",
    "zero-bubble",
    "cp",
    "zero1",
    "zero2",
    "zero3",
    "hybrid",
    "full",
)
"""What occurs in pairs."""
SINGLES = (
    "dp", "gpipe", "interleaved", "1f1b", "all-to-all", "ring", "selective", "budget", "compile",
)  # fmt: skip
"""Features that have to occur too, whatever they are paired with."""
EVERYTHING = {*FEATURES, *SINGLES}
AXES = {"dp", "tp", "pp", "cp", "ep", "zero3", "full"}
COMPILED = ("tp", "tp+sp", "pp", "cp", "zero1", "zero2", "zero3", "full", "selective")
"""What torch.compile is tried with: each always, each pair at night and by Inductor."""
OF_FLUX = {"dp", "tp", "cp", "zero1", "zero2", "zero3", "hybrid", "full", "compile"}
IN_PAIRS = {
    "llama": EVERYTHING,
    "gpt": EVERYTHING,
    "lora": EVERYTHING,
    "sft": EVERYTHING,
    "flux": OF_FLUX,
}
"""What these models allow; the others differ from one of them in what happens at the ends alone."""
AT_THE_ENDS = {
    "opt": {
        "dp",
        "tp",
        "tp+sp",
        "pp",
        "vp",
        "zero-bubble",
        "cp",
        "zero1",
        "zero2",
        "zero3",
        "full",
        "selective",
        "budget",
        "gpipe",
        "interleaved",
        "1f1b",
    },
    "ends": {"tp", "tp+sp", "pp", "vp", "interleaved", "cp", "full"},
    "qwen3": {"dp", "tp", "zero3", "full"},
    "gemma3": {"pp", "1f1b", "cp", "all-to-all", "compile"},
    "phi4": {"tp", "selective"},
    "mixtral": {
        *("dp", "tp", "tp+sp", "pp", "vp", "gpipe", "1f1b", "interleaved", "zero-bubble"),
        *("cp", "all-to-all", "ring", "zero1", "zero2", "zero3", "hybrid"),
        *("full", "selective", "budget", "compile"),
    },
    "qwen3-moe": {"tp"},
    "deepseek-v3": {
        *("dp", "tp", "tp+sp", "pp", "gpipe", "1f1b", "cp", "all-to-all", "ring", "zero3"),
        *("selective", "budget", "compile"),
    },
    "gpt-oss": {
        "dp",
        "tp",
        "tp+sp",
        "pp",
        "vp",
        "interleaved",
        "cp",
        "all-to-all",
        "zero3",
        "selective",
        "compile",
    },
}
OTHER_DATA = {"masked": {"llama", "ends", "gpt", "lora", "sft", "mixtral"}, "ramp": {"gpt"}}
TINY = [name for name in recipe_names() if name.endswith("-tiny")]
RANKS = 16
CASES = table()

Pair = tuple[str, str]
Shape = DecoderShape | MMDiTShape


@cache
def every_layout(kind: str) -> list[tuple[frozenset[str], list[Rule]]]:
    """Features and broken rules of layouts of every combination; sizes are 2 or left alone."""
    return [
        (names, violated_rules(names))
        for layout in _combinations()
        for compiled in (False, True)
        for names in [present(layout, RANKS, compiled, kind)]
    ]


def _combinations() -> Iterator[Layout]:
    tensor = ((1, False), (2, False), (2, True))
    stages = product((1, 2), (1, 2), ("gpipe", "1f1b", "zero-bubble"))
    contexts = ((1, "all-gather"), (2, "all-gather"), (2, "all-to-all"), (2, "ring"))
    rest = product(range(4), (None, 2), ("none", "selective", "full", "budget"))
    for (tp, sp), (pp, vp, schedule), (cp, exchange), (stage, shard, recompute) in product(
        tensor, stages, contexts, rest
    ):
        yield Layout.model_validate(
            {
                "tp": tp,
                "sequence_parallel": sp,
                "pp": pp,
                "vp": vp,
                "schedule": schedule,
                "cp": cp,
                "cp_exchange": exchange,
                "zero_stage": stage,
                "dp_shard": shard,
                "recompute": recompute,
                "recompute_budget": 0.5 if recompute == "budget" else None,
            }
        )


def present(
    layout: Layout, ranks: int, compiled: bool = False, kind: str = "decoder"
) -> frozenset[str]:
    """The layout's features, those of sharding only where there is something to shard."""
    shape = FLUX if kind == "mmdit" else LLAMA_8B
    found = features(
        ParallelRun(layout, shape, ranks, dtype="fp64", device="cpu", compiled=compiled)
    )
    if layout.sequence_parallel and layout.tp > 1:
        found |= {"tp+sp"}
    alone = layout.dp(ranks) * layout.cp == 1
    return found - {"zero1", "zero2", "zero3"} if alone else found


def pairs(found: frozenset[str]) -> set[Pair]:
    """The pairs of FEATURES among them."""
    return set(combinations([name for name in FEATURES if name in found], 2))


def allowed(kind: str) -> set[Pair]:
    """The pairs that occur in any layout without a broken rule."""
    return {pair for names, rules in every_layout(kind) if not rules for pair in pairs(names)}


def refused(kind: str) -> dict[Pair, str]:
    """The other pairs, each with the reason that stands in the way of an otherwise valid layout."""
    broken: dict[Pair, list[Rule]] = {}
    for names, rules in every_layout(kind):
        for pair in pairs(names):
            broken[pair] = min(broken.get(pair, rules), rules, key=len)
    found = {pair: " ".join(rule.reason for rule in rules) for pair, rules in broken.items()}
    return {
        pair: found.get(pair, "one setting cannot have both values")
        for pair in combinations(FEATURES, 2)
        if found.get(pair) != ""
    }


def occurring(model: str, cases: list[Case]) -> list[frozenset[str]]:
    """The features of every one of the model's layouts."""
    kind = MODELS[model].shape.kind
    return [present(c.layout, c.ranks, c.compiled, kind) for c in cases if c.model == model]


@pytest.mark.parametrize("model", IN_PAIRS)
def test_every_allowed_pair_of_features_occurs(model: str) -> None:
    found = {pair for names in occurring(model, CASES) for pair in pairs(names)}

    assert sorted(allowed(MODELS[model].shape.kind) - found) == []


@pytest.mark.parametrize(("model", "axes"), [*IN_PAIRS.items(), *AT_THE_ENDS.items()])
def test_every_workload_occurs_with_just_these_axes(model: str, axes: set[str]) -> None:
    found = {name for names in occurring(model, CASES) for name in names}

    assert found & EVERYTHING == axes


def test_compiled_blocks_occur_with_every_feature_and_at_night_with_every_pair_by_inductor() -> (
    None
):
    always = [present(c.layout, c.ranks) for c in CASES if c.compiled]
    night = [present(c.layout, c.ranks) for c in by_inductor(everything=True)]

    assert set(COMPILED) <= {name for names in always for name in names}
    missing = {
        pair for pair in combinations(COMPILED, 2) if not any({*pair} <= names for names in night)
    }
    assert missing == {
        *combinations(("zero1", "zero2", "zero3"), 2),
        ("full", "selective"),
    }


@pytest.mark.parametrize("model", IN_PAIRS)
def test_these_axes_are_all_that_the_structure_allows(model: str) -> None:
    layouts = every_layout(MODELS[model].shape.kind)

    possible = {name for names, rules in layouts if not rules for name in names}

    assert possible & EVERYTHING == IN_PAIRS[model]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_trained_at_night_alone_has_no_pair_and_no_layout_of_its_own(model: str) -> None:
    always, night = (
        {pair for names in occurring(model, table(everything)) for pair in pairs(names)}
        for everything in (False, True)
    )

    assert sorted(night - always) == []
    assert {(c.ranks, c.words) for c in table(True)} == {(c.ranks, c.words) for c in table(False)}


def test_every_pair_of_features_is_trained_by_day() -> None:
    day, night = (
        {pair for model in MODELS for names in occurring(model, cases) for pair in pairs(names)}
        for cases in (trained_table(), table())
    )

    assert sorted(night - day) == []


@pytest.mark.parametrize("model", sorted(MODELS.keys() - set(SMALL_LAYOUTS_BY_DAY)))
def test_every_axis_of_a_model_is_trained_by_day(model: str) -> None:
    day, night = (
        {name for names in occurring(model, cases) for name in names & AXES}
        for cases in (trained_table(), table())
    )

    assert sorted(night - day) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_feature_that_is_rounded_at_night_always_is(dtype: str) -> None:
    always, night = (
        {
            name
            for model in MODELS
            for names in occurring(model, [c for c in rounded(everything) if c.dtype == dtype])
            for name in names
        }
        for everything in (False, True)
    )

    assert sorted(night - always) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", IN_PAIRS if ALL else ROUNDED_MODELS & IN_PAIRS.keys())
def test_every_workload_is_rounded_along_every_axis(model: str, dtype: str) -> None:
    cases = [case for case in rounded() if case.dtype == dtype]

    found = {name for names in occurring(model, cases) for name in names}

    assert {"tp", "pp", "cp", "zero3", "full"} & IN_PAIRS[model] <= found


def test_masks_and_growing_batches_occur_with_every_kind_of_axis() -> None:
    for word, models in OTHER_DATA.items():
        cases = [case for case in CASES if word in case.words.split()]
        assert {case.model for case in cases} == models
        found = {name for model in models for names in occurring(model, cases) for name in names}
        assert {"dp", "pp"} <= found


def test_the_page_of_layouts_with_experts_is_current_and_leaves_nothing_unproved() -> None:
    text = expert_layouts.page()

    assert expert_layouts.PAGE.read_text("utf-8") == text
    # Hybrid sharding of all with ep, and gpt-oss in a ring with and without it.
    refused = len(expert_layouts.EXPERT_MODELS) + 2
    assert "not proved" not in text and text.count("refused: ") == refused


def structure(shape: Shape, lora: LoraSpec | None) -> tuple[dict[str, Any], Any]:
    """Everything but sizes: the switches of the shape, and which layers have adapters."""
    switches = {
        name: value
        for name, value in shape.model_dump().items()
        if isinstance(value, (str, bool)) or name in ("vocab_multiple", "position_offset")
    }
    grouped = shape.kv_heads < shape.num_heads
    experts = isinstance(shape, DecoderShape) and shape.num_experts > 1
    projected = isinstance(shape, DecoderShape) and shape.embed_dim < shape.hidden_size
    return (
        {**switches, "grouped": grouped, "projected": projected, "experts": experts},
        lora and (lora.targets, lora.train_rest),
    )


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_sibling_has_the_structure_of_one_of_the_models(name: str) -> None:
    recipe = load_recipe(name)

    found = [structure(model.shape, model.lora) for model in MODELS.values()]

    assert structure(recipe.model, recipe.lora) in found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_the_proportions_of_its_sibling(name: str) -> None:
    def proportions(shape: Shape) -> tuple[float, ...]:
        decoder = isinstance(shape, DecoderShape)
        width = shape.embed_dim if decoder else shape.hidden_size
        of_heads = shape.num_heads / shape.kv_heads
        return of_heads, shape.ffn_size / shape.hidden_size, width / shape.hidden_size

    model = MODELS[name]

    assert proportions(model.shape) == proportions(model.recipe.model)
    assert structure(model.shape, model.lora) == structure(model.recipe.model, model.recipe.lora)


def test_a_fault_of_their_own_is_put_into_every_workload_that_exchanges_what_no_other_does() -> (
    None
):
    assert {"lora", "sft", "flux"} <= {case.model for case in BROKEN}


def test_the_only_pairs_that_a_decoder_refuses_are_these() -> None:
    reasons = refused("decoder")

    assert {pair for pair, reason in reasons.items() if reason.startswith("one setting")} == {
        ("zero1", "zero2"),
        ("zero1", "zero3"),
        ("zero2", "zero3"),
    }
    assert reasons["zero1", "hybrid"].startswith("dp_shard needs zero_stage 2 or 3")
    assert reasons["zero-bubble", "full"].startswith("schedule zero-bubble cannot recompute")
    assert len(reasons) == 5
    assert set(reasons) | allowed("decoder") == set(combinations(FEATURES, 2))


@pytest.mark.parametrize("case", [*CASES, *by_inductor(True)], ids=lambda case: case.name)
def test_no_layout_of_the_table_is_one_that_a_user_would_be_refused(case: Case) -> None:
    model = MODELS[case.model]
    for batch in (GLOBAL_BATCH, RAMP_UP.start) if case.grows else (GLOBAL_BATCH,):
        sizes = case.layout, model.shape, case.ranks, batch

        assert layout_problems(ParallelRun(*sizes, model.seq_len)) == []
        assert native_problems(ParallelRun(*sizes, device="cpu", compiled=case.compiled)) == []


def test_the_table_has_about_thirty_layouts_on_two_to_eight_ranks() -> None:
    layouts = {(case.ranks, case.words) for case in CASES if case.ranks > 1}

    assert len(layouts) >= 30
    assert {ranks for ranks, _ in layouts} == {2, 3, 4, 8}
