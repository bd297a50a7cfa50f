"""Trials are told apart in result lines, and what makes one fail is said."""

from __future__ import annotations

import pytest

from paceline.engines.log_reading.mllog import records
from paceline.mlperf.logged_trial import LoggedTrial, trials_of, whole
from paceline.mlperf.rules import BENCHMARKS
from tests.mlperf.samples import line, trial

LORA = BENCHMARKS["llama2_70b_lora"]


def read(text: str) -> list[LoggedTrial]:
    return trials_of(records([text.encode()]))


def only(text: str) -> LoggedTrial:
    (logged,) = read(text)
    return logged


def test_a_run_result_is_the_time_from_run_start_to_run_stop():
    logged = only(trial(minutes=12.5))

    assert logged.minutes == 12.5
    assert logged.initialisation_minutes == pytest.approx(119_999 / 60_000)
    assert (logged.samples_to_target, logged.global_batch, logged.seeds) == (3456, 8, [100])
    assert logged.fault(LORA) is None


def test_the_throughput_is_the_batch_over_the_median_step_or_what_a_line_states():
    assert only(trial()).median_samples_per_s == 8 / 2.0
    stated = trial().replace('"train_step_time": 2.0', '"throughput": 5.5')
    assert only(stated).median_samples_per_s == 5.5
    assert LoggedTrial(step_times_s=[1.0]).median_samples_per_s is None


def test_ranks_that_repeat_a_beginning_do_not_begin_another_trial():
    assert len(read(trial())) == 1


def test_several_trials_in_one_file_are_told_apart():
    trials = read(trial(0) + trial(1, minutes=None) + trial(2, minutes=11.0))

    assert [logged.minutes for logged in trials] == [10.0, None, 11.0]
    assert [logged.seeds for logged in trials] == [[100], [101], [102]]


def test_what_a_script_states_once_holds_for_every_trial():
    later = "\n".join(
        text for text in trial(1).splitlines() if "submission" not in text and "global" not in text
    )
    trials = read(trial(0) + later)

    assert [logged.benchmark for logged in trials] == ["llama2_70b_lora"] * 2
    assert [logged.global_batch for logged in trials] == [8, 8]


def test_lines_behind_run_stop_belong_to_no_progress():
    logged = only(trial() + line("eval_accuracy", 0.5, samples_count=99_999))

    assert logged.samples_to_target == 3456


def test_a_file_without_result_lines_is_one_run_that_came_to_nothing():
    logged = only("srun: error: Unable to allocate resources\n")

    assert not logged.begun and logged.fault(LORA) == ("aborted", "it has no run_start line")


def test_damaged_lines_are_counted_and_harm_nothing():
    damaged = trial() + ':::MLLOG {"namespace": "", "time_ms": 17\n:::MLLOG [1]\n'

    assert (only(damaged).num_unread, only(damaged).minutes) == (2, 10.0)


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (trial(minutes=None), "aborted", "no run_stop line"),
        (trial(status="aborted"), "failed", "run_stop has status aborted"),
        (trial(quality=0.9251), "failed", "best evaluation is 0.9251 and the target 0.925"),
        (trial(quality=-1.0), "failed", "best evaluation is -1"),
        (trial(minutes=-1.0), "failed", "run_stop is not later than run_start"),
        (trial().replace("eval_accuracy", "eval_loss"), "failed", "there is no evaluation"),
        (trial().replace("samples_count", "samples"), "failed", "after how many samples"),
        (trial().replace('"run_start"', '"run_begin"'), "aborted", "no run_start line"),
    ],
)
def test_a_run_that_does_not_count_says_why(text: str, status: str, reason: str):
    fault = only(text).fault(LORA)

    assert fault is not None and fault[0] == status and reason in fault[1]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e999", '"8"', "true", "null", "[8]", "{}", "-8", "1" + "0" * 400]
)
def test_odd_values_are_no_figures(value: str):
    text = trial().replace('"value": 8,', f'"value": {value},').replace(": 2.0}", f": {value}}}")

    logged = only(text)

    assert (logged.global_batch, logged.step_times_s, logged.minutes) == (None, [], 10.0)


def test_whole_numbers_may_be_written_with_a_point():
    assert (whole(36.0), whole(36.5), whole(0), whole(None)) == (36, None, None, None)
