"""One run is compared with a reference and never decides; without a figure it is invalid."""

from __future__ import annotations

import pytest

from paceline.compare.judge import single_run_verdict
from paceline.core.result import LevelShift, ReferenceComparison, WindowRecord

WINDOW = WindowRecord(rule="auto", first_step=1, last_step=50, n=50, n_warmup=0, state="steady")


def against(ratio: float | None, comparable: bool = True) -> ReferenceComparison:
    return ReferenceComparison(
        reference="row",
        source="s",
        metric="tokens_per_s",
        reference_value=1.0,
        unit="tokens/s",
        ratio=ratio,
        comparable=comparable,
        why_not=None if comparable else "dtype bf16 here",
    )


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.9, "10.0% slower"), (0.995, "0.5% slower"), (1.005, "0.5% faster"), (1.03, "3.0% f")],
)
def test_one_run_decides_nothing_and_says_where_it_lies(ratio: float, words: str):
    verdict = single_run_verdict("ok", None, WINDOW, (against(ratio),))
    assert (verdict.kind, verdict.confidence) == ("undecided", "low")
    assert words in verdict.sentence and "row" in verdict.sentence
    assert "3 runs decide" in verdict.sentence


def test_without_a_comparable_row_there_is_no_verdict_but_a_reason():
    verdict = single_run_verdict("ok", None, WINDOW, (against(None, comparable=False),))
    assert verdict.kind == "none" and "dtype bf16 here" in verdict.sentence


def test_a_comparable_row_counts_even_behind_others():
    rows = (against(None, comparable=False), against(0.9))
    assert "10.0% slower" in single_run_verdict("ok", None, WINDOW, rows).sentence


def test_a_run_that_changes_its_level_has_no_one_figure():
    shifted = WINDOW.model_copy(update={"shift": LevelShift(first_step=30, ratio=1.08)})
    verdict = single_run_verdict("ok", None, shifted, (against(1.0),))
    assert verdict.kind == "undecided" and "step time is not stationary" in verdict.sentence


@pytest.mark.parametrize("status", ["oom", "nan", "timeout", "failed", "incomplete", "cancelled"])
def test_a_run_that_did_not_end_well_is_invalid(status: str):
    verdict = single_run_verdict(status, "because", None, (against(1.0),))  # type: ignore[arg-type]
    assert verdict.kind == "invalid" and "because" in verdict.sentence


def printed(ratio: float, resolution: float = 0.0) -> ReferenceComparison:
    return against(ratio).model_copy(update={"resolution": resolution})


def test_how_far_a_reference_was_rounded_is_told():
    verdict = single_run_verdict("ok", None, WINDOW, (printed(0.96, 0.0556),))
    assert "printed to within 5.56%" in verdict.sentence


@pytest.mark.parametrize(("ratio", "doubted"), [(1.04, False), (1.2, True), (0.8, False)])
def test_much_faster_than_published_is_too_good(ratio: float, doubted: bool):
    verdict = single_run_verdict("ok", None, WINDOW, (printed(ratio),))
    assert ("suspiciously fast" in verdict.sentence) == doubted


def test_a_run_without_a_steady_window_is_told_so() -> None:
    verdict = single_run_verdict("ok", None, None, ())
    assert verdict.sentence == "Not judged: too few steps for a steady window."
