"""MLPerf logs: run times by the rules' lines, speed by the submitters' own.

Logs of round 6.0: two writers of `train_step_time`, and submissions without step lines.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from paceline.core.steps import Steps
from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.mllog import records
from paceline.engines.mlperf import LOG_FORMAT
from paceline.files.log_file import LogFile
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.mlperf.result_logs import trials_of
from tests.engines.promises import check_read

START_MS = 1_759_855_600_000
ABORTED = {
    ("v5.0", "Dell", "9xXE9712x4GB200", "result_9"): "2025-04-21T14:07:43 DUE TO TIME LIMIT",
    ("v5.1", "Dell", "1xXE9780x8B200-SXM-180GB", "result_0"): "2025-10-08T00:32:36",
}


def line(key: str, value: Any = None, time_s: float = 0.0, **metadata: Any) -> bytes:
    fields = {
        "namespace": "",
        "time_ms": START_MS + round(1000 * time_s),
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "/workspace/callbacks.py", "lineno": 273, **metadata},
    }
    return b":::MLLOG " + json.dumps(fields).encode() + b"\n"


def stats(values: dict[str, float], **metadata: Any) -> bytes:
    return line("tracked_stats", values, **metadata)


BEGIN = (
    line("init_start", time_s=-60)
    + line("global_batch_size", 8)
    + line("init_stop", time_s=-0.5)
    + line("run_start")
)
END = line("eval_accuracy", 0.92, samples_count=3072) + line(
    "run_stop", time_s=600.25, samples_count=3072, status="success"
)


def read_file(path: Path) -> LogContent:
    log = LogContent()
    LOG_FORMAT.read(LogFile(path), log)
    return log


def timed(steps: Steps) -> Steps:
    """The rows that tell a speed."""
    return steps.select(np.isfinite(steps["step_time_s"]) | np.isfinite(steps["samples_per_s"]))


@pytest.fixture(scope="module")
def rows(reference_data: Path) -> dict[tuple[str, ...], dict[str, str]]:
    with (reference_data / "mlperf" / "results.csv").open(encoding="utf-8") as file:
        return {
            (row["round"], row["submitter"], row["system"], row["benchmark"]): row
            for row in csv.DictReader(file)
        }


@pytest.fixture(scope="module")
def logs(reference_data: Path) -> dict[tuple[str, ...], LogContent]:
    root = reference_data / "mlperf" / "logs"
    return {
        (*path.relative_to(root).parts[:-1], path.name.split(".")[0]): read_file(path)
        for path in sorted(root.glob("**/*.gz"))
    }


class TestPublicLogs:
    def test_all_are_read(self, logs):
        assert len(logs) == 146
        assert all(log.out_of_memory is None for log in logs.values())

    def test_144_have_both_markers_and_their_minutes_lie_within_their_rows(self, logs, rows):
        minutes = {key: log.figures.get("run_time_s") for key, log in logs.items()}
        by_log = {key: value / 60 for key, value in minutes.items() if value is not None}

        assert len(by_log) == 144
        for key, value in by_log.items():
            row = rows[key[:4]]
            half_a_digit = 0.5e-4 + 1e-9
            assert float(row["min_minutes"]) - half_a_digit <= value, key
            assert value <= float(row["max_minutes"]) + half_a_digit, key

    def test_the_other_two_lack_their_end_because_they_were_cancelled(self, logs):
        torn = {key: log for key, log in logs.items() if log.incomplete_reason is not None}

        assert {(*key[:3], key[4]) for key in torn} == ABORTED.keys()
        for key, log in torn.items():
            cancelled_at = ABORTED[*key[:3], key[4]]
            assert (
                log.incomplete_reason
                == f"the log has no run_stop line: CANCELLED AT {cancelled_at}"
            )
            assert log.end_line is None and "run_time_s" not in log.figures

    def test_complete_sets_have_the_extremes_and_means_of_their_rows(self, logs, rows):
        sets = {
            key: [
                log
                for name, log in logs.items()
                if name[:4] == key and log.incomplete_reason is None
            ]
            for key in rows
        }
        complete = {
            k: set_logs
            for k, set_logs in sets.items()
            if len(set_logs) == int(rows[k]["succeeded"])
        }

        assert len(complete) == 10
        for key, set_logs in complete.items():
            row = rows[key]
            minutes = [log.figures["run_time_s"] / 60 for log in set_logs]
            samples = [log.figures["samples_to_target"] for log in set_logs]
            assert min(minutes) == pytest.approx(float(row["min_minutes"]), abs=0.501e-4)
            assert max(minutes) == pytest.approx(float(row["max_minutes"]), abs=0.501e-4)
            if len(set_logs) == int(row["runs"]):
                initial = fmean(log.figures["init_time_s"] for log in set_logs) / 60
                assert fmean(samples) == pytest.approx(float(row["mean_samples_to_target"]))
                assert initial == pytest.approx(float(row["mean_init_minutes"]), abs=0.501e-3)

    def test_settings_agree_with_the_rows(self, logs, rows):
        for key, log in logs.items():
            row, facts = rows[key[:4]], log.facts
            assert facts["model"] == row["benchmark"]
            assert facts["global_batch"] == int(row["global_batch_size"])
            assert facts["gradient_accumulation"] == float(row["grad_accum"])
            assert facts.get("num_devices", int(row["gpus"])) == int(row["gpus"]), key

    def test_all_but_the_log_without_an_evaluation_tell_their_speed(self, logs, rows):
        silent = [key for key, log in logs.items() if len(timed(log.steps())) == 0]

        assert [(*key[:3], key[4]) for key in silent] == [
            ("v5.1", "Dell", "1xXE9780x8B200-SXM-180GB", "result_0")
        ]
        for key, log in logs.items():
            published = rows[key[:4]]["median_throughput_samples_s"]
            steps = timed(log.steps())
            if published and len(steps):
                rate = steps["samples_per_s"]
                if not steps.known("samples_per_s"):
                    rate = log.facts["global_batch"] / steps["step_time_s"]
                assert np.median(rate) == pytest.approx(float(published), rel=0.03), key

    def test_step_numbers_rise_and_end_with_the_run(self, logs):
        for key, log in logs.items():
            index = log.steps().index
            assert (np.diff(index) > 0).all(), key
            if log.incomplete_reason is None:
                assert index[-1] <= log.figures["timed_steps"], key

    def test_lambdas_llama_3_1_8b_says_what_the_eye_reads(self, logs):
        key = ("v5.1", "Lambda", "gb300_n18_ngc25.04_nemo", "llama31_8b", "result_1")
        log = logs[key]
        steps = log.steps()

        assert (len(steps), *steps.index[[0, 1, -1]].tolist()) == (160, 31, 63, 5119)
        assert steps["step_time_s"][[0, 1, 2]].tolist() == [
            0.1571516990661621,
            0.16748046875,
            0.16051554679870605,
        ]
        assert steps["loss"][:2].tolist() == pytest.approx([8.318889617919922, 7.480711936950684])
        assert log.figures == {
            "init_time_s": 129.093,
            "run_time_s": 854.346,
            "timed_steps": 5130,
            "samples_to_target": 184680,
            "evaluation_s": pytest.approx(18.192),
        }
        assert log.facts == {
            "model": "llama31_8b",
            "global_batch": 36,
            "gradient_accumulation": 1,
            "seq_len": 8192,
            "num_devices": 72,
            "tp": 1,
            "pp": 1,
            "cp": 2,
            "device": "NVIDIA GB300",
            "log_interval": 1,
        }

    def test_lambdas_llama_2_70b_says_what_the_eye_reads(self, logs):
        key = ("v5.1", "Lambda", "gb300_n18_ngc25.04_nemo", "llama2_70b_lora", "result_1")
        log = logs[key]
        steps, blocks = log.steps(), timed(log.steps())

        assert blocks.index.tolist() == [172, 215, 258, 301, 344, 387]
        assert blocks["step_time_s"][[0, 1, 5]].tolist() == [
            0.18161959787209717,
            0.18213907104654936,
            0.18273177244182714,
        ]
        assert steps.index[:3].tolist() == [10, 20, 30]
        assert steps["loss"][:2].tolist() == pytest.approx([16.292781829833984, 12.607441902160645])
        assert log.facts["log_interval"] == 43 and log.facts["lora_rank"] == 16
        assert log.figures["run_time_s"] == 80.875

    def test_amds_logs_say_what_the_eye_reads(self, logs):
        system = "MI355X_EPYC_9575F_pytorch"
        lora = logs["v5.1", "AMD", system, "llama2_70b_lora", "result_0"]
        dense = logs["v5.1", "AMD", system, "llama31_8b", "result_0"]

        assert lora.steps().index.tolist() == [192, 240, 288, 336, 384, 432]
        assert lora.steps()["samples_per_s"][0] == pytest.approx(5.878038957077605)
        assert lora.steps()["step_time_s"][0] == pytest.approx(8 / 5.878, rel=0.03)
        assert lora.facts["submitter"] == "AMD" and lora.facts["platform"] == "1xMI355X"
        assert lora.facts.get("num_devices") is None
        assert dense.steps().index[[0, -1]].tolist() == [384, 5376]
        assert dense.steps()["samples_per_s"][[0, -1]].tolist() == pytest.approx(
            [30.15030683672662, 30.694098572187265]
        )
        assert dense.figures["samples_to_target"] == 172000

    def test_a_description_of_one_node_does_not_hide_the_other_seven(self, logs):
        log = logs[
            "v5.1", "HPE", "HPE-Cray-XD670-H200-SXM5-141GB_n8_25.09", "llama31_8b", "result_1"
        ]

        assert log.facts["num_devices"] == 64
        assert log.remarks == [
            "sources for the device count disagree (8 hosts in the launch line, 1 x 8 by the "
            "system description, 8 x 8 by the configuration's name): 8 x 8 is used"
        ]


def test_the_run_time_is_between_the_markers_and_initialisation_before():
    log = check_read(LOG_FORMAT, BEGIN + END)

    assert log.figures == {
        "init_time_s": 60.0,
        "run_time_s": 600.25,
        "timed_steps": 384,
        "samples_to_target": 3072,
    }
    assert log.end_line == "run_stop, status success" and log.incomplete_reason is None


def test_markers_of_every_rank_count_once():
    ranks = b"".join(line("init_start", time_s=-60 + k / 10) for k in range(8))
    stop = line("run_stop", time_s=601, status="success")
    log = check_read(LOG_FORMAT, ranks + BEGIN + END + stop)

    assert log.figures["init_time_s"] == 60.0
    assert log.figures["run_time_s"] == 600.25


def test_an_aborted_run_has_reached_no_target():
    end = line("eval_accuracy", 0.93, samples_count=384) + line(
        "run_stop", time_s=60, status="aborted", step=48
    )
    log = check_read(LOG_FORMAT, BEGIN + end)

    assert log.figures["run_time_s"] == 60.0 and "samples_to_target" not in log.figures
    assert log.remarks == ["run_stop has status aborted: the quality target was not reached"]


def test_a_status_of_characters_that_cannot_be_shown_is_made_fit_to_be():
    log = check_read(LOG_FORMAT, BEGIN + line("run_stop", time_s=60, status="suc\xa0\x80\ud800s"))
    assert log.end_line == "run_stop, status suc ?s"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (BEGIN, "no run_stop"),
        (END, "no run_start"),
        (line("seed", 3), "no run_start and no run_stop"),
    ],
)
def test_a_missing_marker_is_told(text: bytes, missing: str):
    log = check_read(LOG_FORMAT, text)

    assert log.incomplete_reason == f"the log has {missing} line"
    assert "run_time_s" not in log.figures


def test_single_steps_go_before_means_of_blocks():
    text = (
        stats({"train_step_time": 0.25, "reduced_train_loss": 8.5}, step=31.0, samples_count=256.0)
        + stats({"train_step_time": 0.5, "reduced_train_loss": 7.5}, step=63.0, samples_count=512.0)
        + stats({"train_step_time": 0.4}, samples_count=512)
        + line("eval_start", samples_count=512, step=64)
    )
    log = check_read(LOG_FORMAT, BEGIN + text + END)
    steps = log.steps()

    assert steps.index.tolist() == [31, 63]
    assert steps["step_time_s"].tolist() == [0.25, 0.5] and steps["loss"].tolist() == [8.5, 7.5]
    assert log.facts["log_interval"] == 1


def test_means_stand_at_the_evaluation_that_ends_their_block():
    """Its own line counts the block's samples (NVIDIA 5.1), those before it (5.0) or all (AMD)."""
    text = b"".join(
        stats({"throughput": 5.5, "train_step_time": time}, step=8 * begin)
        + line("block_stop", samples_count=8 * begin)
        + line("eval_start", samples_count=8 * end)
        for time, begin, end in [(1.25, 0, 192), (1.5, 192, 240), (1.75, 240, 288)]
    )
    log = check_read(LOG_FORMAT, BEGIN + text + END)
    steps = log.steps()

    assert steps.index.tolist() == [192, 240, 288]
    assert steps["step_time_s"].tolist() == [1.25, 1.5, 1.75]
    assert steps["samples_per_s"].tolist() == [5.5] * 3
    assert log.facts["log_interval"] == 48


