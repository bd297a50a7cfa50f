"""A single estimate follows its pipeline; with equal stages it says what the closed form says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.pipeline import stage_sizes
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.pipeline import simulated_step
from paceline.estimate.model.step import step_components, step_time
from paceline.estimate.model.weights import stage_layers

C = coefficient_values(shipped_evidence().fit().centre)
MODEL = Case(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=0, seq_len=8192,
    peak_16bit=989e12, memory_bytes_per_s=3.35e12, intra_bytes_per_s=450e9, inter_bytes_per_s=50e9,
    devices=64, global_batch=128, gated=True, generation="hopper",
)  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4}, {"pp": 4, "vp": 4}, {"pp": 8, "vp": 2}, {"pp": 4, "schedule": "gpipe"},
        {"pp": 4, "schedule": "zero-bubble"}, {"pp": 4, "vocab": 128256}, {"pp": 4, "frozen": True},
        {"pp": 4, "full_recompute": True, "vocab": 128256},
        {"pp": 8, "vp": 4, "global_batch": 32}, {"pp": 16, "vp": 2, "global_batch": 8},
    ],
    ids=str,
)  # fmt: skip
def test_equal_stages_take_what_the_closed_form_says(layout: dict[str, Any]):
    x = cases_of([replace(MODEL, **layout)])
    followed, closed = simulated_step(x, C), step_time(x, C)
    assert followed.bubble[0] == pytest.approx(closed.bubble[0], rel=1e-6)
    assert followed.total[0] == pytest.approx(closed.total[0], rel=1e-9)


@pytest.mark.parametrize(
    "layout", [{"layers": 30}, {"layers": 33}, {"layers": 14, "vp": 2}], ids=str
)
def test_uneven_stages_come_close(layout: dict[str, Any]):
    x = cases_of([replace(MODEL, pp=4, vocab=128256, **layout)])
    followed, closed = simulated_step(x, C), step_time(x, C)
    work = step_components(x, C)
    busy = work.num_microbatches * (work.slowest + work.stage_transfer)
    assert followed.total[0] == pytest.approx(closed.total[0], rel=0.05)
    assert followed.bubble[0] > 0 and followed.total[0] > busy[0]


def test_rows_are_followed_each_by_itself():
    cases = [replace(MODEL, pp=pp, layers=33, vocab=128256) for pp in (4, 1, 8)]
    together = simulated_step(cases_of(cases), C).total
    alone = [simulated_step(cases_of([case]), C).total[0] for case in cases]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)


def test_without_a_pipeline_nothing_waits_and_far_too_many_passes_keep_the_closed_form():
    alone = cases_of([MODEL])
    assert simulated_step(alone, C).bubble[0] == 0
    huge = cases_of([replace(MODEL, pp=32, global_batch=64_000)])
    assert simulated_step(huge, C).total[0] == step_time(huge, C).total[0]


def test_a_head_beside_fewer_layers_hides_in_the_pipeline():
    counted = cases_of([replace(MODEL, pp=8, layers=126, vocab=128256, global_batch=512)])
    behind = cases_of([replace(MODEL, pp=8, layers=128, vocab=128256, global_batch=512)])
    assert step_components(counted, C).own_head[0] > 0
    assert simulated_step(behind, C).total[0] > simulated_step(counted, C).total[0]


@pytest.mark.parametrize(
    ("layers", "pp", "vp"),
    [(32, 4, 1), (126, 16, 1), (126, 16, 8), (80, 4, 5), (6, 2, 2), (70, 72, 1)],
)
def test_layers_of_the_ranks_are_those_of_the_stages(layers: int, pp: int, vp: int):
    sizes = stage_sizes(layers, pp, vp)
    ranks = [sum(sizes[rank::pp]) for rank in range(pp)]
    most, last = stage_layers(cases_of([replace(MODEL, layers=layers, pp=pp, vp=vp)]))
    assert (most[0], last[0]) == (max(ranks[:-1]), ranks[-1])


def test_leftover_layers_go_to_the_first_ranks():
    most, last = stage_layers(cases_of([replace(MODEL, layers=n, pp=4) for n in (33, 31, 32)]))
    assert np.array_equal(most, [9, 8, 8]) and np.array_equal(last, [8, 7, 8])
