"""`compare --sequential`: pairs made until they decide, and pairs that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.compare.sequential.judgement import SequentialComparison
from paceline.core.errors import UserError
from paceline.files.run_folder import groups, read_record, run_folders
from paceline.machines.probe import inventory
from paceline.report.terminal import plain_text
from paceline.runs import flow
from paceline.runs.comparison import ComparisonOptions
from paceline.runs.flow import CancelledRunError
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan
from paceline.runs.sequential_comparison import (
    SequentialRequest,
    judge_existing_pairs,
    run_until_decided,
    sequential_document,
    sequential_series,
    with_instructions,
)
from tests.cli.test_errors import paceline
from tests.runs.series_example import make_finished
from tests.runs.test_repeat_runner import Silent

SIDES = "tiny-llama,steps=20", "tiny-llama,steps=20,layout.zero_stage=3"


@pytest.fixture(autouse=True)
def a_short_look_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)


class TwoSpeeds:
    """Stands where `flow.run` stands: runs of the sharded side are slower, and end as is said."""

    def __init__(
        self, change: float, status: Callable[[int, bool], str] = lambda number, slow: "ok"
    ) -> None:
        self.change, self.status = change, status
        self.noise = np.random.default_rng(7)

    def __call__(
        self, plan: Plan, root: Path, command: list[str], watch: flow.Watcher, **fields: Any
    ) -> Any:
        del fields["probe"], fields["is_cancelled"], fields["submit"]
        number = len(run_folders(root)) if root.exists() else 0
        slow = plan.spec.layout.zero_stage == 3
        status = self.status(number, slow)
        seconds = 0.2 * (1 + self.change * slow) * float(np.exp(self.noise.normal(0, 0.002)))
        folder = make_finished(root, number, seconds, spec=plan.spec, status=status, **fields)
        if status == "cancelled":
            raise CancelledRunError(evaluate(folder))
        return evaluate(folder)


def decide(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    machine: TwoSpeeds,
    sides: tuple[str, str] = SIDES,
    **fields: Any,
) -> tuple[SequentialComparison, list[SequentialComparison]]:
    """The answer of a series on that machine, and those of the looks before it."""
    monkeypatch.setattr(flow, "run", machine)
    question = SequentialRequest(root, *sides, ComparisonOptions(), **fields)
    series, looks = sequential_series(question), list[SequentialComparison]()
    assert series is not None
    observer = Silent()
    answer = run_until_decided(question, series, ["paceline"], observer, looks.append)
    return answer, looks


def test_a_clear_difference_ends_the_series_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer, looks = decide(monkeypatch, tmp_path, TwoSpeeds(0.04), group="g")
    assert (answer.verdict, answer.end_reason) == ("slower", "decided")
    assert answer.pairs <= 4 and len(run_folders(tmp_path)) == 2 * answer.pairs
    assert [look.pairs for look in looks] == [3, 4][: len(looks)] and looks[-1] == answer
    assert answer.ratio == pytest.approx(1.04, abs=0.005)
    assert answer.low is not None and answer.high is not None
    assert answer.low <= 1.04 <= answer.high
    assert answer.next_action is None and all("short runs" in why for why in answer.why_low)
    order = [read_record(folder).group for folder in run_folders(tmp_path)]
    assert order[:4] == ["g-a", "g-b", "g-b", "g-a"]


def test_equal_sides_are_the_same_and_the_largest_difference_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answer, _ = decide(monkeypatch, tmp_path, TwoSpeeds(0.0))
    assert (answer.verdict, answer.end_reason) == ("same", "decided")
    assert answer.largest_difference is not None and 0 < answer.largest_difference < 0.02
    text = plain_text(sequential_document(answer))
    assert "still possible" in text and "✓ same" in text and "of up to 16" in text


def test_ctrl_c_keeps_what_was_measured_and_the_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = TwoSpeeds(0.04, lambda number, slow: "cancelled" if number == 3 else "ok")
    answer, _ = decide(monkeypatch, tmp_path, broken, group="g")
    assert (answer.verdict, answer.end_reason, answer.pairs) == ("undecided", "interrupted", 1)
    assert answer.next_action == "paceline compare g-a g-b --sequential"
    answer, _ = decide(monkeypatch, tmp_path, TwoSpeeds(0.04), ("g-a", "g-b"))
    assert (answer.verdict, answer.end_reason) == ("slower", "decided")
    good = [f for folders in groups(tmp_path).values() for f in folders]
    assert len(good) == 2 * answer.pairs + 2  # the interrupted run, and the first of its pair again


def test_ctrl_c_before_the_first_figure_is_undecided_and_no_failed_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = TwoSpeeds(0.04, lambda number, slow: "cancelled")
    answer, _ = decide(monkeypatch, tmp_path, broken, group="g")
    assert (answer.verdict, answer.end_reason, answer.pairs) == ("undecided", "interrupted", 0)
    assert answer.sentence.startswith("Not judged: g-a has no good run")
    assert answer.next_action == "paceline compare g-a g-b --sequential"


def test_the_other_way_round_the_ratio_is_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decide(monkeypatch, tmp_path, TwoSpeeds(0.04), group="g")
    answer = judge_existing_pairs(SequentialRequest(tmp_path, "g-b", "g-a", ComparisonOptions()))
    assert answer.verdict == "faster" and answer.baseline.name == "g-b"


def test_a_side_that_only_fails_ends_the_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = TwoSpeeds(0.0, lambda number, slow: "oom" if slow else "ok")
    answer, _ = decide(monkeypatch, tmp_path, machine, group="g")
    assert (answer.verdict, answer.end_reason) == ("invalid", "failed")
    assert "g-b has no good run" in answer.sentence and len(run_folders(tmp_path)) == 4
    turned, _ = decide(monkeypatch, tmp_path, machine, ("g-b", "g-a"))
    assert (turned.baseline.name, turned.candidate.name) == ("g-b", "g-a")


def test_the_number_of_pairs_is_settled_before_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decide(monkeypatch, tmp_path, TwoSpeeds(0.04), group="g", max_pairs=6)
    assert (
        judge_existing_pairs(
            SequentialRequest(tmp_path, "g-a", "g-b", ComparisonOptions())
        ).max_pairs
        == 6
    )
    with pytest.raises(UserError, match="set to 6"):
        sequential_series(
            SequentialRequest(tmp_path, "g-a", "g-b", ComparisonOptions(), max_pairs=20)
        )


def test_runs_that_cannot_be_made_here_are_asked_for(tmp_path: Path):
    for at in range(4):
        make_finished(tmp_path, at, 0.2 + 0.0001 * at, tag="ab"[at % 2])
    question = SequentialRequest(tmp_path, "a", "b", ComparisonOptions())
    assert sequential_series(question) is None
    answer = with_instructions(judge_existing_pairs(question))
    assert (answer.verdict, answer.pairs, answer.end_reason) == ("undecided", 2, "continue")
    assert answer.next_action is not None and answer.next_action.startswith(
        "run 1 more pair alternately"
    )


def test_between_looks_of_the_plan_nothing_is_judged_and_the_next_is_asked_for(tmp_path: Path):
    for at in range(14):
        change = (0.002, 0.014)[at // 2 % 2]
        make_finished(tmp_path, at, 0.2 * (1 + change * (at % 2)), tag="ab"[at % 2])
    answer = with_instructions(
        judge_existing_pairs(SequentialRequest(tmp_path, "a", "b", ComparisonOptions()))
    )
    assert (answer.pairs, answer.end_reason) == (7, "continue")
    assert [look.pairs for look in answer.analyses] == [3, 4, 5, 6]
    assert answer.next_action is not None and answer.next_action.startswith(
        "run 1 more pair alternately"
    )


def test_runs_of_one_side_after_the_other_are_no_pairs_to_trust(tmp_path: Path):
    for at in range(8):
        make_finished(tmp_path, at, 0.2 + 0.0001 * (at % 4), tag="ab"[at // 4])
    answer = judge_existing_pairs(SequentialRequest(tmp_path, "a", "b", ComparisonOptions()))
    assert answer.verdict == "undecided" and "did not follow each other" in answer.sentence
    assert answer.analyses == () and answer.confidence == "low"
    assert (
        with_instructions(answer).end_reason == "not interleaved"
        and "a new, interleaved series" in answer.sentence
    )


def test_a_whole_plan_of_runs_one_side_after_the_other_asks_for_a_new_series(tmp_path: Path):
    for at in range(6):
        make_finished(tmp_path, at, 0.2 + 0.0001 * (at % 3), tag="ab"[at // 3])
    answer = with_instructions(
        judge_existing_pairs(
            SequentialRequest(tmp_path, "a", "b", ComparisonOptions(), max_pairs=3)
        )
    )
    assert (answer.verdict, answer.end_reason, answer.next_action) == (
        "undecided",
        "not interleaved",
        None,
    )


def test_the_verb_prints_the_answer_as_json(tmp_path: Path):
    for at in range(12):
        make_finished(tmp_path, at, 0.2 * (1 + 0.04 * (at % 2)), tag="ab"[at % 2])
    done = paceline("compare", "a", "b", "--sequential", "--json", runs=tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == 3, done.stderr
    assert (answer["verdict"], answer["pairs"]) == ("slower", 6)
    refused = paceline("compare", "a", "b", "--max-pairs", "4", runs=tmp_path)
    assert refused.returncode == 1 and "--max-pairs" in refused.stderr