def test_means_without_an_evaluation_stand_where_their_own_samples_say():
    single = b"".join(stats({"train_step_time": 0.5}, samples_count=n) for n in (384, 384, 384))
    total = b"".join(stats({"throughput": 16.0}, samples_count=n) for n in (384, 768, 1152))

    for text in (single, total):
        assert check_read(LOG_FORMAT, BEGIN + text).steps().index.tolist() == [48, 96, 144]
    assert check_read(LOG_FORMAT, single).steps().index.tolist() == [1, 2, 3]


def test_losses_of_their_own_lines_share_the_row_of_a_mean_at_the_same_step():
    text = (
        line("train_loss", 2.5, samples_count=80, lr=0.0005)
        + stats({"train_loss": 1.5}, samples_count=160, lr=1e-4, step=20)
        + stats({"train_step_time": 0.5}, samples_count=160)
        + line("eval_start", samples_count=160, step=20)
    )
    steps = check_read(LOG_FORMAT, BEGIN + text).steps()

    assert steps.index.tolist() == [10, 20]
    assert steps["loss"].tolist() == [2.5, 1.5]
    np.testing.assert_array_equal(steps["step_time_s"], [np.nan, 0.5])


def test_lines_in_another_order_say_the_same():
    def shuffled(text: bytes) -> bytes:
        fields = json.loads(text.removeprefix(b":::MLLOG "))
        fields["metadata"] = dict(reversed(fields["metadata"].items()))
        return b":::MLLOG " + json.dumps(dict(reversed(fields.items()))).encode() + b"\n"

    lines = [
        stats({"train_step_time": 0.25, "reduced_train_loss": 8.5}, step=31, samples_count=256),
        stats({"train_step_time": 0.5, "reduced_train_loss": 7.5}, step=63, samples_count=512),
    ]
    usual = check_read(LOG_FORMAT, BEGIN + b"".join(lines))
    other = check_read(LOG_FORMAT, BEGIN + b"".join(map(shuffled, lines)))

    for name in ("step_time_s", "loss"):
        assert usual.steps()[name].tolist() == other.steps()[name].tolist()


