"""The sentences that all forms of the report share."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest

from paceline.core.result import RunVerdict, Status, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.shape import LoraSpec, trainable_parameters
from paceline.core.units import count
from paceline.report import run_description as page
from paceline.report.run_description import describe_setup
from paceline.report.run_document import run_verdict
from tests.report.example import STATUSES, failed_report, report


def window(**fields: object) -> WindowRecord:
    """A window of steps 9-60."""
    values = {
        "rule": "auto",
        "first_step": 9,
        "last_step": 60,
        "n": 52,
        "n_warmup": 8,
        "state": "steady",
    }
    return WindowRecord.model_validate({**values, **fields})


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (window(), "52 steady steps (9-60)"),
        (window(state="drifting"), "52 drifting steps (9-60)"),
        (window(n=3, last_step=11, state="short"), "3 steps (9-11, too few for a figure)"),
        (window(n=1, last_step=9, state="short"), "1 step (9, too few for a figure)"),
        (window(rule="as printed", n=1), "one value as printed by the source"),
        (window(n=0, first_step=None, last_step=None, state="none"), "no steps with a time"),
        (None, "no window"),
    ],
)
def test_a_window_is_described_by_its_steps(record: WindowRecord | None, text: str) -> None:
    assert page.describe_window(report(window=record).result) == text


def test_the_window_covers_its_steps_and_no_step_without_a_time() -> None:
    run = report()
    times = run.steps["step_time_s"].copy()
    times[30] = np.nan
    steps = replace(run.steps, columns={**run.steps.columns, "step_time_s": times})
    mask = page.window_mask(replace(run, steps=steps))
    assert run.result.window is not None
    assert mask.sum() == run.result.window.n - 1
    assert not mask[30] and not mask[0] and mask[-1]


def test_the_setup_names_devices_dtype_layout_and_batch() -> None:
    assert page.describe_setup(report()) == [
        "tiny-llama",
        "native",
        "2 x cpu (Epyc 9654)",
        "bf16",
        "dp 2 micro-batch 8",
        "seq 256 tokens",
        "global batch 16 sequences",
        "3.54M parameters",
    ]


def test_the_setup_names_the_variant_after_the_recipe() -> None:
    run = report()
    facts = run.facts.model_copy(update={"variant": "long"})
    assert page.describe_setup(replace(run, facts=facts))[:3] == [
        "tiny-llama",
        "variant long",
        "native",
    ]


def test_the_setup_of_foreign_logs_is_the_recipe_alone() -> None:
    assert page.describe_setup(replace(failed_report(), spec=None, facts=RunSettings())) == [
        "tiny-llama"
    ]


def test_the_rule_states_warm_up_batch_and_drift() -> None:
    text = page.describe_rule(report(window=window(drift=-0.0004, global_batch=16, seq_len=256)))
    assert text == (
        "rule auto, 8 warm-up steps left out, global batch 16 x 256 tokens throughout, "
        "drift +0.0% over the window"
    )


def test_one_step_of_warm_up_is_said_in_the_singular() -> None:
    text = page.describe_rule(report(window=window(n_warmup=1)))
    assert text.startswith("rule auto, 1 warm-up step left out")


def test_a_step_of_the_window_that_was_not_timed_is_told() -> None:
    # `51 steady steps (9-60)` does not add up otherwise.
    full = report(window=window(n=51))
    times = np.where(full.steps.index == 20, np.nan, full.steps["step_time_s"])
    steps = replace(full.steps, columns={**full.steps.columns, "step_time_s": times})
    text = page.describe_rule(replace(full, steps=steps))
    assert ", 1 step without a time (used to measure memory)" in text


def test_times_are_written_in_utc_and_anything_else_as_it_is() -> None:
    assert page.describe_time("2026-11-20T14:03:12Z") == "2026-11-20 14:03:12 UTC"
    assert page.describe_time("2026-11-20T16:03:12+02:00") == "2026-11-20 14:03:12 UTC"
    assert page.describe_time("yesterday") == "yesterday"
    assert page.describe_time(None) == ""


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_a_label_and_all_but_ok_have_advice(status: Status) -> None:
    assert run_verdict(report(status=status).result).text
    assert bool(page.advice(report(status=status))) == (status != "ok")


@pytest.mark.parametrize("status", STATUSES)
def test_a_program_of_the_users_own_is_not_sent_to_fields_of_a_recipe(status: Status) -> None:
    run = report(status=status)
    told = page.advice(replace(run, facts=run.facts.model_copy(update={"engine": "command"})))
    assert bool(told) == (status != "ok")
    assert "training." not in told and "layout." not in told
    assert ("paceline.steplog" in told) == (status == "incomplete")


Kind = Literal["pass", "slower", "faster", "undecided", "invalid", "none"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_judgement_from_one_run_is_marked_as_of_low_confidence(kind: Kind) -> None:
    low = run_verdict(report(verdict=RunVerdict(kind=kind, sentence="x")).result).text
    sure = run_verdict(
        report(verdict=RunVerdict(kind=kind, confidence="normal", sentence="x")).result
    ).text
    assert low.startswith(sure)
    assert ("low confidence" in low) == (kind in ("pass", "slower", "faster"))


def test_adapters_are_told_apart_from_what_is_trained() -> None:
    spec = LoraSpec(rank=8, alpha=16, targets=("q",))
    run = report()
    assert run.facts.model is not None
    trained = trainable_parameters(run.facts.model, spec)
    with_lora = replace(run, facts=run.facts.model_copy(update={"lora": spec}))
    assert describe_setup(run)[-1] == "3.54M parameters"
    assert describe_setup(with_lora)[-1] == f"3.54M parameters, {count(trained)} trained"
