"""Runs become windows, windows one score."""

from __future__ import annotations

from math import inf

from paceline.core.telemetry import Energy
from paceline.mlperf.report import score_document
from paceline.mlperf.score.score import (
    Score,
    ScoredRun,
    ScoreWindow,
    convergence_samples,
    olympic_mean_minutes,
    windows_of,
    with_parts,
)


def runs(*minutes: float | None) -> list[ScoredRun]:
    """Runs in the order of their start; None is one that was aborted."""
    return [
        ScoredRun(
            file=str(at),
            status="success" if value else "aborted",
            minutes=value,
            samples_to_target=100 if value else None,
            started_ms=float(at),
        )
        for at, value in enumerate(minutes)
    ]


def chosen(windows: list[ScoreWindow]) -> ScoreWindow:
    (window,) = [window for window in windows if window.chosen]
    return window


def test_the_fastest_and_the_slowest_run_are_dropped():
    assert olympic_mean_minutes(runs(1.0, 2.0, 3.0, 9.0)) == 2.5


def test_one_failed_run_is_the_dropped_slowest_and_two_leave_no_mean():
    assert olympic_mean_minutes(runs(1.0, 2.0, 3.0, None)) == 2.5
    assert olympic_mean_minutes(runs(1.0, 2.0, None, None)) is None


def test_a_failed_run_with_a_time_counts_as_infinite():
    failed = runs(1.0, 2.0, 3.0, 0.5)
    failed[3] = failed[3].model_copy(update={"status": "failed"})

    assert olympic_mean_minutes(failed) == 2.5
    assert convergence_samples(failed)[3] == inf


def test_too_few_runs_give_no_window():
    assert windows_of(runs(1.0, 2.0), 3) == []


def test_of_more_runs_the_median_of_all_windows_is_taken():
    windows = windows_of(runs(1.0, 1.0, 5.0, 3.0, 3.0), 3)

    assert [w.olympic_mean_minutes for w in windows] == [1.0, 3.0, 3.0]
    assert chosen(windows).olympic_mean_minutes == 3.0


def test_of_an_even_number_of_windows_the_slower_in_the_middle_is_taken():
    windows = windows_of(runs(1.0, 1.0, 1.0, 9.0, 9.0, 9.0), 3)

    assert [w.olympic_mean_minutes for w in windows] == [1.0, 1.0, 9.0, 9.0]
    assert chosen(windows).files == ("2", "3", "4")


def test_windows_with_two_failed_runs_are_the_slowest():
    windows = windows_of(runs(4.0, 4.0, 4.0, None, None), 3)

    assert [(w.failed, w.olympic_mean_minutes) for w in windows] == [(0, 4.0), (1, 4.0), (2, None)]
    assert chosen(windows).olympic_mean_minutes == 4.0


def test_windows_follow_the_time_of_the_runs_and_not_their_names():
    late = runs(9.0, 1.0, 2.0, 3.0)
    late[0] = late[0].model_copy(update={"started_ms": 99.0})

    assert windows_of(late, 3)[0].files == ("1", "2", "3")


def test_every_run_says_what_part_it_has():
    parted = with_parts(runs(3.0, 1.0, 2.0, None, 7.0), ["0", "1", "2", "3"])

    assert [run.part for run in parted] == ["counted", "fastest", "counted", "slowest", "outside"]


RUN = ScoredRun(file="result_0.txt", status="success", part="counted", minutes=2.0, seeds=(1, 2))
SCORE = Score(
    folder="runs",
    benchmark="flux1",
    system=None,
    organization=None,
    division=None,
    ruleset="5.1.0",
    ruleset_from="path",
    status="ok",
    runs=(RUN,),
    runs_required=10,
    score_minutes=2.5,
    olympic_mean_minutes=2.0,
    windows=(ScoreWindow(files=("a",) * 10, failed=0, olympic_mean_minutes=2.0, chosen=True),) * 2,
)


def test_the_energy_is_of_the_counted_runs_alone():
    def run(part: str, watts: float, source: str) -> ScoredRun:
        energy = Energy(
            energy_j=7200.0,
            power_w=watts,
            parts_j={"gpu": 7200.0},
            window_s=9,
            n=9,
            sources=(source,),
        )
        return RUN.model_copy(update={"part": part, "energy": energy})

    runs = (run("fastest", 9000.0, "x"), run("counted", 100.0, "a"), run("counted", 300.0, "b"))
    scored = SCORE.model_copy(update={"runs": runs, "mean_energy_j": 7200.0})
    energy = score_document(scored).figures[-1]

    assert (energy.value, energy.interval) == ("2.000 Wh", "at 200.0 W")
    assert "mean of 2 runs" in energy.details[0] and energy.details[1] == "of gpu (a, b)"
