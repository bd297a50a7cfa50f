"""One run is judged against a margin only, with low confidence, and never without a figure."""

from __future__ import annotations

import pytest

from paceline.core.result import ReferenceComparison, WindowRecord
from paceline.core.verdict import single_run_verdict

WINDOW = WindowRecord(rule="auto", first_step=1, last_step=50, n=50, n_warmup=0, state="steady")


def against(ratio: float | None, comparable: bool = True) -> ReferenceComparison:
    return ReferenceComparison(
        reference="row", source="s", metric="tokens_per_s", reference_value=1.0, unit="tokens/s",
        ratio=ratio, comparable=comparable, why_not=None if comparable else "dtype bf16 here",
    )  # fmt: skip


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
