"""A training begins with another's weights, whatever layout wrote them and whatever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.checkpoint import find_checkpoint
from paceline.trainer.config import ConfigError
from paceline.trainer.pretrained import FIELD
from tests.trainer.example import end, settings, train
from tests.trainer.test_evaluation import evaluated, evaluations
from tests.trainer.test_randomness import LORA, dropping

STILL = 1e-30
"""A learning rate that moves nothing."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that share everything, with a checkpoint and an evaluation at its end."""
    folder = tmp_path_factory.mktemp("base")
    raw = evaluated(ranks=2, every_samples=48)
    raw["layout"]["zero_stage"] = 3
    raw["checkpoint"]["every"] = 6
    assert train(folder, raw) == 0
    return folder


def begun_with(base: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The same training with the base's weights, which it leaves as they are."""
    raw["training"] |= {"initial_weights": str(base), "lr": STILL}
    return raw


def test_the_weights_are_those_of_the_checkpoint(base: Path, tmp_path: Path) -> None:
    raw = begun_with(base, evaluated(step_count=1, every_samples=1))

    assert train(tmp_path, raw) == 0

    found, wanted = evaluations(tmp_path)[0]["loss"], evaluations(base)[-1]["loss"]
    assert found == pytest.approx(wanted, rel=1e-5) and wanted < 5.5


def test_adapters_begin_without_effect_on_their_base(base: Path, tmp_path: Path) -> None:
    raw = begun_with(base, dropping(1))
    raw["training"]["evaluation"] = evaluated(every_samples=24)["training"]["evaluation"]

    assert train(tmp_path, raw) == 0 and LORA.dropout

    assert evaluations(tmp_path)[0]["loss"] == pytest.approx(
        evaluations(base)[-1]["loss"], rel=1e-5
    )


def test_a_checkpoint_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    assert train(tmp_path, begun_with(base, settings(ffn_size=96))) == 1

    assert "has shape (64, 32), but this model needs (96, 32)" in end(tmp_path)["reason"]


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training\.initial_weights .*gone: is missing"):
        find_checkpoint(tmp_path / "gone", FIELD)
