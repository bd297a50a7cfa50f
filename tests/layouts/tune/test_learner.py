"""What is expected after runs: the coefficients move, and so do layouts that were not run."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.layout import Layout
from paceline.layouts.tune.candidates import Candidates
from paceline.layouts.tune.search import Learner
from tests.layouts.tune.worlds import World, made_up


@pytest.fixture(scope="module")
def some() -> Candidates:
    return made_up(
        [
            Layout(tp=tp, micro_batch=size, zero_stage=1, recompute=kind, sequence_parallel=tp > 1)
            for tp in (1, 2, 4, 8)
            for size in (1, 2)
            for kind in ("none", "full")
        ]
    )


def test_before_any_run_it_is_the_estimate(some: Candidates):
    learner = Learner(some)
    belief = learner.belief({})
    assert np.exp(belief.mean) == pytest.approx(some.seconds) and learner.refitted_evidence is None


def test_a_machine_that_is_slower_in_all_is_learned_from_two_runs(some: Candidates):
    learner, slower = Learner(some), 1.6 * some.seconds
    belief = learner.belief({0: [slower[0]], 7: [slower[7]]})
    assert np.exp(belief.mean) == pytest.approx(slower, rel=0.12)
    assert belief.sd.max() < Learner(some).belief({}).sd.min()
    assert learner.refitted_evidence is not None and learner.refitted_evidence.own_rows == 2


def test_what_was_measured_is_believed(some: Candidates):
    world = World(some, 4, noise=0.0)
    rows = [0, 3, 9, 14]
    belief = Learner(some).belief({row: [world.truth[row]] * 3 for row in rows})
    assert np.exp(belief.mean[rows]) == pytest.approx(world.truth[rows], rel=0.02)


def test_without_a_time_model_runs_alone_tell():
    blind = made_up([Layout(tp=tp, sequence_parallel=tp > 1) for tp in (1, 2, 4, 8)], blind=True)
    learner = Learner(blind)
    belief = learner.belief({0: [2.0], 1: [2.4]})
    assert learner.refitted_evidence is None and belief.mean[3] > belief.mean[1] > belief.mean[0]
    assert np.exp(belief.mean[0]) == pytest.approx(2.0, rel=0.05)
