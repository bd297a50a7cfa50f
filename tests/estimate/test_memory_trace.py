"""A layout's memory in a traced step of the trainer, compared with the memory model."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.estimate.memory_trace import trace
from paceline.estimate.request import EstimateRequest

WIDER = ("model.hidden_size=256", "model.ffn_size=1024", "training.dtype=bf16")


def request(*overrides: str, devices: int = 4) -> EstimateRequest:
    return EstimateRequest("gpt-1b3-tiny", "A100", devices, overrides=(*WIDER, *overrides))


def test_ranks_of_a_pipeline_are_followed_where_most_is_kept() -> None:
    tracing = trace(request("layout.pp=4", "layout.tp=1", "layout.vp=1", devices=8))
    assert [stage.stage for stage in tracing.stages] == [0, 1, 3]
    assert [stage.trace.rank for stage in tracing.stages] == [0, 2, 6]
    assert tracing.largest.trace.peak_bytes == max(s.trace.peak_bytes for s in tracing.stages)
    assert all(stage.trace.kernels == "cuda" for stage in tracing.stages)


def test_the_estimate_of_states_is_what_the_trace_holds() -> None:
    only = trace(request("layout.zero_stage=3", "layout.tp=1")).largest
    held = {name: only.trace.parts_bytes[name] for name in ("weights", "optimizer")}
    assert held == pytest.approx({name: only.estimated_parts[name] for name in held}, rel=0.01)


def test_a_layout_that_cannot_run_is_refused_before_anything_is_followed() -> None:
    with pytest.raises(UserError, match="tp"):
        trace(request("layout.tp=3", devices=8))
