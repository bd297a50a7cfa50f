"""Logs of MLPerf runs are found under the names that submissions and launch scripts give them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.result_logs import run_logs
from tests.mlperf.samples import submission, trial


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
    assert logs[2].trials[0].begun is False


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

    with pytest.raises(UserError, match=r"holds no log of an MLPerf run.*below it: .*box/flux1"):
        run_logs(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 5000, b":::MLLOG ", b":::MLLOG {}\n"])
def test_files_that_are_no_logs_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "result_0.txt").write_bytes(content)

    with pytest.raises(UserError, match="holds no log of an MLPerf run"):
        run_logs(tmp_path)
    with pytest.raises(UserError, match="holds no log of an MLPerf run"):
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
    assert logs[2].unreadable == "it is no regular file"
