"""The trainer and whoever starts it speak of a layout by the same names and know the same limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import ConfigError, config_problems, layout_features, parse_config
from paceline.core.layout import RULES, Layout, Sizes, features, native_problems, whole_stages
from stages import schedule_problems, stage_layers
from tests.native.example import settings
from tests.refused import AROUND, CASES
from tests.shapes import LLAMA_8B

sizes = st.integers(1, 4)
layouts = st.builds(
    Layout,
    tp=sizes,
    pp=sizes,
    cp=sizes,
    vp=sizes,
    ep=st.integers(1, 2),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    sequence_parallel=st.booleans(),
    dp_shard=st.none() | st.integers(1, 16),
    cp_exchange=st.sampled_from(["all-gather", "all-to-all", "ring"]),
)


def raw(layout: Layout, dp: int = 1, **changes: Any) -> dict[str, Any]:
    return settings(**{"layout": layout.model_dump(mode="json"), "dp": dp, **changes})


@given(
    layout=layouts, dp=sizes, compiled=st.booleans(), tied=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]), device=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_the_trainer_derives_the_same_features(
    layout: Layout, dp: int, compiled: bool, tied: bool, dtype: str, device: str
) -> None:
    changes = {"compile": "blocks" if compiled else "none", "tied_embeddings": tied}
    config = parse_config(raw(layout, dp, dtype=dtype, device=device, **changes))

    assert layout_features(config) == features(
        layout, dp * layout.model_devices, dtype=dtype, device=device, compiled=compiled, tied=tied
    )
    assert config.world_size == dp * layout.model_devices


@pytest.mark.parametrize(("rule", "fields"), CASES)
def test_every_rule_reaches_the_trainer(rule: Any, fields: dict[str, Any]) -> None:
    around = {key: fields[key] for key in AROUND if key in fields}
    layout = Layout(**{key: value for key, value in fields.items() if key not in AROUND})
    config = parse_config(raw(layout, layout.dp(2), **around))

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
    pp=st.integers(2, 8), vp=sizes, num=st.integers(1, 40),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
)  # fmt: skip
def test_a_schedule_takes_the_micro_batches_that_were_promised(
    pp: int, vp: int, num: int, schedule: Any
) -> None:
    layout = Layout(pp=pp, vp=vp, schedule=schedule)
    promised = native_problems(layout, LLAMA_8B, pp, num)

    assert bool(promised) == bool(schedule_problems(schedule, pp, vp, num))


@given(layers=st.integers(1, 130), pp=st.integers(1, 8), vp=sizes)
def test_stages_hold_the_layers_that_were_promised(layers: int, pp: int, vp: int) -> None:
    shape = LLAMA_8B.model_copy(update={"num_layers": layers})
    try:
        stages = stage_layers(layers, pp, vp)
    except ValueError:
        stages = []

    assert bool(stages) == (whole_stages(Sizes(Layout(pp=pp, vp=vp), shape, pp, pp)) is None)
    assert not stages or [i for stage in stages for i in stage] == list(range(layers))
