"""The trainer and what starts it know the same limits of a layout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from paceline.core.axes.pipeline import whole_stages
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems, native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import stage_sizes
from paceline.core.shape import DecoderShape
from paceline.trainer.config import parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.parallel.stages import schedule_problems, stage_layers
from tests.core.shapes import LLAMA_8B
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
    "expert_groups",
    "groups_per_token",
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
def test_the_trainer_refuses_nothing_that_is_not_refused_before_it_starts(
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
    given_in["model"]["padded_vocab"] = shape.padded_vocab(layout.tp)

    assert before or not config_problems(parse_config(given_in), world)


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        (Layout(tp=2), {"vocab_size": 401}, "padded_vocab 401: tp 2 does not divide it"),
        (Layout(tp=2), {"ffn_size": 65}, "ffn_size 65: tp 2 does not divide it"),
        (Layout(tp=8), {}, "key/value heads 2: tp 8 does not divide it"),
        (Layout(cp=2), {"seq_len": 30}, "seq_len 30: 2 x cp 4 does not divide it"),
        (
            Layout(pp=2, vp=2, schedule="interleaved"),
            {"num_microbatches": 5, "num_layers": 4},
            "schedule interleaved with pp 2 cannot split 5 micro-batches into 2 equal rounds",
        ),
        (Layout(zero_stage=3, dp_shard=3), {}, "dp x cp 1: dp_shard 3 does not divide it"),
    ],
)
def test_sizes_that_would_train_something_else_are_named(
    layout: Layout, changes: dict[str, Any], sentence: str
) -> None:
    config = parse_config(raw(layout, **changes))

    assert any(p.startswith(sentence) for p in config_problems(config, layout.model_devices))
