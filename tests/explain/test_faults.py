"""Faults seeded into real trainings are found; all ten by `make bench-explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.faults import FAULTS, explained, train

SMALL = ("batch_per_device=4", "layout.micro_batch=4")
"""Little work: on a busy machine a step must stay shorter than what the faults add."""
STEPS = {"data starvation": 12, "slow rank": 40}
"""A rank is only slowed from where it is seen to train, which may be a second late."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of this machine, a healthy one among them."""
    root = tmp_path_factory.mktemp("runs")
    train(root, "usual", settings=(*SMALL, "steps=40"))
    return root


def test_a_healthy_run_gets_no_cause_but_what_else_used_the_cores(root: Path):
    # Other programs of this machine may use them meanwhile.
    alone = explained(root, "usual", None)
    assert {cause.cause for cause in alone.causes} <= {"other load"}
    assert explained(root, "usual", "usual").causes == ()


@pytest.mark.parametrize("cause", STEPS)
def test_a_fault_is_named(cause: str, root: Path):
    tag = cause.replace(" ", "-")
    train(root, tag, FAULTS[cause], settings=(*SMALL, f"steps={STEPS[cause]}"))
    causes = [c for c in explained(root, tag, None).causes if c.cause != "other load"]
    assert causes and causes[0].cause == cause
    assert causes[0].evidence and causes[0].seconds > 0
