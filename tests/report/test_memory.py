"""Memory by part is drawn as it was measured: bars that add up, the limit, what was left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paceline.core.result import MemoryByPart, RankMemory
from paceline.core.units import GIB, MIB
from paceline.report.machine_charts import (
    MAX_DRAWN_RANKS,
    PART_COLOURS,
    memory_by_part_chart,
    memory_sentence,
    rank_parts,
)
from paceline.report.theme import DARK, EXPORT, LIGHT
from tests.report.example import memory_by_part, rank_memory, report


def spec_of(memory: MemoryByPart) -> dict[str, Any]:
    chart = memory_by_part_chart(report(memory=memory), EXPORT)
    assert chart is not None
    return chart.to_dict()


def rows_of(spec: dict[str, Any], layer: str) -> list[dict[str, Any]]:
    layers = [part for part in spec["layer"] if part.get("name") == layer]
    return (layers[0].get("data") or spec["data"])["values"] if layers else []


def notes_of(spec: dict[str, Any]) -> str:
    return " ".join(spec["title"]["subtitle"])


def test_a_bar_is_cut_without_gaps_and_ends_at_the_resident_peak():
    rank = rank_memory(0)
    rows = [r for r in rows_of(spec_of(memory_by_part()), "parts") if r["bar"] == "rank 0"]

    assert rows[0]["start"] == 0
    assert all(a["end"] == b["start"] for a, b in pairwise(rows))
    watcher = rank.watcher_bytes or 0.0
    assert rows[-1]["end"] * GIB == pytest.approx((rank.peak_bytes["resident"] or 0.0) - watcher)
    assert [row["part"] for row in rows] == [
        p for p in PART_COLOURS if p in {r["part"] for r in rows}
    ]


def test_on_a_gpu_the_bar_ends_at_what_the_allocator_reserved_and_the_context():
    peak = {"allocated": 7 * GIB, "reserved": 9 * GIB, "device_used": 10 * GIB, "resident": 2 * GIB}
    rank = rank_memory(0, kind="allocated", peak_bytes=peak, watcher_bytes=None)
    parts = rank_parts(rank)

    assert sum(parts.values()) == pytest.approx(9 * GIB + parts["context"])


def test_the_limit_is_a_line_where_it_is_near_and_words_where_it_is_far():
    near = spec_of(memory_by_part(limit_bytes=1.0 * GIB))
    far = spec_of(memory_by_part(limit_bytes=64.0 * GIB))

    assert rows_of(near, "part-limit")[0]["start"] == 1.0 and "Line: 1.00 GiB" in notes_of(near)
    assert not rows_of(far, "part-limit") and "Beyond the axis: 64.00 GiB" in notes_of(far)


def test_a_limit_beyond_the_context_is_held_against_tensors_alone():
    memory = memory_by_part(limit_bytes=200 * MIB, limit_counts_context=False)
    rows = rows_of(spec_of(memory), "parts")

    assert {row["part"] for row in rows}.isdisjoint({"context", "rest"})
    assert "beyond the context" in notes_of(spec_of(memory))


def test_the_static_lower_bound_stands_above_the_ranks():
    spec = spec_of(memory_by_part())
    bars = list(dict.fromkeys(row["bar"] for row in rows_of(spec, "parts")))

    assert bars == ["lower bound", "rank 0", "rank 1"] and "calculated minimum" in notes_of(spec)


def test_the_largest_ranks_are_shown_and_the_others_counted():
    ranks = tuple(rank_memory(n, resident=(1 + (n == 39)) * GIB + n) for n in range(40))
    spec = spec_of(memory_by_part(ranks=ranks, largest_rank=39))
    bars = {row["bar"] for row in rows_of(spec, "parts")} - {"lower bound"}

    assert bars == {f"rank {n}" for n in range(40 - MAX_DRAWN_RANKS, 40)}
    assert "24 more are in result.json" in notes_of(spec)


def test_a_peak_without_a_breakdown_says_why():
    rank = rank_memory(0, kind=None, at_peak_bytes=None, why="compiled blocks hide")
    sentence = memory_sentence(memory_by_part(ranks=(rank,)))

    assert "no breakdown of its peak (compiled blocks hide)" in sentence and "weights" in sentence


def test_parts_that_cannot_be_separated_are_noted():
    rank = rank_memory(0, kind="allocated", why="activations include gradients")
    sentence = memory_sentence(memory_by_part(ranks=(rank,)))

    assert "allocated: weights" in sentence
    assert sentence.endswith("(activations include gradients)")


def test_the_sentence_names_the_kind_and_every_part_with_its_unit():
    sentence = memory_sentence(memory_by_part(largest_rank=1))

    assert sentence.startswith("rank 1 at its peak, 0.19 GiB tracked: weights 13.0 MiB")
    assert "buffers" not in sentence, "too small to be written"


def test_without_a_watched_step_there_is_no_chart():
    assert memory_by_part_chart(report(memory=None), EXPORT) is None


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_no_two_parts_have_the_same_colour(palette: Any):
    colours = [getattr(palette, name) for name in PART_COLOURS.values()]
    assert len(set(colours)) == len(colours)


def test_nothing_known_is_nothing_drawn_and_said_so():
    bare = RankMemory(rank=0, step=2, kind=None, parts_bytes={}, at_peak_bytes=None, peak_bytes={})
    memory = memory_by_part(ranks=(bare,), limit_bytes=None, limit=None, bound_bytes={})

    assert memory_by_part_chart(report(memory=memory), EXPORT) is None
    assert memory_sentence(memory) == "rank 0 holds an unknown amount; no breakdown of its peak"


def test_ranks_may_lack_any_figure():
    bare = RankMemory(rank=0, step=2, kind=None, parts_bytes={}, at_peak_bytes=None, peak_bytes={})
    spec = spec_of(memory_by_part(ranks=(bare,), limit_bytes=None, limit=None))
    assert "rank 0" not in {row["bar"] for row in rows_of(spec, "parts")}
