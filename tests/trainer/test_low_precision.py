"""Whole trainings in block-scaled formats: other layouts compute what one process does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paceline.core.shape import LoraSpec, lora_parameters, trainable_parameters
from tests.example import SHAPE
from tests.trainer.example import log, settings, steps, train

pytest.importorskip("torchao", reason="low precision needs torchao")

WIDE: dict[str, Any] = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 256}
MXFP8: dict[str, Any] = {"dtype": "mxfp8"}
NVFP4: dict[str, Any] = {"dtype": "nvfp4"}
BLOCKWISE: dict[str, Any] = {"dtype": "fp8", "fp8_recipe": "blockwise"}


@cache
def alone(dtype: str, fp8_recipe: str = "tensorwise") -> list[dict[str, Any]]:
    """The steps of one process."""
    chosen: dict[str, Any] = {"dtype": dtype, "fp8_recipe": fp8_recipe, "global_batch": 8}
    with TemporaryDirectory() as name:
        assert train(Path(name), settings(steps=3, **WIDE, **chosen)) == 0
        return steps(Path(name))


@pytest.mark.parametrize(
    ("narrow", "layout", "off"),
    [
        # Blocks lie within a rank's part, so nothing but the order of bf16 sums differs.
        (MXFP8, {"tp": 2, "sequence_parallel": True, "recompute": "selective"}, 2e-4),
        (BLOCKWISE, {"tp": 2}, 2e-4),
        (MXFP8, {"zero_stage": 3, "recompute": "full"}, 2e-4),
        # The outer scale is a rank's own, and gradients are rounded at random.
        (NVFP4, {"tp": 2}, 2e-3),
    ],
    ids=["mxfp8-tp", "blockwise-tp", "mxfp8-zero3", "nvfp4-tp"],
)
def test_two_ranks_train_as_one_process(
    narrow: dict[str, Any], layout: dict[str, Any], off: float, tmp_path: Path
) -> None:
    replicas = 2 // layout.get("tp", 1)
    raw = settings(steps=3, ranks=replicas, global_batch=8, **WIDE, **narrow)
    raw["layout"].update(layout)

    assert train(tmp_path, raw) == 0, log(tmp_path)

    found, wanted = steps(tmp_path), alone(**narrow)
    # A step's line has its own replica's loss, and the norm of the whole gradient.
    if replicas == 1:
        assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=off)
    for line, expected in zip(found, wanted, strict=True):
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=20 * off)


@pytest.mark.parametrize("narrow", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_adapters_learn_on_frozen_weights_in_low_precision(
    narrow: dict[str, Any], tmp_path: Path
) -> None:
    lora, shape = LoraSpec(rank=4, alpha=8, targets=("q", "v")), SHAPE.model_copy(update=WIDE)
    raw = settings(steps=6, lr=2e-2, **WIDE, **narrow)
    raw["lora"] = lora.model_dump(mode="json")
    raw["expected_trainable"] = trainable_parameters(shape, lora)
    raw["expected_parameters"] += lora_parameters(shape, lora)

    assert train(tmp_path, raw) == 0, log(tmp_path)

    losses = [line["loss"] for line in steps(tmp_path)]
    assert losses[-1] < losses[0] - 0.01
