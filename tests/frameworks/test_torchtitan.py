"""torchtitan for real: FSDP2 on two processes of a CPU, from plan to result."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.layout import Layout
from paceline.engines import engine
from paceline.runs import flow
from paceline.runs.plan import Plan
from paceline.runs.profiling import with_profile, write_profile
from tests.example import make_spec


def test_a_sharded_llama_trains_and_is_measured(tmp_path: Path):
    spec = make_spec(engine="torchtitan", layout=Layout(micro_batch=2, zero_stage=3))
    titan = engine("torchtitan")
    if missing := titan.missing(spec):
        pytest.skip(missing)
    assert titan.unsupported(spec) == []
    # Steps as asked for: the profiled ones and ten behind them.
    plan = with_profile(Plan(spec, titan.job(spec, "x"), {}), "torch", [0], 9, 10)
    report = flow.run(plan, tmp_path, ["x"], lambda _: None, probe=False)
    result = report.result
    assert result.status == "ok", result.reason
    assert (result.steps_done, result.steps_requested) == (20, 20)
    assert result.num_parameters == spec.num_parameters
    log = (Path(report.folder) / "logs" / "rank-00000.log").read_text()
    assert "dp_shard=2" in log and "gradient accumulation steps 2" in log
    assert "Applied FSDP to the model" in log
    tokens_per_s = result.metrics["tokens_per_s"].value
    assert tokens_per_s and result.window is not None and result.window.rule != "as printed"
    profile = write_profile(report)
    assert profile.steps == (9, 10) and profile.parts["gemm"] > 0
    assert profile.parts["communication_exposed"] > 0 and profile.parts["optimizer"] > 0
    losses = report.steps["loss"]
    assert losses[-1] < losses[0]
    assert not [warning for warning in result.warnings if "but the plan" in warning]
