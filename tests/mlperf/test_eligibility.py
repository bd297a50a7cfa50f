"""Only runs of the benchmark itself are results."""

from __future__ import annotations

import pytest

from paceline.engines.log_reading.mllog import MlRecord
from paceline.mlperf.eligibility import is_tiny, not_a_result


def line(key: str, value: object) -> MlRecord:
    return MlRecord(key, value, 0.0, "POINT_IN_TIME")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("submission_platform", "tiny sibling on 2 cores", "a small sibling"),
        ("submission_org", "a-tiny-one", "a small sibling"),
        ("data_source", "synthetic", "it trained on synthetic data"),
        ("data_source", "stdlib", "it trained on stdlib data"),
        ("note", "this is not an MLPerf result", "it says of itself"),
    ],
)
def test_what_speaks_against_a_result(key: str, value: str, reason: str):
    assert reason in str(not_a_result([None, line("seed", 1), line(key, value)]))


def test_a_run_of_the_benchmark_is_one():
    lines = [
        line("submission_platform", "DestinyBox"),
        line("data_source", "tokens"),
        line("a", None),
    ]

    assert not_a_result(lines) is None


@pytest.mark.parametrize(
    ("name", "tiny"),
    [
        ("llama TINY", True),
        ("2xtiny_cpu", True),
        ("foxtiny", False),
        ("Destiny", False),
        (None, False),
    ],
)
def test_the_word_in_a_name(name: str | None, tiny: bool):
    assert is_tiny(name) is tiny
