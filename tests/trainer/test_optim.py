"""Clipping, the loss scale, and the settings of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.trainer.config import LossScaleConfig, parse_config
from paceline.trainer.data.batches import Loader, Sampler
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.outcome import NotFiniteError
from paceline.trainer.optim import LossScaler, clip_factor, make_optimizer, scale_gradients
from paceline.trainer.parallel.mesh import Mesh, join_world
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer
from tests.trainer.example import settings


@pytest.fixture
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a trainer of one process with its loader."""

    def make(**changes: Any) -> tuple[Trainer, Loader]:
        config = parse_config(settings(source="synthetic", **changes))
        world, mesh, steps = join_world("cpu"), Mesh(), StepClock(HostClock())
        events = EventLog(str(tmp_path_factory.mktemp("events")), 0)
        replica = make_replica(config, world, mesh, steps)
        trainer = Trainer(config, replica, world, steps, events)
        corpus = load_corpus(config)
        sampler = Sampler(corpus.num_windows, config.training.global_batch, 1, seed=0)
        return trainer, Loader(corpus, sampler, config, mesh, pin=False)

    return make


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for _, p in trainer.replica.named_parameters()]


def test_gradients_above_the_limit_are_shortened_to_it() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), -2.0)]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert norm.item() == pytest.approx(28**0.5)

    scale_gradients(gradients, clip_factor(norm, 1.0))

    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(1.0, rel=1e-5)
    assert clip_factor(norm, 10.0) == 1.0
    assert clip_factor(norm, 0.0) == 1.0


def test_weight_decay_spares_vectors(make_trainer: Any) -> None:
    trainer, _ = make_trainer(bias=True, norm="layernorm")

    optimizer = make_optimizer(trainer.replica, trainer.config.training, None, None)

    decayed, spared = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.ndim for p in spared["params"]} == {1} and spared["weight_decay"] == 0.0
    assert decayed["fused"] and decayed["betas"] == (0.9, 0.95)


def test_weight_decay_spares_the_stacked_biases_of_experts(make_trainer: Any) -> None:
    trainer, _ = make_trainer(bias=True, num_experts=4, experts_per_token=2)

    optimizer = make_optimizer(trainer.replica, trainer.config.training, None, None)

    names = {id(p): name for name, p in trainer.replica.named_parameters()}
    decayed, spared = ({names[id(p)] for p in g["params"]} for g in optimizer.param_groups)
    biases = {name for name in names.values() if name.endswith("bias")}
    assert any(name.endswith("experts.up_bias") for name in biases)
    assert biases <= spared and not any(name.endswith(".experts.up") for name in spared)
    assert any(name.endswith(".experts.up") for name in decayed)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_its_window() -> None:
    scaler = LossScaler(LossScaleConfig(initial=1024.0, window=3))

    assert not scaler.accept(float("inf")) and scaler.scale == 512
    assert not scaler.accept(float("nan")) and scaler.scale == 256
    assert scaler.accept(1.0) and scaler.accept(1.0) and scaler.scale == 256
    assert scaler.accept(1.0) and scaler.scale == 512
    scaler.accept(1.0)
    scaler.accept(float("inf"))
    assert [scaler.accept(1.0), scaler.accept(1.0), scaler.scale] == [True, True, 256]


def test_with_hysteresis_the_second_overflow_since_it_grew_is_the_first_to_halve() -> None:
    scaler = LossScaler(LossScaleConfig(initial=1024.0, window=2, hysteresis=2))
    overflow = float("inf")

    assert not scaler.accept(overflow) and scaler.scale == 1024
    assert scaler.accept(1.0) and not scaler.accept(overflow) and scaler.scale == 512
    resumed = LossScaler(scaler.plan)
    resumed.restore(scaler.state())
    assert not resumed.accept(overflow) and resumed.scale == 256
    assert resumed.accept(1.0) and resumed.accept(1.0) and resumed.scale == 512
    assert not resumed.accept(overflow) and resumed.scale == 512


def test_the_loss_scale_begins_and_grows_as_the_settings_say(make_trainer: Any) -> None:
    plan = {"initial": 2.0**12, "window": 2, "hysteresis": 2}
    trainer, loader = make_trainer(dtype="fp16", num_layers=1, loss_scale=plan)
    scales = []
    for _ in range(3):
        scales.append(trainer.scaler.scale)
        assert not trainer.step(loader.next()[0])[1]
    loader.close()

    assert scales == [2.0**12, 2.0**12, 2.0**13]
    assert make_trainer(dtype="fp16")[0].scaler.scale == 65536


def test_an_fp16_overflow_skips_the_step_and_training_goes_on(make_trainer: Any) -> None:
    trainer, loader = make_trainer(dtype="fp16", num_layers=1, steps=40)
    trainer.scaler.scale = 2.0**40
    before = weights(trainer)

    loss_and_norm, skipped = trainer.step(loader.next()[0])

    assert skipped and torch.isfinite(loss_and_norm[0])
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    for _ in range(30):
        if not trainer.step(loader.next()[0])[1]:
            break
    assert trainer.scaler.scale < 2.0**40
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    loader.close()


def test_the_loss_scale_changes_neither_loss_nor_norm(make_trainer: Any) -> None:
    """fp16 figures are reported unscaled, so they agree with fp32's."""
    figures = []
    for dtype in ("fp16", "fp32"):
        trainer, loader = make_trainer(dtype=dtype, num_layers=1)
        figures.append(trainer.step(loader.next()[0])[0])
        loader.close()

    assert torch.allclose(figures[0], figures[1], rtol=1e-2)


def test_a_gradient_that_overflows_unscaled_ends_the_training(make_trainer: Any) -> None:
    trainer, loader = make_trainer(dtype="fp16", num_layers=1)
    trainer.scaler.scale = 1.0
    with torch.no_grad():
        trainer.replica.parts[0].final_norm.weight.fill_(6e4)

    with pytest.raises(NotFiniteError, match="step 1"):
        trainer.run(loader, {})
    loader.close()