def test_a_lost_loss_is_told_as_infinite():
    text = stats({"train_loss": float("nan")}, step=10, samples_count=80)

    assert check_read(LOG_FORMAT, BEGIN + text).steps()["loss"].tolist() == [np.inf]


def test_only_the_first_of_several_runs_is_read():
    first = stats({"train_step_time": 0.25, "reduced_train_loss": 2.0}, step=31, samples_count=256)
    second = stats({"train_step_time": 9.0, "reduced_train_loss": 2.0}, step=31, samples_count=256)
    log = check_read(LOG_FORMAT, BEGIN + first + END + BEGIN + second + END)

    assert log.steps()["step_time_s"].tolist() == [0.25]
    assert log.figures["run_time_s"] == 600.25
    assert log.remarks == ["the log has more than one run; only the first one is read"]


def test_names_that_nobody_filled_in_are_not_facts():
    text = line("submission_org", "SUBMISSION_ORG_PLACEHOLDER") + line(
        "submission_platform", "18xSUBMISSION_PLATFORM_PLACEHOLDER"
    )

    assert check_read(LOG_FORMAT, text).facts == {}


def test_values_of_unexpected_types_are_no_facts():
    text = b"".join(
        line("global_batch_size", value) for value in (None, [8], {}, True, -8, 2.5, 10**400, "")
    )

    assert check_read(LOG_FORMAT, text + line("gradient_accumulation_steps", 4.0)).facts == {
        "gradient_accumulation": 4
    }


