"""Memory of the ranks by part, with the limit that applies and the computed lower bound."""

from __future__ import annotations

from typing import Any

from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.ranks import memory_by_part
from paceline.core.result import MemoryByPart, RankMemory
from paceline.core.run import RunSettings
from tests.core.shapes import run_of
from tests.example import make_spec

GIB = 2**30


def rank(number: int, resident: float | None = 2 * GIB, **changes: Any) -> RankMemory:
    values: dict[str, Any] = {
        "rank": number,
        "step": 2,
        "kind": "tracked",
        "parts_bytes": {"weights": 10.0, "activations": 30.0, "context": 100.0},
        "at_peak_bytes": {"weights": 10.0, "activations": 30.0},
        "peak_bytes": {"resident": resident, "tracked": 40.0},
    }
    return RankMemory.model_validate({**values, **changes})


def memory_of(*ranks: RankMemory, step_time_s: float | None = 0.2, **spec: Any) -> MemoryByPart:
    run = make_spec(**spec)
    memory = memory_by_part(ranks, run, RunSettings.of(run), None, 7.0, step_time_s)
    assert memory is not None
    return memory


def test_nothing_watched_is_nothing_told():
    run = make_spec()
    assert memory_by_part([], run, RunSettings.of(run), None, 0.0, None) is None


def test_the_largest_rank_is_the_one_whose_process_or_device_has_most_in_use():
    assert memory_of(rank(0), rank(1, 3 * GIB), rank(2)).largest_rank == 1
    on_device = rank(1, 3 * GIB, peak_bytes={"device_used": 5 * GIB, "resident": 1.0})
    assert memory_of(rank(0, 4 * GIB), on_device).largest_rank == 1
    assert rank(0, None).size_bytes == 140.0, "without either, the tensors and the context"


def test_ranks_stand_in_their_order_with_the_slowest_ones_cost():
    memory = memory_of(rank(1, watched_step_s=0.9), rank(0, watched_step_s=0.5))

    assert [r.rank for r in memory.ranks] == [0, 1]
    assert memory.watch_cost_s is not None and abs(memory.watch_cost_s - 0.7) < 1e-9
    assert memory_of(rank(0), step_time_s=None).watch_cost_s is None


def test_a_recipes_own_limit_is_on_what_comes_after_the_context():
    memory = memory_of(rank(0), memory_limit_bytes=64e6)
    assert (memory.limit_bytes, memory.limit_counts_context) == (64e6, False)
    assert memory.limit == "memory_limit_bytes of the recipe"

    assert memory_of(rank(0)).limit_bytes is None is memory_of(rank(0)).limit


def test_the_bound_is_the_static_one_by_the_measured_parts_names():
    layout = Layout(micro_batch=4, zero_stage=3)
    run = make_spec(layout=layout)
    need = memory_per_device(run_of(run.model, layout, 2, 32, "fp32", None, 1), 7.0)
    bound = memory_of(rank(0), layout=layout).bound_bytes

    assert abs(sum(bound.values()) - need.total_bytes) < 1e-6
    assert bound["gathered"] == need.copies_bytes > 0 and bound["context"] == 7.0
    assert memory_of(rank(0)).bound_bytes["gathered"] == 0
