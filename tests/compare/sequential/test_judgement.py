"""The verdict on pairs: what it refuses, whatever their figures say."""

from __future__ import annotations

from dataclasses import replace

from paceline.compare.sequential.interim_analysis import Design
from paceline.compare.sequential.judgement import SequentialComparison, judge_pairs
from paceline.compare.sides import ComparisonSide, Pair
from paceline.core.result import LevelShift
from tests.compare.members import WINDOW, hour, member, repeats, side


def in_turns(runs: ComparisonSide, at: int) -> ComparisonSide:
    """The runs in the order A B, B A, A B."""
    hours = ((0, 3, 4), (1, 2, 5))[at]
    members = (replace(m, created=hour(h)) for m, h in zip(runs.members, hours, strict=True))
    return ComparisonSide(runs.name, tuple(members))


def judged(shift: float, n: int = 5, in_turns: bool = True) -> SequentialComparison:
    """Equal pairs, of which one run's steps change their level by `shift` for good."""
    baseline, candidate = repeats(n, name="a", deviation=0.001), repeats(n, name="b", deviation=0.0)
    window = WINDOW.model_copy(update={"shift": LevelShift(first_step=30, ratio=1 + shift)})
    throttled = member("b-0", 0.2, window=window)
    candidate = ComparisonSide("b", (throttled, *candidate.members[1:]))
    return judge_pairs(Pair(baseline, candidate), Design(16), interleaved=in_turns)


def test_pairs_with_a_run_that_leaves_its_level_are_not_the_same():
    assert judged(0.005).verdict == "same"
    answer = judged(0.03)
    assert (answer.verdict, answer.end_reason) == ("undecided", "futile")
    assert answer.analyses[-1].verdict == "undecided"
    assert "choose a window on one level" in answer.sentence


def test_pairs_that_do_not_decide_can_be_likely():
    """Differences of 9, 3 and 9%: too uneven for the sequential test, enough for `compare`."""
    a = side([0.2, 0.204, 0.196], "a")
    b = side([0.218, 0.21, 0.214], "b")
    sides = Pair(*(in_turns(each, at) for at, each in enumerate((a, b))))
    answer = judge_pairs(sides, Design(3))
    assert (answer.verdict, answer.end_reason) == ("likely slower", "all pairs measured")
    assert answer.sentence.startswith("b is likely slower than a. Undecided after all 3 pairs")
    assert judge_pairs(sides, Design(16)).verdict == "undecided"


def test_pairs_that_were_not_made_in_turns_ask_for_a_new_series_from_the_second_on():
    assert {judged(0.0, n, in_turns=False).end_reason for n in (2, 5, 16)} == {"not interleaved"}
