"""What is kept of a series of trials."""

from __future__ import annotations

import pytest

from paceline.mlperf.run.series import FINAL, TrialSeries, TrialStatus, status_of


def series(*statuses: TrialStatus, wanted: int | None = None) -> TrialSeries:
    empty = TrialSeries(
        name="s",
        benchmark="flux1_tiny",
        label="not an MLPerf result",
        recipe="r",
        variant="v",
        key="00000000",
        first_seed=5,
        wanted=1,
    )
    begun = empty.up_to(wanted or len(statuses))
    for trial, status in zip(begun.trials, statuses, strict=False):
        begun = begun.with_trial(trial.model_copy(update={"status": status}))
    return begun


def test_every_trial_has_a_seed_of_its_own():
    assert [trial.seed for trial in series(wanted=4).trials] == [5, 6, 7, 8]


def test_more_trials_go_on_where_the_seeds_ended_and_fewer_lose_none():
    begun = series("success", "missed")

    assert [trial.seed for trial in begun.up_to(3).trials] == [5, 6, 7]
    assert [trial.status for trial in begun.up_to(3).trials] == ["success", "missed", "waiting"]
    assert len(begun.up_to(1).trials) == 2


def test_fewer_trials_leave_out_what_has_not_begun_and_keep_what_has():
    assert len(series("success", "cancelled", "waiting", "waiting").up_to(1).trials) == 2
    assert len(series("success", "waiting", "waiting", "waiting").up_to(2).trials) == 2
    fewer = series("success", "cancelled", "waiting").up_to(1)
    assert (fewer.wanted, [trial.status for trial in fewer.trials]) == (2, ["success", "cancelled"])


def test_what_has_ended_is_not_missing():
    begun = series("success", "cancelled", "failed", "running", "missed", "waiting", "timeout")

    assert [trial.number for trial in begun.missing] == [1, 3, 5]
    assert {trial.status for trial in begun.trials} - {t.status for t in begun.missing} <= FINAL


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("success", "failed"), "complete"),
        (("missed", "failed"), "complete"),
        (("measured",), "complete"),
        (("failed", "timeout"), "failed"),
        (("success", "waiting"), "unfinished"),
        (("cancelled",), "unfinished"),
    ],
)
def test_the_status_of_a_series(statuses: tuple[TrialStatus, ...], expected: str):
    assert status_of(series(*statuses)) == expected


def test_a_series_that_is_at_work_is_running():
    assert status_of(series("running", "waiting"), alive=True) == "running"
