"""Adapters with a learning rate of their own, and weights that train with another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.shape import LoraSpec, lora_parameters, trainable_parameters
from paceline.trainer.config import is_adapter, parse_config
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.parallel.mesh import Mesh, join_world
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.schedule import set_learning_rate
from paceline.trainer.trainer import Trainer
from tests.example import SHAPE
from tests.trainer.example import settings, steps, train

LORA = LoraSpec(rank=4, alpha=8, targets=("q", "v"), lr=5e-3, train_rest=True)
REST = 1e-5
WARMUP = {"kind": "constant", "warmup": 4, "decay": None, "min_lr": 0.0, "unit": "steps"}


def adapted(ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """trainer.json of a training whose adapters learn 500 times as fast as the rest."""
    plan = {"lr": REST, "lr_schedule": WARMUP, "global_batch": 8, "micro_batch": 4}
    raw = settings(ranks=ranks, source="stdlib", **plan, **changes)
    raw["lora"] = LORA.model_dump(mode="json")
    raw["expected_trainable"] = trainable_parameters(SHAPE, LORA)
    raw["expected_parameters"] += lora_parameters(SHAPE, LORA)
    return raw


def test_every_step_is_that_of_plain_adamw_with_two_rates(tmp_path: Path) -> None:
    config = parse_config(adapted())
    world, clock = join_world("cpu"), StepClock(HostClock())
    replica = make_replica(config, world, Mesh(), clock)
    trainer = Trainer(config, replica, world, clock, EventLog(str(tmp_path), 0))
    trained = {n: p for n, p in replica.named_parameters() if p.requires_grad}
    copies = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in copies.values()],
        betas=config.training.betas, eps=config.training.eps,
    )  # fmt: skip
    corpus = load_corpus(config)
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, Mesh(), pin=False)
    apply = trainer.optimizer.step

    def beside(rise: float) -> None:
        for (name, copy), group in zip(copies.items(), reference.param_groups, strict=True):
            copy.grad = trained[name].grad
            group["lr"] = rise * (5e-3 if is_adapter(name) else REST)
        reference.step()
        apply()

    begun = {name: p.detach().clone() for name, p in trained.items()}
    for step in range(3):
        set_learning_rate(trainer.optimizer, trainer.rate.at(step))
        trainer.optimizer.step = lambda rise=(step + 1) / 4: beside(rise)  # type: ignore[method-assign, misc]
        trainer.step(loader.next()[0])
    loader.close()

    for name, p in trained.items():
        assert torch.allclose(p, copies[name], rtol=1e-6, atol=1e-9), name
    moved = {name: (p - begun[name]).abs().max().item() for name, p in trained.items()}
    assert min(far for name, far in moved.items() if is_adapter(name)) > 1e-3
    assert max(far for name, far in moved.items() if not is_adapter(name)) < 1e-4


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_it_holds_where_states_are_sharded_and_after_a_restart(
    tmp_path: Path, zero_stage: int
) -> None:
    raw = adapted(2, zero_stage=zero_stage)
    raw["checkpoint"]["every"] = 4
    assert train(tmp_path / "alone", adapted()) == 0
    assert train(tmp_path / "whole", raw) == 0
    raw["checkpoint"] = {
        **raw["checkpoint"],
        "resume": str(tmp_path / "whole/checkpoints/step-000004"),
    }
    assert train(tmp_path / "rest", raw) == 0

    alone, whole, rest = (steps(tmp_path / name) for name in ("alone", "whole", "rest"))
    norms = [line["grad_norm"] for line in whole]
    assert norms == pytest.approx([line["grad_norm"] for line in alone], rel=1e-4)
    assert norms[4:] == [line["grad_norm"] for line in rest]
    rises = (1 / 4, 2 / 4, 3 / 4, 1, 1, 1)
    assert [line["lora_lr"] for line in whole] == pytest.approx([5e-3 * rise for rise in rises])
    assert [line["lr"] for line in whole] == pytest.approx([REST * rise for rise in rises])
