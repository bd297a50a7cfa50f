from __future__ import annotations

import pytest

from paceline.audit.cells.rank_list import left_out, read_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0,1,2", [0, 1, 2]), ("0", [0]), ("0-3, 6", [0, 1, 2, 3, 6]), (" 1 , 0 ", [1, 0])],
)
def test_lists_and_spans_are_read(text: str, ranks: list[int]):
    assert read_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0;1", "-1", "0-99999999999"])
def test_anything_else_is_none(text: str):
    assert read_ranks(text) is None


def test_a_hole_is_found_and_only_holes():
    assert left_out([0, 1, 2, 3, 4, 5, 7, 8]) == [6]
    assert left_out([4, 2, 3]) == left_out([5]) == left_out([]) == []
