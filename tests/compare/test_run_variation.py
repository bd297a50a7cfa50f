"""What a machine's own history lets few or unmixed runs say, and what they say without it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.sides import ComparisonSide
from paceline.compare.significance import RunVariation, estimate_run_variation
from paceline.core.result import LevelShift
from tests.compare.members import WINDOW, member, repeats

START = datetime(2026, 1, 1, tzinfo=UTC)
QUIET = RunVariation(within=0.002, between=0.002, degrees=12, n_runs=30, n_occasions=13)


def dated(name: str, times_s: Sequence[float], hours: Sequence[float]) -> ComparisonSide:
    """Runs with these step times, made at these hours."""
    return ComparisonSide(
        name,
        tuple(
            member(f"{name}{at}", time, created=(START + timedelta(hours=hour)).isoformat())
            for at, (time, hour) in enumerate(zip(times_s, hours, strict=True))
        ),
    )


def judged_over_days(
    rng: np.random.Generator, change: float, in_turns: bool, variation: RunVariation | None = None
) -> Comparison:
    """Judge 3 + 3 runs (0.4% variation), one day per side (0.5% between days) or interleaved."""
    luck = rng.normal(0, 0.004, (2, 3)) + (
        np.zeros((2, 1)) if in_turns else rng.normal(0, 0.005, (2, 1))
    )
    times = 0.2 * np.exp(luck) * np.array([[1.0], [1 + change]])
    hours = ([0, 2, 4], [1, 3, 5]) if in_turns else ([0, 1, 2], [24, 25, 26])
    a, b = (dated(name, times[at].tolist(), hours[at]) for at, name in enumerate("ab"))
    return judge(a, b, variation=variation)


def rates(change: float, in_turns: bool, variation: RunVariation | None = None) -> dict[str, float]:
    rng = np.random.default_rng(11)
    words = [judged_over_days(rng, change, in_turns, variation).verdict for _ in range(150)]
    return {word: words.count(word) / 150 for word in ("slower", "faster", "same")}


def test_the_luck_of_two_days_is_no_difference_of_the_sides():
    alike, slower = rates(0.0, in_turns=False), rates(0.01, in_turns=False)
    assert alike["slower"] + alike["faster"] <= 0.05 and slower["same"] <= 0.05
    assert rates(0.02, in_turns=True)["slower"] >= 0.9


def test_a_history_of_days_widens_the_interval_by_what_days_do():
    days = RunVariation(within=0.004, between=0.005, degrees=20, n_runs=60, n_occasions=21)
    alike, slower = rates(0.0, False, days), rates(0.01, False, days)
    assert alike["slower"] + alike["faster"] <= 0.08 and slower["same"] <= 0.06
    assert rates(0.04, False, days)["slower"] >= 0.9


def test_runs_one_after_the_other_are_doubted_and_asked_for_in_turns():
    rng = np.random.default_rng(1)
    not_interleaved, turns = judged_over_days(rng, 0.02, False), judged_over_days(rng, 0.02, True)
    assert not_interleaved.verdict == "undecided" and not_interleaved.confidence == "low"
    assert any("different days" in reason for reason in not_interleaved.why_low)
    assert not_interleaved.repeats_note is not None and "A B A B" in not_interleaved.repeats_note
    assert (turns.verdict, turns.confidence) == ("slower", "normal")


def test_a_large_slowdown_is_told_whatever_the_order():
    a = dated("a", [0.2, 0.201, 0.1995], [0, 1, 2])
    b = dated("b", [0.22, 0.2215, 0.2195], [24, 25, 26])
    assert judge(a, b).verdict == "slower" and judge(b, a).verdict == "faster"


@pytest.mark.parametrize("hours", [[3, 4, 5], [0.5, 3, 4]], ids=["all before all", "one in turn"])
def test_blocks_of_one_day_are_doubted_like_days(hours: list[float]):
    a = dated("a", [0.2, 0.2001, 0.1999], [0, 1, 2])
    b = dated("b", [0.2024, 0.2025, 0.2023], hours)
    judged = judge(a, b)
    in_turn = judge(a, dated("b", [0.2024, 0.2025, 0.2023], [0.5, 1.5, 2.5]))
    doubted = any("interleaved" in reason for reason in judged.why_low)
    assert (judged.verdict == "undecided", doubted) == (hours[0] == 3, hours[0] == 3)
    assert (in_turn.verdict, in_turn.confidence) == ("slower", "normal")


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.03, "slower"), (-0.03, "faster"), (0.005, "undecided")]
)
def test_single_runs_are_judged_where_the_machine_is_known(change: float, verdict: str):
    judged = judge(repeats(1, name="a"), repeats(1, change, name="b"), variation=QUIET)
    assert (judged.verdict, judged.confidence) == (verdict, "normal")
    assert judged.low is not None and judged.low < 1 + change < (judged.high or 0)
    assert any("by 30 runs of 13 days" in note for note in judged.notes)
    assert judged.repeats_needed == (2 if verdict == "undecided" else 0)


def test_single_runs_of_identical_sides_are_seldom_told_apart():
    rng = np.random.default_rng(2)
    wide = RunVariation(within=0.008, between=0.0, degrees=15, n_runs=40, n_occasions=16)
    for variation, most in ((None, 0.0), (wide, 0.08)):
        words: list[str] = []
        for _ in range(200):
            a, b = (dated(name, [0.2 * np.exp(rng.normal(0, 0.008))], [0]) for name in "ab")
            words.append(judge(a, b, variation=variation).verdict)
        assert sum(word in ("slower", "faster", "same") for word in words) / 200 <= most


def test_a_history_tells_runs_of_a_day_from_days():
    rng = np.random.default_rng(3)
    days = rng.normal(0, 0.006, 60)
    occasions = [(0.2 * np.exp(day + rng.normal(0, 0.003, 4))).tolist() for day in days]
    variation = estimate_run_variation(occasions, [0.2] * 60)
    assert variation is not None and variation.n_runs == 240
    assert variation.within == pytest.approx(0.003, rel=0.15)
    assert variation.between == pytest.approx(0.006, rel=0.25)
    assert estimate_run_variation(occasions[:4], [0.2] * 4) is None
    single = estimate_run_variation([[o[0]] for o in occasions], [0.2] * 60)
    assert single is not None and single.single == pytest.approx(0.0067, rel=0.25)


def test_sides_that_leave_their_level_are_not_called_the_same():
    shifted = WINDOW.model_copy(update={"shift": LevelShift(first_step=50, ratio=1.08)})
    judged = judge(repeats(5, name="a"), repeats(5, name="b", window=shifted))
    assert (judged.verdict, judged.confidence) == ("undecided", "low")
    assert judged.repeats_needed is None and "one level" in (judged.repeats_note or "")
    small = WINDOW.model_copy(update={"shift": LevelShift(first_step=50, ratio=1.012)})
    slower = judge(repeats(5, name="a"), repeats(5, 0.03, name="b", window=small))
    assert (slower.verdict, slower.confidence) == ("slower", "low")