def test_broken_result_lines_are_counted():
    log = check_read(LOG_FORMAT, BEGIN + b':::MLLOG {"namespace": \n:::MLLOG\n' + END)

    assert log.remarks == [":::MLLOG lines without a complete record, ignored: 1"]


def test_noise_behind_a_line_does_not_hide_it():
    text = stats({"train_loss": 1.5}, step=10, samples_count=80) + b'echo "cache_clear"\n'

    assert len(check_read(LOG_FORMAT, BEGIN + text)) == 1


def two_writers(num_steps: int = 40, batch: int = 8, block: int = 10) -> bytes:
    """Steps of 0.45 s by one rank, means of blocks by another; the first holds a start."""
    text = b""
    for step in range(1, num_steps + 1):
        single = {"train_step_time": 0.45, "reduced_train_loss": 5.0}
        text += b"6144: " + stats(single, samples_count=step * batch)
        if step % block == 0:
            mean = 0.504 if step == block else 0.46
            text += b"0: " + stats({"train_step_time": mean}, samples_count=block * batch)
    return text


def test_steps_that_state_their_samples_and_loss_are_single_steps():
    log = check_read(LOG_FORMAT, BEGIN + two_writers() + END)

    steps = log.steps()
    assert steps.index.tolist() == list(range(1, 41))
    assert set(steps["step_time_s"].tolist()) == {0.45}
    assert log.facts["log_interval"] == 1


