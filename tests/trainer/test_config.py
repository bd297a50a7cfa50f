"""What the trainer cannot do is said in one sentence before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.config import ConfigError, parse_config, read_json
from paceline.trainer.config_checks import config_problems
from paceline.trainer.measure.event_log import EventLog, resident_bytes
from paceline.trainer.measure.outcome import NotFiniteError, outcome
from paceline.trainer.train import check_device
from tests.trainer.example import lines, settings


def test_what_the_engine_writes_is_accepted() -> None:
    config = parse_config(settings(ranks=2))

    assert config_problems(config, world_size=2) == []
    assert config.layout_record()["dp"] == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tp": 2}, "dp 2 x tp 2 x pp 1 x cp 1: 2 processes were started; start 4"),
        ({"pp": 2}, "dp 2 x tp 1 x pp 2 x cp 1: 2 processes were started; start 4"),
        ({"ep": 2}, "ep > 1 is not in the native trainer"),
        ({"recompute": "some"}, "layout.recompute some: use one of none, selective, full, budget"),
        ({"zero_stage": 4}, "layout.zero_stage 4"),
        ({"dtype": "mxfp4"}, "training.dtype mxfp4: use one of"),
        ({"source": "web"}, "data.source web: use one of"),
        ({"dp": 3, "num_microbatches": 1}, "dp 3 x tp 1 x pp 1 x cp 1: 2 processes were started"),
        ({"num_microbatches": 5}, "dp 2 x micro_batch 4 x num_microbatches 5 is 40"),
        ({"positions": "learned", "max_positions": 16}, "has only 16 learned positions"),
    ],
)
def test_a_problem_is_named_by_its_field(changes: dict[str, Any], problem: str) -> None:
    found = config_problems(parse_config(settings(ranks=2, **changes)), world_size=2)

    assert problem in "; ".join(found)


@pytest.mark.parametrize(
    ("levels", "problem"),
    [
        (["full"], "recompute_levels: 1 level for 2 layers"),
        (["full", "some"], "recompute_levels some: use full, ffn, activation, none"),
    ],
)
def test_a_budget_needs_a_level_for_every_block(levels: list[str], problem: str) -> None:
    raw = settings(ranks=2, recompute="budget", recompute_budget=0.5)

    assert problem in config_problems(parse_config({**raw, "recompute_levels": levels}), 2)


@pytest.mark.parametrize(
    "changes", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"recompute": "selective"}, {"zero_stage": 3}]
)
def test_every_axis_makes_a_world(changes: dict[str, Any]) -> None:
    dp = 1 if set(changes) & {"tp", "cp", "pp"} else 2
    raw = settings(ranks=2, dp=dp, num_microbatches=2 // dp, **changes)

    assert config_problems(parse_config(raw), world_size=2) == []


def test_a_missing_key_is_named() -> None:
    raw = settings()
    del raw["training"]["seed"]
    with pytest.raises(ConfigError, match=r"training\.seed: is missing"):
        parse_config(raw)
    with pytest.raises(ConfigError, match="model: is missing"):
        parse_config({**settings(), "model": None})
    with pytest.raises(ConfigError, match="schema: 2 is not the 1"):
        parse_config({**settings(), "schema": 2})


def test_keys_of_later_versions_are_passed_over() -> None:
    raw = {**settings(), "colour": "blue"}
    raw["layout"]["sharing"] = 3

    assert parse_config(raw) == parse_config(settings())


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        read_json(str(tmp_path / "a.json"))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device tpu: use cpu or cuda"):
        check_device("tpu")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotFiniteError("the loss became nan in step 3"), "nan", "the loss became nan in step 3"),
        (ConfigError("dp 3: no"), "failed", "dp 3: no"),
        (MemoryError(), "oom", "MemoryError"),
        (RuntimeError("CUDA out of memory. Tried"), "oom", "RuntimeError: CUDA out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
         "oom", "can't allocate memory"),
        (RuntimeError("gloo: Connection closed by peer [::1]:80"), "failed", "another rank ended"),
        (ZeroDivisionError("division by zero\nsecond line"), "failed",
         "ZeroDivisionError: division by zero second line"),
    ],
)  # fmt: skip
def test_every_exception_becomes_a_status_and_a_sentence(
    error: BaseException, status: str, reason: str
) -> None:
    found, sentence, _ = outcome(error)

    assert found == status and reason in sentence and "\n" not in sentence


def test_events_are_one_line_each_and_valid_json(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "steps"), rank=3)
    log.write("start", text="two\nlines")
    log.write("step", loss=float("nan"), grad_norm=float("inf"), step=1)

    assert lines(tmp_path, rank=3) == [
        {"event": "start", "text": "two\nlines"},
        {"event": "step", "loss": None, "grad_norm": None, "step": 1},
    ]
    assert log.steps_done == 1


def test_a_line_behind_a_torn_one_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text('{"event": "step", "lo')

    EventLog(str(tmp_path), rank=0).write("start")

    text = (tmp_path / "rank-00000.jsonl").read_text()
    assert text == '{"event": "step", "lo\n{"event": "start"}\n'


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_bytes()
    assert 2**25 < before < 2**40

    held = bytearray(before)

    assert resident_bytes() > 1.2 * before
    del held
