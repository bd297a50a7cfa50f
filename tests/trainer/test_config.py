"""What the trainer cannot do is said in one sentence before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.mmdit import MMDiTShape
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.core.training import (
    Checkpointing,
    Data,
    Evaluation,
    LossScale,
    LrSchedule,
    MlperfLog,
    Profiling,
    Training,
)
from paceline.trainer import config, model_config
from paceline.trainer.config import ConfigError, parse_config, parse_model, read_json
from paceline.trainer.config_checks import config_problems
from paceline.trainer.measure.event_log import EventLog, resident_bytes
from paceline.trainer.measure.outcome import NotFiniteError, outcome
from paceline.trainer.train import check_device
from tests.trainer.example import lines, settings


def test_what_the_engine_writes_is_accepted() -> None:
    parsed = parse_config(settings(ranks=2))

    assert config_problems(parsed, world_size=2) == []
    assert parsed.layout_record()["dp"] == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tp": 2}, "pp 1 x dp 2 x cp 1 x tp 2: 2 processes were started; start 4"),
        ({"pp": 2}, "pp 2 x dp 2 x cp 1 x tp 1: 2 processes were started; start 4"),
        ({"dp": 3, "num_microbatches": 1}, "pp 1 x dp 3 x cp 1 x tp 1: 2 processes were started"),
        ({"num_microbatches": 5}, "dp 2 x micro_batch 4 x num_microbatches 5 is 40"),
    ],
)
def test_a_problem_is_named_by_its_field(changes: dict[str, Any], problem: str) -> None:
    found = config_problems(parse_config(settings(ranks=2, **changes)), world_size=2)

    assert problem in "; ".join(found)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recompute": "some"}, "layout.recompute some: use one of none, selective, full, budget"),
        ({"zero_stage": 4}, "layout.zero_stage 4: use one of 0, 1, 2, 3"),
        ({"dtype": "mxfp4"}, "training.dtype mxfp4: use one of fp32, bf16"),
        ({"source": "web"}, "data.source web: use one of synthetic"),
        ({"recompute_levels": ["some"]}, "recompute_levels some: use one of full"),
        ({"lora": 3}, "lora: is missing or not an object"),
    ],
)
def test_a_value_is_one_of_the_choices(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(settings(ranks=2, **changes))


def test_a_model_says_its_kind() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind mixture: use one of decoder, mmdit"):
        parse_model({"kind": "mixture"})


OF_THE_TRAINER = {"padded_vocab", "tied_embeddings", "positions", "routing_weights"}
"""Fields that are computed from those of the run description."""


@pytest.mark.parametrize(
    ("ours", "written"),
    [
        (config.LayoutConfig, Layout),
        (config.TrainingConfig, Training),
        (config.DataConfig, Data),
        (config.LoraConfig, LoraSpec),
        (config.CheckpointConfig, Checkpointing),
        (config.LrScheduleConfig, LrSchedule),
        (config.LossScaleConfig, LossScale),
        (config.EvaluationConfig, Evaluation),
        (config.MlperfConfig, MlperfLog),
        (config.ProfileConfig, Profiling),
        (model_config.ModelConfig, DecoderShape),
        (model_config.FluxConfig, MMDiTShape),
    ],
)
def test_a_part_of_the_input_has_fields_of_the_run_description(ours: type, written: Any) -> None:
    fields = {field.name: field for field in dataclasses.fields(ours)}
    declared = written.model_fields
    assert fields.keys() - declared.keys() <= OF_THE_TRAINER
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING and name in declared:
            value = declared[name].get_default()
            assert field.default == (
                config.LossScaleConfig() if isinstance(value, LossScale) else value
            ), name


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
    with pytest.raises(
        ConfigError, match="schema: 1 is not supported; this trainer reads schema 2"
    ):
        parse_config({**settings(), "schema": 1})


def test_keys_of_later_versions_are_passed_over() -> None:
    raw = {**settings(), "colour": "blue"}
    raw["layout"]["sharing"] = 3

    assert parse_config(raw) == parse_config(settings())


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
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
