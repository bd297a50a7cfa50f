"""Real trials of the tiny variant with adapters, whose base model is trained first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mlperf.run.test_tiny_trials import (
    assert_misses_its_target_frozen,
    assert_reaches_its_target,
)

pytest.importorskip("torch")
ADAPTED = "llama2-70b-lora"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for runs and data; the base model is trained once for all tests."""
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.nightly
def test_a_trial_trains_to_its_target_and_says_that_it_is_no_result(home: Path):
    assert_reaches_its_target(home, ADAPTED)


@pytest.mark.nightly
def test_a_frozen_model_does_not_reach_the_target(home: Path):
    assert_misses_its_target_frozen(home, ADAPTED)
