"""The trainer and what starts it speak of a layout by the same names and know the same limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from paceline.core.axes.pipeline import whole_stages
from paceline.core.layout import Layout
from paceline.core.layout_checks import RULES, features, layout_problems, native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import stage_sizes
from paceline.core.recompute import block_levels
from paceline.core.shape import DecoderShape
from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.config_checks import config_problems, layout_features
from paceline.trainer.parallel.stages import schedule_problems, stage_layers
from tests.core.refused import AROUND, CASES, layout_of
from tests.core.shapes import FLUX, LLAMA_8B
from tests.trainer.example import settings

sizes = st.integers(1, 4)
layouts = st.builds(
    Layout,
    tp=sizes,
    pp=sizes,
    cp=sizes,
    vp=sizes,
    ep=st.integers(1, 2),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full", "budget"]),
    recompute_budget=st.none() | st.floats(0, 1),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    sequence_parallel=st.booleans(),
    dp_shard=st.none() | st.integers(1, 16),
    cp_exchange=st.sampled_from(["all-gather", "all-to-all", "ring"]),
    gradient_sync=st.sampled_from([None, "every", "last"]),
)


def raw(layout: Layout, dp: int = 1, **changes: Any) -> dict[str, Any]:
    return settings(**{"layout": layout.model_dump(mode="json"), "dp": dp, **changes})


@given(
    layout=layouts,
    dp=sizes,
    compiled=st.booleans(),
    tied=st.booleans(),
    by_document=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_the_trainer_derives_the_same_features(
    layout: Layout, dp: int, compiled: bool, tied: bool, by_document: bool, dtype: str, device: Any
) -> None:
    changes = {"compile": "blocks" if compiled else "none", "tied_embeddings": tied}
    changes["document_mask"] = by_document
    config = parse_config(raw(layout, dp, dtype=dtype, device=device, **changes))

    assert layout_features(config) == features(
        ParallelRun(
            layout,
            LLAMA_8B.model_copy(update={"tied_embeddings": tied}),
            dp * layout.model_devices,
            dtype=dtype,
            device=device,
            compiled=compiled,
            document_mask=by_document,
        )
    )
    assert config.world_size == dp * layout.model_devices


@pytest.mark.parametrize(("rule", "fields"), CASES)
def test_every_rule_reaches_the_trainer(rule: Any, fields: dict[str, Any]) -> None:
    around = {key: fields[key] for key in AROUND if key in fields and key != "kind"}
    layout = layout_of(fields)
    written = raw(layout, layout.dp(2), **around)
    if fields.get("kind") == "mmdit":
        written["model"] = FLUX.model_dump(mode="json")
    config = parse_config(written)

    assert rule.reason in config_problems(config, world_size=2)


def test_rules_travel_with_the_settings() -> None:
    config = parse_config(settings())

    assert [(rule.features, rule.reason) for rule in config.layout_rules] == [
        (rule.features, rule.reason) for rule in RULES
    ]


@pytest.mark.parametrize("rules", [None, "tp", [{"features": ["tp"]}], [3]])
def test_rules_that_are_none_are_refused(rules: Any) -> None:
    with pytest.raises(ConfigError, match="layout_rules: "):
        parse_config({**settings(), "layout_rules": rules})


@given(
    pp=st.integers(2, 8),
    vp=sizes,
    num=st.integers(1, 40),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
)
def test_a_schedule_takes_the_micro_batches_that_were_promised(
    pp: int, vp: int, num: int, schedule: Any
) -> None:
    layout = Layout(pp=pp, vp=vp, schedule=schedule)
    promised = native_problems(ParallelRun(layout, LLAMA_8B, pp, num))

    assert bool(promised) == bool(schedule_problems(schedule, pp, vp, num))


@given(layers=st.integers(1, 130), pp=st.integers(1, 8), vp=sizes)
def test_stages_hold_the_layers_that_were_promised(layers: int, pp: int, vp: int) -> None:
    shape = LLAMA_8B.model_copy(update={"num_layers": layers})
    try:
        stages = stage_layers(layers, pp, vp)
    except ValueError:
        stages = []

    assert bool(stages) == (whole_stages(ParallelRun(Layout(pp=pp, vp=vp), shape, pp, pp)) is None)
    assert not stages or [i for stage in stages for i in stage] == list(range(layers))
    assert not stages or [len(stage) for stage in stages] == stage_sizes(layers, pp, vp)


def mended(layout: Layout) -> Layout:
    """The layout without what rules refuse, so that its sizes decide."""
    pp, zero_bubble = layout.pp > 1, layout.schedule == "zero-bubble"
    by_budget = layout.recompute == "budget"
    alternating = layout.schedule == "interleaved" and layout.vp == 1
    return layout.model_copy(
        update={
            "ep": 1,
            "vp": layout.vp if pp else 1,
            "schedule": layout.schedule if pp and not alternating else "1f1b",
            "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
            "cp_exchange": layout.cp_exchange if layout.cp > 1 else "all-gather",
            "dp_shard": layout.dp_shard if layout.zero_stage > 1 else None,
            "recompute": "none" if zero_bubble else layout.recompute,
            "recompute_budget": 0.5 if by_budget and not zero_bubble else None,
            "gradient_sync": None,
        }
    )


EXPERTS = {
    "num_experts",
    "experts_per_token",
    "shared_ffn_size",
    "latent_attention",
    "first_dense_layers",
    "dense_ffn_size",
    "mtp_layers",
}
"""Of a model, which the trainer does not read."""
shapes = st.builds(
    lambda kv_heads, groups, **sizes: DecoderShape(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * groups,
        hidden_size=64,
        max_positions=4096,
        positions="learned",
        **sizes,
    ),
    kv_heads=sizes,
    groups=sizes,
    head_size=st.sampled_from([8, 12, 264]),
    num_layers=st.sampled_from([1, 2, 4, 7, 10, 12, 22]),
    ffn_size=st.sampled_from([65, 72, 96]),
    vocab_size=st.sampled_from([401, 480]),
    vocab_multiple=st.sampled_from([1, 2]),
    dropout=st.sampled_from([0.0, 0.1]),
    attention_dropout=st.sampled_from([None, 0.0, 0.2]),
)


@settings_of_hypothesis(max_examples=400)
@given(
    layout=layouts | layouts.map(mended),
    shape=shapes,
    dp=sizes,
    num=st.integers(1, 9),
    compiled=st.booleans(),
    seq_len=st.sampled_from([30, 45, 48, 96]),
    device=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(["bf16", "fp8"]),
)
def test_the_trainer_refuses_exactly_what_is_refused_before_it_starts(
    layout: Layout,
    shape: DecoderShape,
    dp: int,
    num: int,
    seq_len: int,
    device: Any,
    compiled: bool,
    dtype: str,
) -> None:
    world, batch = dp * layout.model_devices, dp * layout.micro_batch * num
    before = layout_problems(ParallelRun(layout, shape, world, batch, seq_len)) + native_problems(
        ParallelRun(layout, shape, world, batch, dtype=dtype, device=device, compiled=compiled)
    )
    given_in = raw(
        layout,
        dp,
        dtype=dtype,
        device=device,
        compile="blocks" if compiled else "none",
        num_microbatches=num,
        global_batch=batch,
        seq_len=seq_len,
        **shape.model_dump(exclude=EXPERTS),
    )
    given_in["recompute_levels"] = block_levels(shape, layout)
    given_in["model"]["padded_vocab"] = shape.padded_vocab(layout.tp)

    assert bool(config_problems(parse_config(given_in), world)) == bool(before)


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        (Layout(tp=2), {"vocab_size": 401}, "padded_vocab 401: tp 2 does not divide it"),
        (Layout(tp=2), {"ffn_size": 65}, "ffn_size 65: tp 2 does not divide it"),
        (Layout(tp=8), {}, "key/value heads 2: tp 8 does not divide it"),
        (Layout(cp=2), {"seq_len": 30}, "seq_len 30: 2 x cp 4 does not divide it"),
        (Layout(pp=3), {"num_layers": 2}, "pp 3 x vp 1 divides neither 2 layers"),
        (
            Layout(pp=2, vp=2, schedule="interleaved"),
            {"num_microbatches": 5, "num_layers": 4},
            "interleaved over pp 2 runs 5 micro-batches in 2 rounds",
        ),
        (Layout(zero_stage=3, dp_shard=3), {}, "dp x cp 1: dp_shard 3 does not divide it"),
        (
            Layout(),
            {"ffn_size": 72, "dtype": "fp8", "device": "cuda"},
            "ffn_size: a rank's matrices are 72 wide",
        ),
        (
            Layout(tp=2),
            {"num_kv_heads": 2, "head_size": 8, "dtype": "fp8", "device": "cuda"},
            "key/value heads: a rank's matrices are 8 wide",
        ),
    ],
)
def test_sizes_that_would_train_something_else_are_named(
    layout: Layout, changes: dict[str, Any], sentence: str
) -> None:
    config = parse_config(raw(layout, **changes))

    assert any(p.startswith(sentence) for p in config_problems(config, layout.model_devices))
