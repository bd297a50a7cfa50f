"""The learning rate of every step: as PyTorch's own schedulers give it, and across a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

from paceline.core.training import RampUp
from paceline.engines import native
from paceline.trainer.config import ConfigError, LrScheduleConfig, TrainingConfig, parse_config
from paceline.trainer.schedule import BatchSizes, LearningRate, set_learning_rate
from tests.example import make_spec
from tests.trainer.example import log, settings, steps, train

HIGHEST = 3e-4


def training(steps: int, **plan: Any) -> TrainingConfig:
    """A training of `steps` whose rate changes as `plan` says."""
    whole = {"kind": "constant", "warmup": 0, "decay": None, "min_lr": 0.0, "unit": "steps"}
    config = parse_config(settings(steps=steps, lr=HIGHEST)).training
    return replace(config, lr_schedule=LrScheduleConfig(**{**whole, **plan}))


def rates(config: TrainingConfig) -> list[float]:
    """The rate of every step."""
    rate = LearningRate(config)
    return [rate.at(step) for step in range(config.steps)]


def torchs(steps: int, warmup: int, fall: Any) -> list[float]:
    """The rates of torch's LinearLR for `warmup` steps, then of the scheduler that `fall` makes."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=HIGHEST)
    scheduler: LRScheduler = fall(optimizer)
    if warmup > 1:
        rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        scheduler = SequentialLR(optimizer, [rise, scheduler], milestones=[warmup])
    found: list[float] = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 2, 5, 20])
def test_the_cosine_is_torchs(warmup: int) -> None:
    ours = rates(training(40, kind="cosine", warmup=warmup, decay=40, min_lr=1e-5))

    assert ours == pytest.approx(
        torchs(40, warmup, lambda o: CosineAnnealingLR(o, T_max=40 - warmup, eta_min=1e-5)),
        rel=1e-9,
    )


def test_the_linear_fall_is_torchs() -> None:
    ours = rates(training(40, kind="linear", warmup=4, decay=30, min_lr=HIGHEST / 10))

    assert ours == pytest.approx(
        torchs(40, 4, lambda o: LinearLR(o, 1.0, end_factor=0.1, total_iters=26)), rel=1e-9
    )


def test_a_constant_rate_only_rises() -> None:
    assert rates(training(6)) == [HIGHEST] * 6
    assert rates(training(8, warmup=5)) == pytest.approx(
        torchs(8, 5, lambda o: LambdaLR(o, lambda _: 1.0)), rel=1e-9
    )


def test_without_its_own_end_the_fall_ends_with_the_training() -> None:
    ended = rates(training(40, kind="cosine", warmup=4, decay=40))

    assert rates(training(40, kind="cosine", warmup=4)) == ended
    assert 0 < ended[-1] < HIGHEST / 100


def test_behind_its_end_the_lowest_rate_stays() -> None:
    assert rates(training(20, kind="cosine", decay=10, min_lr=1e-6))[10:] == [1e-6] * 10


def test_samples_count_as_they_are_trained_while_the_batch_grows() -> None:
    """As Megatron's --lr-warmup-samples and --lr-decay-samples count them."""
    ramp_up = tuple(RampUp(start=2, increment=2, samples=18).sizes(8))
    plan: dict[str, Any] = {"kind": "linear", "warmup": 12, "decay": 42, "unit": "samples"}
    config = replace(training(9, **plan), global_batch=8, ramp_up=ramp_up)
    behind = [0, 2, 4, 6, 10, 14, 20, 28, 36]
    assert [BatchSizes(ramp_up, 8).samples_before(step) for step in range(9)] == behind

    assert rates(config) == pytest.approx(
        [
            HIGHEST * part
            for part in (2 / 12, 4 / 12, 6 / 12, 10 / 12, 1, 28 / 30, 22 / 30, 14 / 30, 6 / 30)
        ]
    )


def test_the_optimizer_takes_the_steps_rate_in_every_group() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w]} for w in weights], lr=1.0)
    for weight in weights:
        weight.grad = torch.ones(2)

    set_learning_rate(optimizer, 0.25)
    optimizer.step()

    assert all(weight.tolist() == [0.75, 0.75] for weight in weights)


def test_what_the_trainer_does_not_know_is_refused() -> None:
    raw = settings()
    raw["training"]["lr_schedule"] |= {"kind": "wavy"}

    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert str(caught.value) == (
        "training.lr_schedule.kind wavy: use one of constant, linear, cosine"
    )


def test_the_engine_writes_what_the_recipe_says() -> None:
    assert native.settings(make_spec())["training"]["lr_schedule"] == {
        "kind": "constant",
        "warmup": 0,
        "decay": None,
        "min_lr": 0.0,
        "unit": "steps",
    }


FALLING = {"kind": "cosine", "warmup": 3, "decay": None, "min_lr": 1e-5, "unit": "steps"}


@pytest.mark.parametrize("layout", [{}, {"ranks": 2, "zero_stage": 1}], ids=str)
def test_a_training_that_goes_on_takes_the_rates_that_come_next(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """With ZeRO-1 too, whose optimizer knows pieces of the parameters alone."""

    def trained(name: str, **changes: Any) -> list[dict[str, Any]]:
        changes = {"lr_schedule": FALLING, **layout, **changes}
        raw = settings(steps=6, lr=HIGHEST, memory_parts=False, **changes)
        assert train(tmp_path / name, raw) == 0, log(tmp_path / name)
        return steps(tmp_path / name)

    every = {"every": 4, "resume": None, "asynchronous": False}
    whole = trained("whole", checkpoint=every)
    resume = str(tmp_path / "whole" / "checkpoints" / "step-000004")
    rest = trained("rest", checkpoint={**every, "resume": resume})
    constant = trained("constant", lr_schedule={**FALLING, "kind": "constant", "warmup": 0})

    expected = torchs(6, 3, lambda o: CosineAnnealingLR(o, T_max=3, eta_min=1e-5))
    assert [line["lr"] for line in whole] == pytest.approx(expected, rel=1e-9)
    assert [line["lr"] for line in rest] == [line["lr"] for line in whole][4:]
    assert [line["loss"] for line in rest] == pytest.approx(
        [line["loss"] for line in whole][4:], rel=1e-6
    )
    assert whole[1]["loss"] != constant[1]["loss"]