def test_without_a_batch_such_steps_are_counted():
    batchless = BEGIN.replace(line("global_batch_size", 8), b"")
    log = check_read(LOG_FORMAT, batchless + two_writers(6) + END)

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5, 6]


def test_the_rate_of_a_run_is_that_of_its_single_steps():
    few_steps = two_writers(num_steps=4, block=2)
    (trial,) = trials_of(records([BEGIN + few_steps + END]))
    assert trial.median_samples_per_s == pytest.approx(8 / 0.45)
    (blocks,) = trials_of(records([BEGIN + stats({"train_step_time": 0.5}) + END]))
    assert blocks.median_samples_per_s == 16.0


def test_a_printed_overall_rate_counts_where_no_line_tells_a_speed(tmp_path: Path):
    path = tmp_path / "result_0.txt"
    path.write_bytes(BEGIN + END + line("overall_throughput", 35.61, samples=3072))
    document = parse_log(path, UserSettings()).document
    assert (document.status, document.samples_per_s) == ("ok", 35.61)

    path.write_bytes(BEGIN + END)
    silent = parse_log(path, UserSettings()).document
    assert silent.status == "not-a-training-log"
    assert silent.reason == "it is complete but reports no step time and no throughput"


def test_step_times_come_from_the_blocks_when_only_a_throughput_is_printed():
    blocks = b"".join(
        line("block_start", time_s=110 * n, samples_count=384 * n)
        + stats({"throughput": 0.5}, step=384 * (n + 1))
        + line("block_stop", time_s=110 * n + 96, samples_count=384 * (n + 1))
        + line("eval_start", time_s=110 * n + 96, samples_count=384 * (n + 1))
        + line("eval_stop", time_s=110 * n + 110, samples_count=384 * (n + 1))
        for n in range(3)
    )
    log = check_read(LOG_FORMAT, BEGIN + blocks + END)
    steps = log.steps()
    assert steps.index.tolist() == [48, 96, 144]
    assert steps["step_time_s"].tolist() == pytest.approx([2.0] * 3)  # 96 s of 48 steps
    assert steps["samples_per_s"].tolist() == [0.5] * 3
    assert log.figures["evaluation_s"] == pytest.approx(42)
    assert log.other_rates == {"its time includes the evaluations": pytest.approx(1152 / 330)}


@pytest.mark.parametrize("cumulative", [True, False])
def test_blocks_alone_give_the_step_time(cumulative: bool):
    """The samples of a block may be counted from its start or from that of the run."""
    blocks = b"".join(
        line("block_start", time_s=100 * n, samples_count=160 * (n if cumulative else 1))
        + line("block_stop", time_s=100 * n + 90, samples_count=160 * (n + 1 if cumulative else 1))
        + line("eval_accuracy", 0.95, 100 * n + 95, samples_count=160 * (n + 1))
        for n in range(4)
    )
    steps = check_read(LOG_FORMAT, BEGIN + blocks + END).steps()
    assert steps["step_time_s"].tolist() == pytest.approx([4.5] * 4)  # 90 s of 20 steps


