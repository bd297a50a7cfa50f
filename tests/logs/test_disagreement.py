"""A printed figure that does not follow is named with the cause that gives its ratio."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.flops import flops_per_token, hardware_flops_per_token
from paceline.core.layout import Layout
from paceline.core.run import RunSettings
from paceline.files.recipe import load_recipe
from paceline.logs import figures
from paceline.logs.disagreement import (
    RUNNING_AVERAGE,
    UNKNOWN,
    PrintedFigure,
    find_disagreements,
    likely_cause,
)


def facts(**fields: object) -> RunSettings:
    values: dict[str, object] = {
        "model": load_recipe("llama31-8b").model,
        "seq_len": 8192,
        "num_devices": 64,
        "devices_per_node": 8,
        "layout": Layout(tp=4),
        "flops_convention": "causal",
    }
    return RunSettings.model_validate({**values, **fields})


def cause(ratio: float, unit: str = "FLOP/s", sparse: float | None = None, **fields: object) -> str:
    printed = PrintedFigure("figure", ratio * 100.0, 100.0, unit, sparse)
    return likely_cause(facts(**fields), printed, ratio, {})  # type: ignore[arg-type]


def counted(convention: str) -> float:
    x = facts().flops_input
    assert x is not None
    return flops_per_token(convention, x)


def test_a_figure_that_follows_is_not_listed():
    figures = [PrintedFigure("tflops_per_device", 1004.0, 1000.0, "FLOP/s")]
    assert find_disagreements(facts(), figures) == ()


def test_rounding_is_that_of_the_column_not_of_a_figure_that_happens_to_be_round():
    round_one = PrintedFigure("tflops_per_device", 4e14, 4.06e14, "FLOP/s")
    assert find_disagreements(facts(), [round_one]) == ()
    (disagreement,) = find_disagreements(facts(), [replace(round_one, rounding=1e-5)])
    assert disagreement.printed == 4e14


@pytest.mark.parametrize(
    ("printed", "resolution_s", "expected"),
    [
        ([0.1, 0.2, 0.1], 0.0, 0.5),  # one decimal
        ([9.9, 12.0, 11.0], 0.0, 0.5 / 11),  # two digits
        ([123.4, 1.5, 1.5], 0.0, 0.05 / 1.5),  # one decimal
        ([5690.4, 5691.2], 0.02, 0.05 / 5690.8 + 0.005),  # and step times of 2 s to 0.02 s
    ],
)
def test_the_rounding_of_a_column_is_that_of_its_usual_value(
    printed: list[float], resolution_s: float, expected: float
) -> None:
    window = {"mfu": np.array(printed)}
    run: Any = SimpleNamespace(window=window, typical_step_s=2.0, resolution_s=resolution_s)
    assert figures._rounding(run, "mfu") == pytest.approx(expected, rel=1e-3)


def test_a_disagreement_carries_both_figures_and_their_ratio():
    (disagreement,) = find_disagreements(
        facts(), [PrintedFigure("mfu", 0.25, 0.5, "fraction", 2.0)]
    )
    assert (disagreement.printed, disagreement.computed, disagreement.ratio) == (0.25, 0.5, 0.5)


def test_attention_without_the_causal_mask_is_recognised():
    ratio = counted("full-attention") / counted("causal")
    assert ratio == pytest.approx(1.125, abs=0.001)
    assert cause(ratio) == (
        "counted in full-attention, not in causal (the causal mask halves attention)"
    )


def test_causal_halving_is_recognised_from_the_other_side():
    ratio = counted("causal") / counted("full-attention")
    sentence = cause(ratio, flops_convention="full-attention")
    assert sentence.startswith("counted in causal, not in full-attention")


def test_recomputation_counted_as_work_is_recognised():
    x = facts(layout=Layout(tp=4, recompute="full")).flops_input
    assert x is not None
    ratio = hardware_flops_per_token("causal", x) / counted("causal")
    assert cause(ratio) == "full recomputation is counted as work, in causal"


def test_a_sparse_peak_halves_the_share():
    assert "sparse peak" in cause(0.5, "fraction", sparse=2.0)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1 / 64, "divided by all 64 devices"),
        (64.0, "of all 64 devices together"),
        (1 / 16, "divided by all 16 replicas"),
        (8.0, "of one node of 8 devices"),
    ],
)
def test_a_batch_divided_or_summed_over_devices_is_recognised(ratio: float, words: str):
    assert words in cause(ratio, "tokens/s")


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1 / 64, "it is of one device, not of all 64"),
        (1 / 16, "it is of one replica, not of all 16"),
        (1 / 8, "it is of one node of 8 devices, not of all 64"),
        (64.0, "every device counted the whole batch"),
        (8192.0, "it counts tokens, 8,192 of each sample"),
        (128.0, "it counts tokens of one device of 64"),
    ],
)
def test_a_total_is_recognised_in_another_unit(ratio: float, words: str):
    assert words in cause(ratio, "samples/s")


def test_evaluations_in_the_time_are_recognised_alone_and_of_one_device():
    other_rates = {"its time includes the evaluations": 85.0}
    figure = PrintedFigure("samples_per_s", 85.0, 100.0, "samples/s")
    assert likely_cause(facts(), figure, 0.85, other_rates) == "its time includes the evaluations"
    both = likely_cause(facts(), figure, 0.85 / 64, other_rates)
    assert both == "it is of one device, not of all 64, and its time includes the evaluations"


def test_milliseconds_taken_for_seconds_are_recognised():
    assert "milliseconds" in cause(0.001, "samples/s")


def test_a_running_average_is_recognised_by_its_own_value():
    figure = PrintedFigure("samples_per_s", 950.76, 943.46, "samples/s")
    sentence = likely_cause(facts(), figure, 950.76 / 943.46, {RUNNING_AVERAGE: 950.76})
    assert "running average" in sentence


def test_without_a_model_no_convention_is_blamed():
    assert cause(1.125, model=None) == UNKNOWN


@given(st.floats(0.01, 100))
def test_an_unexplained_ratio_is_not_explained(ratio: float):
    sentence = cause(ratio, "tokens/s", num_devices=1, layout=None)
    assert sentence == UNKNOWN
