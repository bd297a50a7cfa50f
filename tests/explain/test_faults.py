"""Faults injected into real trainings are found; `make bench-explain` tests all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.faults import FAULTS, explain_tagged_run, train

SMALL = ("batch_per_device=4", "layout.micro_batch=4")
"""Small steps: on a busy machine a step must stay shorter than the injected delay."""
STEPS = {"data starvation": 12, "slow rank": 40}
"""Number of steps; the fault starts up to a second after the training does."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a healthy run on this machine."""
    root = tmp_path_factory.mktemp("runs")
    train(root, "usual", settings=(*SMALL, "steps=40"))
    return root


def test_a_healthy_run_gets_no_cause_except_other_load(root: Path):
    # Other processes on this machine may use the cores during the test.
    alone = explain_tagged_run(root, "usual", None)
    assert {cause.cause for cause in alone.causes} <= {"other load"}
    assert explain_tagged_run(root, "usual", "usual").causes == ()


@pytest.mark.parametrize("cause", STEPS)
def test_a_fault_is_found(cause: str, root: Path):
    tag = cause.replace(" ", "-")
    train(root, tag, FAULTS[cause], settings=(*SMALL, f"steps={STEPS[cause]}"))
    causes = [c for c in explain_tagged_run(root, tag, None).causes if c.cause != "other load"]
    assert causes and causes[0].cause == cause
    assert causes[0].evidence and causes[0].seconds > 0