@pytest.mark.parametrize(
    ("rate", "step_time_s"),
    [
        (20.0, 0.4),  # 2,000 batches of 8 samples in 800 s
        (5.0, 0.4),  # the same, of one device of four
        (2.5, 3.2),  # 2,000 samples in 800 s
        (0.625, 3.2),  # the same, of one device of four
    ],
)
def test_the_printed_rate_shows_whether_train_samples_counts_batches(
    rate: float, step_time_s: float
):
    begin = BEGIN + line("submission_benchmark", "retinanet")
    begin += line("local_batch_size", 2) + line("train_samples", 2000)
    epochs = b"".join(
        line("epoch_start", n, 820 * n, epoch_num=n)
        + line("epoch_stop", n, 820 * n + 800, epoch_num=n)
        + stats({"throughput": rate}, step=n + 1)
        + line("eval_start", n + 1, 820 * n + 800, epoch_num=n + 1)
        + line("eval_stop", n + 1, 820 * n + 820, epoch_num=n + 1)
        for n in range(3)
    )
    log = check_read(LOG_FORMAT, begin + epochs + END)
    assert log.facts["num_devices"] == 4
    assert log.steps()["step_time_s"].tolist() == pytest.approx([step_time_s] * 3)


@pytest.mark.parametrize(
    ("benchmark", "devices"), [("retinanet", 4), ("llama31_8b", None), ("unknown", None)]
)
def test_replicas_of_a_model_that_may_be_split_are_not_devices(benchmark: str, devices: int | None):
    begin = BEGIN + line("submission_benchmark", benchmark) + line("local_batch_size", 2)
    assert check_read(LOG_FORMAT, begin + END).facts.get("num_devices") == devices


def test_evaluations_within_an_epoch_stop_the_clock():
    log = check_read(
        LOG_FORMAT,
        BEGIN
        + line("train_samples", 1600)
        + line("epoch_start", time_s=0, epoch_num=0)
        + b"".join(
            line("eval_start", time_s=60 * n + 50, epoch_num=(n + 1) / 4)
            + line("eval_stop", time_s=60 * n + 60, epoch_num=(n + 1) / 4)
            for n in range(3)
        )
        + line("run_stop", time_s=180, status="success", epoch_num=0.75)
        + line("epoch_stop", time_s=181, epoch_num=0.75)
        + stats({"throughput": 1200 / 180}, step=0.75),
    )
    assert log.steps()["step_time_s"].tolist() == [1.0, 1.0, 1.0]  # 50 s of 400 / 8 steps
    assert log.figures["samples_per_s"] == pytest.approx(1200 / 180)
    assert log.other_rates.popitem()[1] == pytest.approx(1200 / 180)


def test_samples_in_place_of_epochs_are_ignored():
    """BERT, GPT-3 and Llama 405B logs write samples or tokens as `epoch_num`."""
    evaluations = b"".join(
        line("block_start", time_s=60 * n)
        + line("eval_start", time_s=60 * n + 50, epoch_num=2_030_855 * (n + 1))
        for n in range(3)
    )
    log = check_read(LOG_FORMAT, BEGIN + line("train_samples", 156_725_653) + evaluations + END)
    assert log.steps()["step_time_s"].tolist() == [150 / 384]  # whole run: 3,072 samples of END


def test_time_outside_the_printed_steps_is_remarked():
    blocks = b"".join(
        line("block_start", time_s=100 * n, step=10 * n)
        + stats({"train_step_time": 8.0}, samples_count=80)
        + line("block_stop", time_s=100 * n + 96, step=10 * (n + 1))
        + line("eval_start", time_s=100 * n + 96, step=10 * (n + 1))
        for n in range(3)
    )
    log = check_read(LOG_FORMAT, BEGIN + blocks + END)
    assert log.steps()["step_time_s"].tolist() == [8.0, 8.0, 8.0]
    assert "a step takes 9.600 s, 20% more than the printed step times" in log.remarks[0]


@pytest.mark.parametrize(
    ("place", "num_steps", "median_s"),
    [
        ("NVIDIA/theia_ngpu8_ngc26.04_nemo/gpt_oss_20b/result_0.txt", 288, 0.4927),
        ("NVIDIA/theia_ngpu8_ngc26.04_nemo/llama2_70b_lora/result_0.txt", 38, 0.7258),
        ("NVIDIA/tyche-hsg_ngpu8192_ngc26.04_nemo/deepseekv3_671b/result_0.excerpt.txt", 8, 3.498),
    ],
)
def test_public_logs_give_their_single_steps(
    reference_data: Path, place: str, num_steps: int, median_s: float
):
    parsing = parse_log(reference_data / "mlperf" / "v6.0" / place, UserSettings())
    times = parsing.document.step_time_s
    assert len(parsing.steps) == num_steps
    assert times is not None and times.median == pytest.approx(median_s, rel=2e-3)
