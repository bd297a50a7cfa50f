"""Metrics say what they are, and are None with a reason rather than invented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.flops import CONVENTIONS, FlopsInput, flops_per_token
from paceline.core.metrics import METRICS, measure
from paceline.core.run import RunSettings, RunSpec
from paceline.core.timed_run import TimedRun, timed_run
from tests.core.shapes import FLUX, LLAMA_8B, OPT_350M
from tests.example import make_spec, make_steps


def run(spec: RunSpec | None = None, times: list[float] | None = None, **fields: float) -> TimedRun:
    spec = spec or make_spec()
    times = times or [0.5] * 20
    tokens = float(spec.training.global_batch * spec.training.seq_len)
    n = len(times)
    steps = make_steps(
        times,
        tokens=[tokens] * n,
        global_batch=[float(spec.training.global_batch)] * n,
        seq_len=[32.0] * n,
        loss=[3.0] * n,
        resident_bytes=[1e9] * n,
        comm_wait_s=[0.1] * n,
        data_wait_s=[0.0] * n,
    )
    return timed_run(RunSettings.of(spec), steps, steps, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_a_unit_and_a_description(name: str):
    assert measure(run())[name].unit
    assert METRICS[name].describes.endswith(".")


def test_throughput_follows_from_the_step_time():
    metrics = measure(run())
    assert metrics["tokens_per_s"].value == pytest.approx(8 * 32 / 0.5)
    assert metrics["samples_per_s"].value == pytest.approx(8 / 0.5)
    assert metrics["tokens_per_s_per_device"].value == pytest.approx(8 * 32 / 0.5 / 2)


def test_the_mean_pays_for_spikes_and_the_median_does_not():
    metrics = measure(run(times=[0.5] * 19 + [1.5]))
    assert metrics["step_time_s"].value == 0.5
    assert metrics["step_time_mean_s"].value == pytest.approx(0.55)
    assert metrics["jitter_overhead"].value == pytest.approx(0.1)


def test_without_a_data_sheet_there_is_no_mfu_but_a_reason():
    mfu = measure(run())["mfu"]
    assert mfu.value is None and mfu.note is not None and "no data-sheet peak for cpu" in mfu.note


def test_mfu_is_model_flops_over_the_peak():
    spec = make_spec()
    flops = flops_per_token("causal", FlopsInput(spec.model, 32)) * 8 * 32
    metrics = measure(run(peak_flops_per_s=1e9))
    assert metrics["mfu"].value == pytest.approx(flops / 0.5 / 2 / 1e9)
    assert metrics["mfu"].convention == "causal"


def test_full_recomputation_raises_hfu_and_not_mfu():
    plain = measure(run(peak_flops_per_s=1e9))
    layout = make_spec().layout.model_copy(update={"recompute": "full"})
    again = measure(run(make_spec(layout=layout), peak_flops_per_s=1e9))
    assert plain["hfu"].value == plain["mfu"].value == again["mfu"].value
    assert again["hfu"].value is not None and plain["hfu"].value is not None
    assert 1.1 < again["hfu"].value / plain["hfu"].value < 4 / 3


def test_of_achievable_counts_all_devices_together():
    metrics = measure(run(achievable_flops_per_s=1e9))
    rate = metrics["model_flops_per_s_per_device"].value
    assert rate is not None and metrics["achievable_fraction"].value == pytest.approx(
        2 * rate / 1e9
    )
    assert measure(run())["achievable_fraction"].value is None


def test_memory_that_the_device_does_not_report_is_unknown_and_not_zero():
    metrics = measure(run())
    assert metrics["memory_resident_bytes"].value == 1e9
    assert metrics["memory_allocated_bytes"].value is None


def test_days_need_a_total():
    training = make_spec().training.model_copy(update={"total_tokens": None})
    assert measure(run(make_spec(training=training)))["days_to_train"].value is None
    days = measure(run())["days_to_train"]
    assert days.value == pytest.approx(1e12 / (8 * 32 / 0.5) / 86_400)


def test_an_interval_says_of_what_kind_it_is():
    step_time = measure(run(times=[0.5, 0.51] * 10))["step_time_s"]
    assert step_time.low is not None and step_time.interval is not None
    assert "within-run" in step_time.interval


def test_a_rates_interval_is_the_step_times_turned_round():
    metrics = measure(run(times=[0.5, 0.52, 0.51] * 10))
    step, rate = metrics["step_time_s"], metrics["samples_per_s"]
    assert step.low is not None and rate.high == pytest.approx(8 / step.low)


@pytest.mark.parametrize(("source", "real"), [("synthetic", 8), ("jsonl", 32)])
def test_tokens_are_counted_where_the_data_is_real_and_stated_where_it_is_not(
    source: str, real: int
):
    """The ranks counted every position of these steps; the recipe states 8 of 32."""
    data = make_spec().data.model_copy(update={"real_tokens_per_sample": 8.0, "source": source})
    metrics = measure(run(make_spec(data=data)))
    assert metrics["real_token_fraction"].value == pytest.approx(real / 32)
    assert metrics["tokens_per_s"].value == pytest.approx(8 * real / 0.5)
    assert metrics["padded_tokens_per_s"].value == pytest.approx(8 * 32 / 0.5)


def test_flops_count_the_pairs_that_documents_leave():
    spec = make_spec()
    whole = measure(run(spec))
    steps = make_steps([0.5] * 20, samples=[8.0] * 20, attended_share=[0.25, 0.75] * 10)
    masked = measure(timed_run(RunSettings.of(spec), steps, steps))
    x = RunSettings.of(spec).flops_input
    assert x is not None
    per_token = flops_per_token("causal", replace(x, attended_share=0.5))

    assert whole["attended_share"].value is None
    assert masked["attended_share"].value == pytest.approx(0.5)
    ratio = per_token / flops_per_token("causal", x)
    assert ratio < 1
    for name in ("model_flops_per_s_per_device", "hardware_flops_per_s_per_device"):
        before, after = whole[name].value, masked[name].value
        assert before is not None and after == pytest.approx(ratio * before)


def test_padding_that_nobody_counted_leaves_the_text_unknown():
    padded = RunSettings.of(make_spec()).model_copy(
        update={"origin": "imported", "packing": "padded"}
    )
    steps = make_steps([0.5] * 20, global_batch=[8.0] * 20, seq_len=[32.0] * 20)
    metrics = measure(timed_run(padded, steps, steps))
    assert metrics["tokens_per_s"].value is None
    assert metrics["padded_tokens_per_s"].value == pytest.approx(8 * 32 / 0.5)
    packed = padded.model_copy(update={"packing": None})
    assert measure(timed_run(packed, steps, steps))["tokens_per_s"].value == 8 * 32 / 0.5


@pytest.mark.parametrize(
    ("facts", "headline", "batch_unit"),
    [
        (RunSettings(), "tokens_per_s", "sequence"),
        (RunSettings(packing="packed", model=LLAMA_8B), "tokens_per_s", "sequence"),
        (RunSettings(packing="padded", model=OPT_350M), "samples_per_s", "sample"),
        (RunSettings(packing="packed", model=FLUX), "samples_per_s", "sample"),
    ],
)
def test_the_workload_says_what_its_speed_is_stated_in(
    facts: RunSettings, headline: str, batch_unit: str
):
    assert (facts.headline, facts.batch_unit) == (headline, batch_unit)


def test_published_samples_per_second_are_those_of_the_mean_step():
    times = [0.5] * 29 + [3.5]
    metrics = measure(run(times=times))
    assert metrics["samples_per_s"].value == pytest.approx(8 / 0.5)
    assert metrics["samples_per_s_mean"].value == pytest.approx(8 * 30 / sum(times))
    assert metrics["samples_per_s_mean"].n == 30


def test_mfu_never_counts_recomputation_whatever_the_convention():
    layout = make_spec().layout.model_copy(update={"recompute": "full"})
    for convention in CONVENTIONS:
        plain = make_spec(flops_convention=convention)
        again = make_spec(flops_convention=convention, layout=layout)
        before, after = (measure(run(s, peak_flops_per_s=1e9)) for s in (plain, again))
        assert before["mfu"].value == after["mfu"].value
        assert (after["hfu"].value or 0) > (before["hfu"].value or 0)
        assert (after["mfu"].convention, before["hfu"].convention) == (convention, convention)
        assert after["hfu"].convention == f"{convention}+recompute"
        assert after["hardware_flops_per_s_per_device"].convention == f"{convention}+recompute"


def test_half_a_printed_digit_belongs_to_the_interval():
    plain, printed = (measure(run(times=[2.3] * 40, resolution_s=r)) for r in (0.0, 0.1))
    assert (plain["step_time_s"].low, plain["step_time_s"].high) == (2.3, 2.3)
    step, rate = printed["step_time_s"], printed["samples_per_s"]
    assert (step.low, step.high) == (pytest.approx(2.25), pytest.approx(2.35))
    assert (rate.low, rate.high) == (pytest.approx(8 / 2.35), pytest.approx(8 / 2.25))
    assert step.interval is not None and "half a printed digit" in step.interval
