"""Sizes of sub-clusters, as they are written."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.scaling.analysis.sizes import parse_sizes


@pytest.mark.parametrize(
    ("text", "hosts", "sizes"),
    [
        ("1,2,4", 8, (1, 2, 4)),
        ("4, 1,2,4", 8, (1, 2, 4)),
        ("N", 5, (5,)),
        ("1,N", 5, (1, 5)),
        ("1,2,4,...,64", 64, (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,4,...,N", 6, (1, 2, 4, 6)),
        ("1,2,4,...,N", 3, (1, 2, 3)),
        ("1,2,4,...,N", 1, (1,)),
        ("2,4,...", 9, (2, 4, 8)),
        ("4,6,...,12", 12, (4, 6, 8, 10, 12)),
        (None, 1, (1,)),
        (None, 12, (1, 2, 4, 8, 12)),
    ],
)
def test_sizes_are_read(text: str | None, hosts: int, sizes: tuple[int, ...]):
    assert parse_sizes(text, hosts) == sizes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no size"),
        ("0", "'0' is no number of nodes"),
        ("-1", "'-1' is no number of nodes"),
        ("two", "'two' is no number of nodes"),
        ("1.5", "'1.5' is no number of nodes"),
        ("²", "'²' is no number of nodes"),
        ("99999999", "is no number of nodes"),
        ("9", "there are 8 hosts"),
        ("...,N", "needs two rising numbers"),
        ("4,2,...,N", "needs two rising numbers"),
    ],
)
def test_what_is_no_list_of_sizes_is_refused(text: str, why: str):
    with pytest.raises(UserError, match=why):
        parse_sizes(text, 8)
