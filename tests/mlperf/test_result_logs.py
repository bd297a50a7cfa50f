"""Trials are read from logs, and the logs of a set are found."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.engines.log_reading.mllog import records
from paceline.mlperf.result_logs import LoggedTrial, positive_int, run_logs, trials_of
from paceline.mlperf.rules import BENCHMARKS
from tests.mlperf.samples import EPOCH_MS, line, submission, trial


def names(place: Path) -> list[str]:
    return [log.path.name for log in run_logs(place)]


def test_results_stand_in_the_order_of_their_numbers(tmp_path: Path):
    submission(tmp_path, [10.0] * 11)
    (tmp_path / "scaling.json").write_text("{}")
    (tmp_path / "notes.txt").write_text(trial())

    assert names(tmp_path) == [f"result_{number}.txt" for number in range(11)]


def test_packed_results_are_read(tmp_path: Path):
    (tmp_path / "result_1.txt.gz").write_bytes(gzip.compress(trial().encode()))

    (log,) = run_logs(tmp_path)

    assert log.trials[0].minutes == 10.0 and log.number == 1


def test_a_launch_scripts_folder_is_read(tmp_path: Path):
    for number in (1, 2, 10):
        (tmp_path / f"251009032917_{number}.log").write_text(trial(number))
    (tmp_path / "251009032917_3.log").write_text("slurmstepd: error: task 0 was killed\n")
    (tmp_path / "slurm-123.out").write_text(trial(1))
    (tmp_path / "nvidia-smi.log").write_text("clocks\n")
    (tmp_path / "nccl_4.log").write_text("all-reduce of another kind\n")

    logs = run_logs(tmp_path)

    assert [log.number for log in logs] == [1, 2, 3, 10]
    assert logs[2].trials[0].has_started is False


def test_any_other_log_may_hold_several_trials(tmp_path: Path):
    (tmp_path / "slurm-123.out").write_text(trial(0) + trial(1))
    (tmp_path / "other.log").write_text("nothing of the kind\n")

    (log,) = run_logs(tmp_path)

    assert [trial.minutes for trial in log.trials] == [10.0, 10.0]
    assert (log.number, log.num_devices) == (None, 16)


def test_one_file_can_be_named(tmp_path: Path):
    submission(tmp_path, [10.0])

    assert names(tmp_path / "result_0.txt") == ["result_0.txt"]


def test_a_folder_above_names_those_with_results(tmp_path: Path):
    submission(tmp_path / "box" / "flux1", [10.0])

    with pytest.raises(
        UserError, match=r"contains no log of an MLPerf run.*subfolders: .*box/flux1"
    ):
        run_logs(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 5000, b":::MLLOG ", b":::MLLOG {}\n"])
def test_files_that_are_no_logs_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "result_0.txt").write_bytes(content)

    with pytest.raises(UserError, match="contains no log of an MLPerf run"):
        run_logs(tmp_path)
    with pytest.raises(UserError, match="contains no log of an MLPerf run"):
        run_logs(tmp_path / "result_0.txt")


def test_a_place_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        run_logs(tmp_path / "nowhere")


def test_a_name_may_hold_anything(tmp_path: Path):
    (tmp_path / "first\nsecond_1.log").write_text(trial())

    assert [log.number for log in run_logs(tmp_path)] == [1]


def test_what_is_no_plain_text_says_so(tmp_path: Path):
    submission(tmp_path, [10.0])
    (tmp_path / "result_1.txt").write_text(trial(1), encoding="utf-16")
    (tmp_path / "result_2.txt").symlink_to(tmp_path / "nowhere")

    logs = run_logs(tmp_path)

    assert logs[0].unreadable is None
    assert "UTF-16" in str(logs[1].unreadable)
    assert logs[2].unreadable == "not a regular file"


LORA = BENCHMARKS["llama2_70b_lora"]


def read(text: str) -> list[LoggedTrial]:
    return trials_of(records([text.encode()]))


def only(text: str) -> LoggedTrial:
    (logged,) = read(text)
    return logged


def test_a_run_result_is_the_time_from_run_start_to_run_stop():
    logged = only(trial(minutes=12.5))

    assert logged.minutes == 12.5
    assert logged.initialization_minutes == pytest.approx(119_999 / 60_000)
    assert (logged.samples_to_target, logged.global_batch, logged.seeds) == (3456, 8, [100])
    assert logged.fault(LORA) is None


def test_the_throughput_is_the_batch_over_the_median_step_or_what_a_line_states():
    assert only(trial()).median_samples_per_s == 8 / 2.0
    stated = trial().replace('"train_step_time": 2.0', '"throughput": 5.5')
    assert only(stated).median_samples_per_s == 5.5
    assert LoggedTrial(step_times_s=[1.0]).median_samples_per_s is None


@pytest.mark.parametrize("seconds", ["5e-324", "1e-300", "1e299"])
def test_a_step_time_that_nobody_could_measure_gives_no_rate(seconds: str):
    text = trial().replace('"train_step_time": 2.0', f'"train_step_time": {seconds}')
    assert only(text).median_samples_per_s is None


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

    assert not logged.has_started and logged.fault(LORA) == ("aborted", "no run_start line")


def test_damaged_lines_are_counted_and_harm_nothing():
    damaged = trial() + ':::MLLOG {"namespace": "", "time_ms": 17\n:::MLLOG [1]\n'

    assert (only(damaged).num_incomplete_lines, only(damaged).minutes) == (2, 10.0)


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (trial(minutes=None), "aborted", "no run_stop line"),
        (trial(status="aborted"), "failed", "run_stop reports status aborted"),
        (trial(quality=0.9251), "failed", "best evaluation is 0.9251 and the target is 0.925"),
        (trial(quality=-1.0), "failed", "best evaluation is -1"),
        (trial(minutes=-1.0), "failed", "run_stop is not later than run_start"),
        (trial().replace("eval_accuracy", "eval_loss"), "failed", "no evaluation precedes it"),
        (trial().replace("samples_count", "samples"), "failed", "reports no samples_count"),
        (trial().replace('"run_start"', '"run_begin"'), "aborted", "no run_start line"),
    ],
)
def test_a_run_that_does_not_count_says_why(text: str, status: str, reason: str):
    fault = only(text).fault(LORA)

    assert fault is not None and fault[0] == status and reason in fault[1]


def moved(key: str, minutes: float, text: str = "") -> str:
    """A run in which the lines of a key are dated later."""
    lines = (text or trial()).splitlines(keepends=True)
    return "".join(_later(each, minutes) if f'"key": "{key}"' in each else each for each in lines)


def _later(text: str, minutes: float) -> str:
    return re.sub(r'(?<="time_ms": )[0-9.]+', lambda m: str(float(m[0]) + minutes * 60_000), text)


LAST_LINE = trial().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (moved("run_stop", -5), "run_stop is 300 s earlier than the last block or evaluation"),
        (moved("run_start", 5), "run_start is 300 s later than the first block or evaluation"),
        (moved("eval_accuracy", 60), "run_stop is 3,600 s earlier than the last block"),
        (trial() + moved("run_stop", -5, LAST_LINE), "lines of run_stop are 300 s apart"),
        (
            re.sub(r"(.*run_start.*\n)", lambda m: m[0] + moved("run_start", 5, m[0]), trial()),
            "lines of run_start are 300 s apart",
        ),
        (moved("init_start", 60), "run_start is 3,480 s earlier than init_start"),
        (moved("run_stop", 0.01), None),
        (moved("eval_accuracy", 0.01), None),
    ],
)
def test_times_that_shorten_a_run_are_no_result(text: str, reason: str | None):
    fault = only(text).fault(LORA)

    if reason is None:
        assert fault is None
    else:
        assert fault is not None and fault[0] == "failed" and reason in fault[1]


def test_an_evaluation_after_the_end_reaches_no_target():
    late = line("eval_accuracy", 0.5, EPOCH_MS + 100, samples_count=99)
    fault = only(trial(quality=0.9251) + late).fault(LORA)
    assert fault is not None and "best evaluation is 0.9251" in fault[1]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e999", '"8"', "true", "null", "[8]", "{}", "-8", "1" + "0" * 400]
)
def test_odd_values_are_no_figures(value: str):
    text = trial().replace('"value": 8,', f'"value": {value},').replace(": 2.0}", f": {value}}}")

    logged = only(text)

    assert (logged.global_batch, logged.step_times_s, logged.minutes) == (None, [], 10.0)


def test_whole_numbers_may_be_written_with_a_point():
    assert (positive_int(36.0), positive_int(36.5), positive_int(0), positive_int(None)) == (
        36,
        None,
        None,
        None,
    )
