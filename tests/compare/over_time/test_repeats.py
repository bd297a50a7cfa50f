"""A group of repeats has the median of its runs, and the spread from run to run."""

from __future__ import annotations

import math

import pytest

from paceline.compare.over_time.repeats import GroupResult, group_figures, has_figure
from paceline.core.result import Metric, Result, RunVerdict


def result(step_time_s: float | None, status: str = "ok", **others: float) -> Result:
    metrics = {"step_time_s": Metric(value=step_time_s, unit="s", n=50, spread=0.01)}
    metrics |= {name: Metric(value=value, unit="1") for name, value in others.items()}
    return Result.model_validate(
        {
            "run": "r",
            "recipe": "x",
            "status": status,
            "metrics": metrics,
            "verdict": RunVerdict(kind="none", sentence=""),
        }
    )


def test_the_value_is_the_median_of_the_runs():
    step = group_figures([result(time) for time in (0.20, 0.21, 0.26)])["step_time_s"]
    assert (step.value, step.n, step.unit, step.statistic) == (0.21, 3, "s", "median of runs")


def test_the_spread_is_that_from_run_to_run_and_not_the_steps():
    step = group_figures([result(0.2 * math.exp(x)) for x in (-0.01, 0, 0.01)])["step_time_s"]
    assert step.spread == pytest.approx(math.expm1(0.01))
    # Student's t with two degrees of freedom, times 0.01 over the square root of three.
    assert step.high == pytest.approx(0.2 * math.exp(4.303 * 0.01 / 3**0.5), rel=1e-4)
    assert step.low is not None and step.low < 0.2 < (step.high or 0)
    assert step.interval is not None and step.interval.startswith("run-to-run")


def test_two_runs_have_a_spread_and_no_interval():
    step = group_figures([result(0.20), result(0.21)])["step_time_s"]
    assert step.spread is not None and step.low is None and step.interval is None


def test_one_run_has_neither():
    step = group_figures([result(0.20)])["step_time_s"]
    assert (step.value, step.n, step.spread) == (0.20, 1, None)


def test_runs_without_a_figure_do_not_count():
    runs = [result(0.20), result(0.9, status="failed"), result(None), result(0.22)]
    assert [has_figure(run) for run in runs] == [True, False, False, True]
    assert group_figures(runs)["step_time_s"].value == pytest.approx(0.21)
    assert group_figures([]) == {}


def test_a_metric_that_some_runs_lack_is_told_of_the_others():
    figures = group_figures([result(0.2, mfu=0.4), result(0.2), result(0.2, mfu=0.5)])
    assert (figures["mfu"].value, figures["mfu"].n) == (pytest.approx(0.45), 2)


def test_values_that_can_be_zero_have_a_median_and_no_ratio():
    figures = group_figures([result(0.2, wait=0.0), result(0.2, wait=0.1), result(0.2, wait=0.2)])
    assert (figures["wait"].value, figures["wait"].spread, figures["wait"].low) == (0.1, None, None)


def test_what_no_run_knows_stays_unknown_with_its_reason():
    unknown = Metric(value=None, unit="fraction", note="no peak")
    run = result(0.2)
    run = run.model_copy(update={"metrics": {**run.metrics, "mfu": unknown}})
    mfu = group_figures([run, run])["mfu"]
    assert (mfu.value, mfu.n, mfu.note) == (None, 0, "no peak")


@pytest.mark.parametrize(("ok", "missing"), [(0, 5), (3, 2), (5, 0), (7, 0)])
def test_missing_repeats_are_counted_by_figures(ok: int, missing: int):
    group = GroupResult(group="g", recipe="x", key="k", num_repeats=5, ok=ok, failed=1)
    assert group.missing == missing


def test_a_share_near_nothing_has_no_absurd_interval():
    taxes = [0.0001, 0.004, 0.012]
    tax = group_figures([result(0.2, jitter_overhead=value) for value in taxes])["jitter_overhead"]
    assert tax.low is not None and tax.high is not None
    assert -0.05 < tax.low < 0.004 < tax.high < 0.05
    assert tax.interval is not None and "logarithms" not in tax.interval
