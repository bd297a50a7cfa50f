"""Two rates tell how many devices there are, where rounding leaves no doubt."""

from __future__ import annotations

import pytest

from paceline.engines.verl import device_count


@pytest.mark.parametrize(
    ("of_all", "of_one", "count"),
    [
        (11_278.56, 1409.82, 8),
        (32_768.0, 32_767.9, 1),
        (14_200.0, 1780.0, 8),
        (256_300.0, 501.0, None),
        (1.0, 0.0, None),
        (0.0, 1.0, None),
        (1.0, 4.0, None),
        (float("nan"), 1.0, None),
        (float("inf"), 1.0, None),
        (1e99, 1e-99, None),
    ],
)
def test_the_whole_number_next_to_the_ratio(of_all: float, of_one: float, count: int | None):
    assert device_count(of_all, of_one) == count
