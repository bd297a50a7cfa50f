"""The native trainer's log: one rank's events, several ranks', or a run's merged steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from paceline.core.hardware import Cluster
from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.native import LOG_FORMAT, job
from tests.engines.promises import check_read
from tests.example import make_spec
from tests.files.test_events import END, MEMORY, START, STEP


def text(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def start(rank: int = 0, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    return {**START, "rank": rank, "world_size": world_size, **changes}


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {**STEP, "step": number, "step_time_s": number / 4, **changes}


def end(status: str = "ok", reason: str | None = None, steps: int = 3) -> dict[str, Any]:
    return {**END, "status": status, "reason": reason, "steps": steps}


def read(*events: dict[str, Any]) -> LogContent:
    return check_read(LOG_FORMAT, text(*events))


def merged(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "step_time_s": number / 4,
        "loss": 2.5,
        "grad_norm": None,
        "tokens": 128.0,
        "samples": 4.0,
        "global_batch": 4.0,
        "seq_len": 32.0,
        "busy_time_s": 0.1,
        "flops_per_s_per_device": None,
        "allocated_bytes": None,
        "resident_bytes": 7.0,
        **changes,
    }


def test_a_rank_that_is_alone_is_the_whole_run():
    log = read(start(), step(1), step(2), step(3), end())
    steps = log.steps()

    assert steps.index.tolist() == [1, 2, 3]
    assert steps["step_time_s"].tolist() == [0.25, 0.5, 0.75]
    assert steps["tokens"].tolist() == [64.0] * 3 and steps["resident_bytes"].tolist() == [5.0] * 3
    assert not steps.known("allocated_bytes")
    assert log.facts == {
        "num_devices": 1,
        "num_parameters": START["num_parameters"],
        "device": "cpu",
        "dtype": "fp32",
        "global_batch": 4,
        "seq_len": 32,
        "log_interval": 1,
    }
    assert log.end_line == "end of a rank, status ok" and log.remarks == []


def test_one_rank_of_several_does_not_say_the_tokens_of_all():
    log = read(start(1, 4), step(1), step(2))

    assert log.facts["num_devices"] == 4
    assert not log.steps().known("tokens") and not log.steps().known("samples")
    assert log.remarks == ["the log has lines of 1 of 4 ranks: the loss covers only these"]


def test_lines_without_a_start_line_are_of_nobody_knows_how_many_ranks():
    log = read(step(5), step(6))

    assert log.steps().index.tolist() == [5, 6] and not log.steps().known("tokens")
    assert log.remarks == [
        "the log has lines of 1 of an unknown number of ranks: the loss covers only these"
    ]


def test_all_ranks_one_after_another_are_merged():
    first = [start(0, 2), step(1, loss=2.0), step(2, loss=2.0), step(3), end()]
    second = [start(1, 2), step(1, loss=4.0, step_time_s=0.5), step(2, loss=4.0), end()]
    log = read(*first, *second)
    steps = log.steps()

    assert steps.index.tolist() == [1, 2]
    assert steps["step_time_s"].tolist() == [0.5, 0.5]
    assert steps["loss"].tolist() == [3.0, 3.0] and steps["tokens"].tolist() == [128.0, 128.0]
    assert log.remarks == []


def test_many_steps_of_several_ranks_are_merged_piece_by_piece():
    rank = [step(k, step_time_s=0.5, loss=float(k % 7)) for k in range(1, 70_000)]
    content = text(start(0, 2), *rank, start(1, 2), *rank)
    log = check_read(LOG_FORMAT, content, (1 << 20,))
    steps = log.steps()

    assert steps.index.tolist() == list(range(1, 70_000))
    assert (steps["tokens"] == 128.0).all()
    np.testing.assert_array_equal(steps["loss"], steps.index % 7)


def test_merged_steps_are_the_whole_runs():
    log = read(merged(1), merged(2), merged(3, loss=None))
    steps = log.steps()

    assert steps.index.tolist() == [1, 2, 3] and steps["tokens"].tolist() == [128.0] * 3
    np.testing.assert_array_equal(steps["loss"], [2.5, 2.5, np.nan])
    assert log.facts == {"global_batch": 4, "seq_len": 32, "log_interval": 1}
    assert log.remarks == []


def test_a_restarted_rank_ends_with_the_steps_that_it_did_again():
    log = LogContent()
    events = [start(), step(1), step(2), step(3), start(), step(2, loss=1.0), step(3), step(4)]
    LOG_FORMAT.read([text(*events)], log)
    steps = log.steps()

    assert steps.index[-3:].tolist() == [2, 3, 4]
    assert steps["loss"][-3:].tolist() == [1.0, 2.0, 2.0]


def test_ranks_of_which_one_was_restarted_are_merged_by_step():
    first = [start(0, 2), step(1), step(2), start(0, 2), step(2, loss=4.0), step(3)]
    log = read(*first, start(1, 2), step(1), step(2), step(3))

    assert log.steps().index.tolist() == [1, 2, 3]
    assert log.steps()["loss"].tolist() == [2.0, 3.0, 2.0]


def test_a_batch_that_grows_is_no_fact_but_a_column():
    log = read(start(), step(1), step(2, global_batch=8))

    assert "global_batch" not in log.facts and log.facts["seq_len"] == 32
    assert log.steps()["global_batch"].tolist() == [4.0, 8.0]


def test_a_device_is_named_unless_it_is_the_cpu():
    gpu = start(
        device_name="NVIDIA H200",
        backend="nccl",
        cuda="12.8",
        layout={"tp": 1, "pp": 1, "zero_stage": 2, "micro_batch": 8, "recompute": "none"},
    )
    facts = read(gpu, step(1)).facts

    assert facts["device"] == "NVIDIA H200"
    assert (facts["tp"], facts["zero_stage"], facts["micro_batch"]) == (1, 2, 8)


def test_a_run_whose_loss_was_lost_has_a_last_step_with_that_loss():
    log = read(start(), step(1), step(2), end("nan", "the loss became nan in step 3", 2))

    assert log.steps().index.tolist() == [1, 2, 3]
    assert log.steps()["loss"].tolist() == [2.0, 2.0, np.inf]


def test_a_run_that_ended_otherwise_says_how():
    memory = read(start(), step(1), end("oom", "out of memory: 3 GiB"))
    failed = read(start(), step(1), end("failed", "ValueError: no data"))

    assert memory.out_of_memory == "out of memory: 3 GiB"
    assert failed.remarks == ["a rank ended with status failed: ValueError: no data"]


def test_lines_of_a_newer_schema_are_read_as_far_as_they_are_known():
    log = read(start(schema=2), step(1, new_field={"a": 1}), step(2, new_field={"a": 2}))

    assert log.steps().index.tolist() == [1, 2]
    assert log.remarks == [
        "the lines have schema 2, and this version reads schema 1: newer fields are ignored; "
        "update Paceline"
    ]


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "other"}',
        b'{"event": "step", "step": "x"}',
        b'{"event": "step", "loss": 1}',
        b'{"event": "step", "step": 2,',
        b'{"event": "start", "rank": -1, "world_size": 1}',
        b'{"event": 3}',
        b'{"event": "step", "step": -1}',
        b'{"event": "step", "step": ' + b"9" * 5000,
    ],
)
def test_an_event_line_that_is_not_valid_costs_only_itself_and_is_counted(line: bytes):
    log = check_read(LOG_FORMAT, text(start(), step(1)) + line + b"\n" + text(step(2)))

    assert log.steps().index.tolist() == [1, 2]
    assert log.remarks == ["invalid event lines, ignored: 1"]


def test_ranks_that_share_a_physical_line_are_both_read():
    content = text(start(), step(1)) + text(step(2)).rstrip(b"\n") + text(step(3))

    assert check_read(LOG_FORMAT, content).steps().index.tolist() == [1, 2, 3]


def test_a_ranks_line_between_merged_ones_is_read_as_what_it_is():
    for lines in ((step(1), merged(2)), (merged(1), step(2))):
        log = read(start(world_size=2), *lines)
        of_rank, of_run = (0, 1) if "event" in lines[0] else (1, 0)
        resident = log.steps()["resident_bytes"]
        assert resident[of_run] == 7.0 and resident[of_rank] == STEP["memory_bytes"]["resident"]
        assert "tokens" not in log.steps().columns or np.isnan(log.steps()["tokens"]).all()


def test_skipped_steps_are_counted():
    log = read(start(), step(1, skipped=True), step(2, skipped=True), step(3, skipped=False))

    assert log.steps().index.tolist() == [1, 2, 3]
    assert log.remarks == ["skipped steps (fp16 overflow): 2"]


def test_a_watched_step_has_no_time_and_the_memory_line_is_known():
    numbers = range(1, 9)
    events = [step(k, **({"tracked": True} if k == 2 else {})) for k in numbers]
    log = read(start(), events[0], MEMORY, *events[1:])

    assert log.steps().index.tolist() == [*numbers]
    assert np.flatnonzero(np.isnan(log.steps()["step_time_s"])).tolist() == [1]
    assert log.remarks == []


def test_values_that_are_no_numbers_are_unknown_and_those_too_large_infinite():
    values = [None, "1.5", [1], {}, 10**400, float("nan"), -1e300, True]
    log = read(start(), *(step(k, loss=value) for k, value in enumerate(values, 1)))

    np.testing.assert_array_equal(
        log.steps()["loss"],
        [np.nan, np.nan, np.nan, np.nan, np.inf, np.inf, np.inf, np.nan],
    )


def test_power_and_energy_are_sampled_on_the_nodes_of_a_training() -> None:
    assert job(make_spec(), "x").sampled


@pytest.mark.parametrize(
    ("device", "setting"), [("cpu", None), ("H100", "expandable_segments:True")]
)
def test_memory_segments_grow_on_gpus(device: str, setting: str | None) -> None:
    cluster = Cluster(name="here", device=device, devices_per_node=2)

    assert job(make_spec(cluster=cluster), "x").env.get("PYTORCH_ALLOC_CONF") == setting
