"""What is expected of layouts on devices of the catalog, and which are not worth running."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.estimate.calibrate.calibration import Calibration, Placement, calibration_path
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.memory.device_memory import DEFAULT_CONTEXT_BYTES, verdict
from paceline.estimate.model.machine import machine
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.files.documents import write_value
from paceline.layouts.sweep import prediction
from paceline.layouts.sweep.prediction import predict, prune_reasons
from paceline.layouts.sweep.result import Prediction
from tests.estimate.given import SHIPPED
from tests.example import make_spec


def spec(device: str = "H100", devices: int = 8, **layout: Any) -> RunSpec:
    overrides = tuple(f"layout.{key}={value}" for key, value in layout.items())
    return EstimateRequest("llama31-8b", device, devices, overrides=overrides).spec


def expected(
    step_time_s: float = 1.0, p_oom: float = 0.0, memory_bytes: float = 50e9
) -> Prediction:
    return Prediction(
        step_time_s=step_time_s,
        low_s=step_time_s * 0.9,
        high_s=step_time_s * 1.1,
        memory_bytes=memory_bytes,
        p_oom=p_oom,
        memory=verdict(p_oom),
    )


def test_a_prediction_is_the_estimate_of_the_stack_that_the_native_trainer_is():
    (predicted,) = predict([spec(micro_batch=1)], SHIPPED)
    question = EstimateRequest(
        "llama31-8b",
        "H100-SXM",
        8,
        overrides=("layout.micro_batch=1",),
        software="torch",
        native=True,
    )
    alone = estimate(question, shipped_evidence())
    assert predicted.step_time_s == pytest.approx(alone.step_time_s)
    assert (predicted.low_s, predicted.high_s) == pytest.approx((alone.low_s, alone.high_s))
    assert predicted.low_s < predicted.step_time_s < predicted.high_s and 0 <= predicted.p_oom <= 1
    # Its memory is the native trainer's, not that of torchtitan, which computes alike.
    assert predicted.memory_bytes == alone.memory_bytes.device_used
    assert predicted.p_oom == alone.p_oom
    titan = estimate(replace(question, native=False), shipped_evidence())
    assert predicted.memory_bytes != titan.memory_bytes.device_used


def test_recomputation_is_expected_to_cost_time_and_to_save_memory():
    none, full = predict([spec(recompute="none"), spec(recompute="full")], SHIPPED)
    assert full.step_time_s > none.step_time_s and full.memory_bytes < none.memory_bytes


def test_nothing_is_expected_of_a_processor_that_is_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(UserError, match="not calibrated in fp32; run `paceline probe calibrate"):
        predict([make_spec(), make_spec()], None)
    assert predict([], None) == []


def calibrated(ranks: int, threads: int, flops_per_s: float = 5e10) -> Calibration:
    placement = Placement(
        ranks=ranks,
        threads=threads,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=1e10,
        link_bytes_per_s=2e9,
    )
    return Calibration(
        device="cpu",
        kind="cpu",
        catalog_device="cpu",
        dtype="fp32",
        host="h",
        date="2026-01-01",
        torch="2.13.0",
        cores=2,
        memory_bytes=16e9,
        placements=(placement,),
        probes=4,
        steps=(),
        undetermined_coefficients=(),
        inseparable_coefficients=(),
        evidence=shipped_evidence(),
    )


def test_a_calibrated_processor_has_expectations_that_follow_its_measured_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = make_spec()
    cluster = run.cluster.model_copy(update={"threads_per_device": 1, "device_label": None})
    run = run.model_copy(update={"cluster": cluster})
    ranks = run.world_size
    times: list[float] = []
    for rate in (5e10, 1e10):
        write_value(calibration_path("cpu", run.training.dtype), calibrated(ranks, 1, rate))
        (predicted,) = predict([run], None)
        assert predicted.low_s < predicted.step_time_s < predicted.high_s
        times.append(predicted.step_time_s)
    assert times[1] > 1.2 * times[0]
    write_value(calibration_path("cpu", run.training.dtype), calibrated(ranks, 2))
    with pytest.raises(UserError, match="2 threads per process, not 1"):
        predict([run], None)
    two = cluster.model_copy(update={"nodes": 2})
    apart = run.model_copy(update={"cluster": two})
    with pytest.raises(UserError, match="network between hosts"):
        predict([apart], None)
    narrow = run.model_copy(update={"training": run.training.model_copy(update={"dtype": "bf16"})})
    write_value(calibration_path("cpu", run.training.dtype), calibrated(ranks, 1))
    assert len(predict([run, run], None)) == 2
    with pytest.raises(UserError, match="these runs use several"):
        predict([run, narrow], None)


def test_each_run_is_held_against_its_own_share_of_the_memory():
    large = spec(micro_batch=1)
    little = large.cluster.model_copy(update={"device_memory_bytes": 20e9})
    small = large.model_copy(update={"cluster": little})
    together = predict([large, small], SHIPPED)
    apart = [predict([run], SHIPPED)[0] for run in (large, small)]
    assert together[0].p_oom < together[1].p_oom
    for beside, alone in zip(together, apart, strict=True):
        numbers = [each.model_dump(exclude={"memory"}) for each in (beside, alone)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-12)


def test_a_recipes_own_limit_counts_where_the_device_has_more():
    large = spec(micro_batch=1)
    roomy = large.cluster.model_copy(update={"device_memory_bytes": 400e9})
    free = large.model_copy(update={"cluster": roomy})
    held = free.model_copy(update={"memory_limit_bytes": 40e9})
    first, second = predict([free, held], SHIPPED)
    assert first.p_oom < 0.01 and second.p_oom > 0.99
    assert first.memory_bytes == second.memory_bytes


def test_the_devices_own_context_counts(monkeypatch: pytest.MonkeyPatch):
    small = predict([spec(micro_batch=1)], SHIPPED)[0].memory_bytes
    h100 = machine("H100")
    large = replace(h100, device=h100.device.model_copy(update={"context_bytes": 5e9}))
    monkeypatch.setattr(prediction, "machine_for", lambda *_, **__: large)
    usual = DEFAULT_CONTEXT_BYTES
    assert predict([spec(micro_batch=1)], SHIPPED)[0].memory_bytes - small == 5e9 - usual


def test_what_surely_runs_out_of_memory_is_hopeless_with_its_need():
    first, second = prune_reasons(
        [expected(), expected(p_oom=0.99, memory_bytes=100 * 2**30)], [1, 1], 80 * 2**30
    )
    assert first is None
    assert second == (
        "OOM probability 99%, above --prune-above 0.95: needs about 100.00 GiB of 80.00 GiB"
    )


def test_the_bound_of_pruning_is_the_one_that_was_asked_for():
    borderline = [expected(), expected(p_oom=0.4)]
    assert prune_reasons(borderline, [1, 1], None) == [None, None]
    _, why = prune_reasons(borderline, [1, 1], None, prune_above=0.25)
    assert why is not None and why.startswith("OOM probability 40%, above --prune-above 0.25")


def test_another_stack_has_its_own_times_and_memory():
    runs = [spec(micro_batch=1, zero_stage=1)]
    (own,), (megatron,) = predict(runs, SHIPPED), predict(runs, SHIPPED, "softmax")
    alone = estimate(
        EstimateRequest(
            "llama31-8b",
            "H100-SXM",
            8,
            overrides=("layout.micro_batch=1", "layout.zero_stage=1"),
            software="softmax",
        ),
        shipped_evidence(),
    )
    assert megatron.step_time_s == pytest.approx(alone.step_time_s)
    assert megatron.memory_bytes == alone.memory_bytes.device_used != own.memory_bytes
    with pytest.raises(UserError, match="applies to GPUs only"):
        predict([make_spec()], SHIPPED, "softmax")


def test_what_is_slower_at_its_best_than_twice_the_fastest_at_its_worst_is_hopeless():
    assert prune_reasons([expected(1.0), expected(2.4)], [1, 1], None) == [None, None]
    _, why = prune_reasons([expected(1.0), expected(2.6)], [1, 1], None)
    assert why is not None and "times slower than the fastest" in why


def test_larger_batches_may_take_longer():
    assert prune_reasons([expected(1.0), expected(4.0)], [1000, 4000], None) == [None, None]


def test_a_fast_layout_that_will_not_fit_makes_no_other_hopeless():
    assert prune_reasons([expected(0.1, p_oom=0.8), expected(1.0)], [1, 1], None) == [None, None]


def test_without_predictions_nothing_is_hopeless():
    assert prune_reasons([None, None], [1, 1], None) == [None, None]
