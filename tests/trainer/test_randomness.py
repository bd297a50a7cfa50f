"""A training with dropout resumes from a checkpoint as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.core.shape import LoraSpec, lora_parameters
from paceline.trainer.model.dropout import preserve_rng
from tests.example import SHAPE
from tests.trainer.example import settings, steps, train

LORA = LoraSpec(rank=4, alpha=8, dropout=0.5, targets=("q", "v"))


def dropping(ranks: int, **checkpoint: Any) -> dict[str, Any]:
    """trainer.json of a LoRA training of 6 steps, half of whose adapters' inputs are dropped."""
    raw = settings(ranks=ranks, source="stdlib", lr=3e-2)
    raw["lora"] = LORA.model_dump(mode="json")
    raw["expected_trainable"] = lora_parameters(SHAPE, LORA)
    raw["expected_parameters"] += raw["expected_trainable"]
    raw["checkpoint"] |= checkpoint
    return raw


def test_what_is_dropped_after_a_checkpoint_is_what_would_have_been(tmp_path: Path) -> None:
    whole, rest, ranks = tmp_path / "whole", tmp_path / "rest", 2

    assert train(whole, dropping(ranks, every=4)) == 0
    resume = str(whole / "checkpoints" / "step-000004")
    assert train(rest, dropping(ranks, resume=resume)) == 0

    for rank in range(ranks):
        wanted = [(line["step"], line["loss"], line["grad_norm"]) for line in steps(whole, rank)]
        found = [(line["step"], line["loss"], line["grad_norm"]) for line in steps(rest, rank)]
        assert found == wanted[4:] and len(found) == 2


def test_what_is_drawn_inside_is_drawn_again() -> None:
    with preserve_rng(torch.device("cpu")):
        inside = torch.rand(3)

    assert torch.equal(torch.rand(3), inside)
