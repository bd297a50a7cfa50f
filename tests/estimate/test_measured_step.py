"""A measured step compared with the estimate of the same run; different settings are refused."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.training import RampUp
from paceline.estimate.calibrate.calibration import calibration_path
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.refit import cpu_prior
from paceline.estimate.measured_step import (
    MeasuredRun,
    RequestedSettings,
    estimate_measured_run,
    measured_run,
    measured_sentence,
    request_for_run,
    with_expected_step_time,
    with_measurement,
)
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import software_of
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from paceline.runs.outcome import evaluate
from tests.example import make_spec
from tests.files.test_run_folder import make_record
from tests.layouts.sweep.test_prediction import calibrated
from tests.runs.example import write_run

LLAMA = EstimateRequest("llama31-8b", "H100-SXM", 8, software="torch")
ANSWER = estimate(LLAMA, shipped_evidence())


def gpu_run(seconds: float = 3.0, batch: int | None = None, **changes: object) -> MeasuredRun:
    """A run of the 8B model on eight H100, as its recipe has it but for `changes` of the spec."""
    spec = LLAMA.spec.model_copy(update=changes)
    whole = spec.training.global_batch
    return MeasuredRun("r", spec, seconds, 40, 0.01, batch or whole)


def report_of(tmp_path: Path, spec: RunSpec, seconds: float = 0.2) -> RunReport:
    """The report of a finished run of two ranks with that spec."""
    return evaluate(write_run(tmp_path / "runs", "r", seconds, spec=spec))


def ideal_s(answer: Estimate) -> float:
    """What the step's FLOPs take at the peak."""
    peak = answer.waterfall[0].flops_per_s
    return answer.flops_per_s_per_device * answer.step_time_s / peak


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.37, 40.0])
def test_all_seconds_lost_add_up_to_the_measured_step(factor: float):
    seconds = factor * ANSWER.step_time_s
    answer = with_measurement(ANSWER, seconds, "as stated")
    levels = answer.waterfall
    assert [level.name for level in levels[-3:]] == ["estimated", "unexplained", "measured"]
    assert ideal_s(ANSWER) + sum(level.lost_s for level in levels) == pytest.approx(seconds)
    assert levels[-2].lost_s == pytest.approx(seconds - ANSWER.step_time_s, abs=1e-12)
    assert levels[-1].flops_per_s * seconds == pytest.approx(
        ideal_s(ANSWER) * levels[0].flops_per_s
    )
    assert levels[-1].share == pytest.approx(levels[-1].flops_per_s / levels[0].flops_per_s)
    assert levels[:-2] == ANSWER.waterfall
    assert answer.measured and answer.measured.ratio == pytest.approx(factor)


def test_the_interval_holds_what_lies_between_its_ends():
    def held(seconds: float) -> bool:
        measured = with_measurement(ANSWER, seconds, "as stated").measured
        return measured is not None and measured.in_interval

    assert held(ANSWER.low_s) and held(ANSWER.high_s) and held(ANSWER.step_time_s)
    assert not held(ANSWER.low_s * 0.999) and not held(ANSWER.high_s * 1.001)


def test_a_run_of_the_trainer_is_estimated_as_it_was():
    run = gpu_run(seconds=ANSWER.step_time_s * 1.1)
    request = request_for_run(run)
    assert (request.software, request.native, request.compiled) == ("torch", True, False)
    answer = estimate_measured_run(run, request)
    assert answer.step_time_s == ANSWER.step_time_s and answer.layout == ANSWER.layout
    assert answer.measured and answer.measured.ratio == pytest.approx(1.1)
    assert (answer.measured.source, answer.measured.n) == ("run r", 40)
    text = measured_sentence(answer)
    assert (
        "1.100 times the estimate" in text
        and "inside its 80% interval" in text
        and "published step times" in text
    )


def test_settings_of_the_run_count_and_not_those_of_its_recipe():
    spec = gpu_run().spec
    full = spec.layout.model_copy(update={"recompute": "full"})
    slower = gpu_run(layout=full)
    assert (
        estimate_measured_run(slower, request_for_run(slower)).step_time_s
        > 1.1 * ANSWER.step_time_s
    )
    whole = spec.training.global_batch
    half = gpu_run(batch=whole // 2)
    assert (
        half.measured_spec.training.global_batch == whole // 2
        and half.spec.training.global_batch == whole
    )
    assert estimate_measured_run(half, request_for_run(half)).step_time_s < 0.7 * ANSWER.step_time_s


def test_another_engine_computes_as_it_is_said_to():
    run = gpu_run(engine="megatron")
    assert request_for_run(run).software == "fused" and not request_for_run(run).native
    softmax = request_for_run(run, RequestedSettings(software="softmax", compiled=True))
    assert softmax.software == "softmax" and softmax.compiled


def test_an_engine_of_known_software_is_estimated_by_it():
    run = gpu_run(engine="deepspeed_chat")
    asked = request_for_run(run)
    assert asked.software == "deepspeed"
    assert asked.resolved_software == software_of(run.spec)


def test_links_are_the_runs_own_or_those_that_are_given():
    bare = gpu_run()
    slow = request_for_run(bare, RequestedSettings(inter="10 GB/s", intra="50 GB/s"))
    assert (slow.intra_link, slow.inter_link) == ("50 GB/s", "10 GB/s")
    assert (
        estimate_measured_run(bare, slow).step_time_s
        > estimate_measured_run(bare, request_for_run(bare)).step_time_s
    )
    linked = bare.spec.cluster.model_copy(update={"intra_link": "NVLink4"})
    run = gpu_run(cluster=linked)
    assert request_for_run(run).intra_link == "NVLink4"
    with pytest.raises(UserError, match="link inside a node is NVLink4, not NVLink2"):
        request_for_run(run, RequestedSettings(intra="NVLink2"))
    with pytest.raises(UserError, match="--inter NVLink4: is a link inside a node"):
        request_for_run(bare, RequestedSettings(inter="NVLink4"))


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (RequestedSettings(recipe="llama31-70b"), "the recipe is llama31-8b, not llama31-70b"),
        (RequestedSettings(device="B200"), "the device is H100-SXM, not B200"),
        (RequestedSettings(devices=16), "the number of devices is 8, not 16"),
        (RequestedSettings(per_node=4), "devices per node is 8, not 4"),
        (RequestedSettings(variant="x"), "the variant is None, not x"),
        (RequestedSettings(overrides=("layout.tp=2",)), "layout.tp is 1, not 2"),
        (
            RequestedSettings(overrides=("seq_len=64", "dtype=fp16")),
            "is 8192, not 64; training.dtype is bf16",
        ),
        (RequestedSettings(software="softmax"), "the software is torch, not softmax"),
        (RequestedSettings(compiled=True), "training.compile is none"),
    ],
)
def test_what_differs_from_the_run_is_refused(claims: RequestedSettings, message: str):
    with pytest.raises(UserError, match=message):
        request_for_run(gpu_run(), claims)


