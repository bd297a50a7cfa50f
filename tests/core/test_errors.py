"""Error messages suggest the closest allowed value."""

from __future__ import annotations

import pytest

from paceline.core.errors import did_you_mean


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
