"""Error messages suggest the closest allowed value."""

from __future__ import annotations

import pytest

from paceline.core.errors import did_you_mean, unknown_name


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("h10", "did you mean 'H100'?"),
        ("H100", "did you mean 'H100'?"),
        ("h100", "did you mean 'h100'?"),
        ("zzz", ""),
    ],
)
def test_of_names_that_differ_in_capitals_the_first_is_meant(word: str, told: str):
    assert did_you_mean(word, ("A100", "H100", "h100")) == told


@pytest.mark.parametrize(
    ("word", "count", "listing", "text"),
    [
        ("name1", 3, None, "x: is unknown; allowed: name0, name1x, name2; did you mean 'name1x'?"),
        ("zzz", 3, "paceline recipes", "x: is unknown; allowed: name0, name1x, name2"),
        (
            "name1",
            12,
            "paceline recipes",
            "x: is unknown; did you mean 'name1x'? `paceline recipes` lists them",
        ),
        ("zzz", 12, "paceline recipes", "x: is unknown; `paceline recipes` lists them"),
        (
            "name1",
            12,
            None,
            "x: is unknown; allowed: name0, name1x, name2, name3, name4, name5, name10, name11 and "
            "4 more; did you mean 'name1x'?",
        ),
        ("zzz", 0, None, "x: is unknown; allowed: there are none"),
    ],
)
def test_an_error_lists_eight_names_at_most(word: str, count: int, listing: str | None, text: str):
    names = ["name1x" if n == 1 else f"name{n}" for n in range(count)]
    error = unknown_name("x", "is unknown", word, names, listing=listing, if_none="there are none")
    assert str(error) == text