def test_what_is_as_in_the_run_may_be_said():
    overrides = ("layout.tp=1", "training.dtype=bf16", "layout.sequence_parallel=false")
    claims = RequestedSettings("llama31-8b", "h100", 8, 8, None, overrides, software="torch")
    assert request_for_run(gpu_run(), claims) == request_for_run(gpu_run())


def test_a_recipe_that_is_no_more_is_known_by_its_name():
    run = gpu_run(recipe="gone")
    assert request_for_run(run, RequestedSettings(recipe="gone")).recipe == "gone"
    with pytest.raises(UserError, match="is unknown"):
        request_for_run(run, RequestedSettings(recipe="gome"))


def test_the_report_of_a_run_on_a_gpu_leads_from_the_peak_to_its_step(tmp_path: Path):
    cluster = Cluster(name="c", device="H100-SXM", devices_per_node=2)
    training = make_spec().training.model_copy(update={"dtype": "bf16"})
    spec = make_spec(cluster=cluster.model_dump(), training=training.model_dump())
    report = report_of(tmp_path, spec, 0.3)
    done = with_expected_step_time(report)
    assert done.waterfall[-1].name == "measured" and "published" in done.expected
    assert done.result == report.result and done.steps is report.steps
    step = report.result.metrics["step_time_s"].value
    answer = estimate_measured_run(measured_run(report), request_for_run(measured_run(report)))
    assert answer.measured and answer.measured.step_time_s == step == pytest.approx(0.3, rel=0.01)


def test_without_a_calibration_the_report_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    done = with_expected_step_time(report_of(tmp_path, make_spec()))
    assert done.waterfall == ()
    assert done.expected.startswith(
        "No expected step time: this CPU is not calibrated in fp32; run `paceline probe calibrate"
    )
    calibration_path("cpu", "fp32").parent.mkdir(parents=True)
    calibration_path("cpu", "fp32").write_text("{")
    assert (
        "does not contain a calibration; create one with `paceline probe calibrate`"
        in with_expected_step_time(report_of(tmp_path, make_spec())).expected
    )


def test_with_a_calibration_the_report_of_a_cpu_has_its_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = {"evidence": cpu_prior("fp32"), "host": platform.node()}
    write_value(calibration_path("cpu", "fp32"), calibrated(2, 1).model_copy(update=own))
    report = report_of(tmp_path, make_spec())
    done = with_expected_step_time(report)
    assert done.waterfall[-1].name == "measured" and "measured here" in done.expected
    seconds = report.result.metrics["step_time_s"].value
    answer = estimate_measured_run(measured_run(report), request_for_run(measured_run(report)))
    assert seconds is not None
    assert ideal_s(answer) + sum(one.lost_s for one in done.waterfall) == pytest.approx(seconds)
    threads = make_spec().cluster.model_copy(update={"threads_per_device": 4})
    other = report_of(tmp_path / "b", make_spec(cluster=threads.model_dump()))
    assert "1 thread per process, not 4" in with_expected_step_time(other).expected


def test_a_device_that_nobody_knows_leaves_the_report_as_it_was(tmp_path: Path):
    cluster = Cluster(name="c", device="Wonder-9000", devices_per_node=2)
    done = with_expected_step_time(report_of(tmp_path, make_spec(cluster=cluster.model_dump())))
    assert not done.waterfall and "is not in the catalog" in done.expected


def test_a_run_without_a_figure_is_left_alone_and_refused(tmp_path: Path):
    folder = write_run(tmp_path, "short", steps=3, spec=make_spec())
    report = evaluate(folder)
    assert with_expected_step_time(report) == report
    with pytest.raises(UserError, match="has no step time; its status is incomplete: 3 steady"):
        measured_run(report)


def test_the_batch_of_the_timed_steps_counts(tmp_path: Path):
    spec = make_spec()
    folder = write_run(tmp_path, "ramp", spec=spec)
    training = spec.training.model_copy(
        update={"global_batch": 16, "ramp_up": RampUp(start=8, increment=8, samples=10_000)}
    )
    growing = spec.model_copy(update={"training": training})
    write_value(folder / RUN_FILE, make_record(name="ramp", spec=growing.model_dump()))
    run = measured_run(evaluate(folder))
    assert run.spec.training.global_batch == 16
    assert run.global_batch == run.measured_spec.training.global_batch == 8
