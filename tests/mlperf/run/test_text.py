"""A series of trials for a terminal."""

from __future__ import annotations

from paceline.mlperf.run.series import SeriesAnswer, TrialSeries, TrialState
from paceline.mlperf.run.text import answer_lines, trial_row, trial_text
from paceline.mlperf.score.convergence import ConvergenceReference
from paceline.mlperf.score.expected_time import MeasuredSpeed, expected_time

LABEL = "not an MLPerf result: a small sibling of flux1"


def answered(*trials: TrialState, **fields: object) -> SeriesAnswer:
    series = TrialSeries(
        name="s",
        benchmark="flux1_tiny",
        label=LABEL,
        recipe="r",
        variant="v",
        key="0a",
        first_seed=1,
        wanted=len(trials),
        trials=trials,
        synthetic="expected" in fields,
    )
    common = {"series": series, "folder": "runs/mlperf/s", "status": "complete", "label": LABEL}
    return SeriesAnswer.model_validate(common | fields)


def test_a_trial_is_told_in_one_line():
    trial = TrialState(
        number=0,
        seed=7,
        status="success",
        minutes=0.25,
        samples_to_target=1408,
        last_loss=0.69,
        samples_per_s=41.2,
    )

    assert trial_text(trial) == (
        "trial 0, seed 7: success · 1,408 samples to the target · 0.2500 minutes · "
        "last loss 0.6900 · 41.20 samples/s in the steady window"
    )


def test_a_failed_trial_says_why_and_no_control_character():
    trial = TrialState(number=3, seed=4, status="failed", reason="rank 1: \x1b[31mout of memory")

    assert trial_text(trial).startswith("trial 3, seed 4: failed: rank 1: ")
    assert "\x1b" not in trial_text(trial)


def test_rows_carry_the_label():
    answer = answered(TrialState(number=0, seed=1))

    row = trial_row(answer.series, answer.series.trials[0])
    assert (row["label"], row["benchmark"], row["status"]) == (LABEL, "flux1_tiny", "waiting")


def test_a_broken_off_series_says_how_to_go_on():
    answer = answered(
        TrialState(number=0, seed=1, status="success"),
        TrialState(number=1, seed=2),
        status="unfinished",
        resume="paceline mlperf run flux1 --tiny",
    )

    lines = list(answer_lines(answer))
    assert lines[0].endswith(LABEL)
    assert "  series       unfinished: 1 of 2 trials have ended" in lines
    assert "  go on        paceline mlperf run flux1 --tiny" in lines


def test_an_expected_time_says_what_it_comes_from_and_that_it_is_no_result():
    speed = MeasuredSpeed(samples_per_s=10, relative_spread=0.01, num_steps=20, evaluation_s=2)
    time = expected_time(ConvergenceReference((8,), 8, 1000, 100, 18), speed, 100)
    answer = answered(TrialState(number=0, seed=1, status="measured"), expected=time)

    text = "\n".join(answer_lines(answer))
    assert "2 minutes to train (1.671 to 2.329 for 90% of runs); not a result" in text
    assert "1,000 samples (references at batch 8) at 10.00 samples/s, median of 20 steps" in text


def test_a_measurement_without_a_reference_says_so():
    answer = answered(TrialState(number=0, seed=1, status="measured"), expected=None)

    assert "expected     no time" in "\n".join(answer_lines(answer))
