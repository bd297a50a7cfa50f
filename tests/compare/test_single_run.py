"""One run is judged against a margin only, with low confidence, and never without a figure."""

from __future__ import annotations

import pytest

from paceline.compare.single_run import single_run_verdict
from paceline.core.result import ReferenceComparison, WindowRecord

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
    ("ratio", "kind"), [(0.98, "slower"), (0.995, "pass"), (1.005, "pass"), (1.02, "faster")]
)
def test_the_margin_is_one_per_cent(ratio: float, kind: str):
    verdict = single_run_verdict("ok", None, WINDOW, (against(ratio),))
    assert (verdict.kind, verdict.confidence) == (kind, "low")
    assert "row" in verdict.sentence


def test_without_a_comparable_row_there_is_no_verdict_but_a_reason():
    verdict = single_run_verdict("ok", None, WINDOW, (against(None, comparable=False),))
    assert verdict.kind == "none" and "dtype bf16 here" in verdict.sentence


def test_a_comparable_row_counts_even_behind_others():
    rows = (against(None, comparable=False), against(0.9))
    assert single_run_verdict("ok", None, WINDOW, rows).kind == "slower"


@pytest.mark.parametrize("status", ["oom", "nan", "timeout", "failed", "incomplete", "cancelled"])
def test_a_run_that_did_not_end_well_is_invalid(status: str):
    verdict = single_run_verdict(status, "because", None, (against(1.0),))  # type: ignore[arg-type]
    assert verdict.kind == "invalid" and "because" in verdict.sentence


def printed(ratio: float, resolution: float = 0.0, known_error: float = 0.0) -> ReferenceComparison:
    return against(ratio).model_copy(update={"resolution": resolution, "known_error": known_error})


@pytest.mark.parametrize(
    ("ratio", "kind"), [(0.96, "pass"), (0.93, "slower"), (1.06, "pass"), (1.09, "faster")]
)
def test_a_reference_of_few_digits_widens_the_margin(ratio: float, kind: str):
    verdict = single_run_verdict("ok", None, WINDOW, (printed(ratio, 0.0556),))
    assert verdict.kind == kind and "printed to within 5.56 %" in verdict.sentence


def test_noise_within_the_run_that_hides_the_difference_leaves_it_undecided():
    verdict = single_run_verdict("ok", None, WINDOW, (printed(0.97, known_error=0.02),))
    assert verdict.kind == "undecided" and "noise" in verdict.sentence


@pytest.mark.parametrize(("ratio", "doubted"), [(1.04, False), (1.2, True), (0.8, False)])
def test_much_faster_than_published_is_too_good(ratio: float, doubted: bool):
    verdict = single_run_verdict("ok", None, WINDOW, (printed(ratio),))
    assert ("too good" in verdict.sentence) == doubted
