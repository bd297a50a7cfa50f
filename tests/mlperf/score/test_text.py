"""Scores of MLPerf runs as lines: what is unknown is left out, what is said is one line."""

from __future__ import annotations

from paceline.core.telemetry import Energy
from paceline.mlperf.score.convergence import Convergence
from paceline.mlperf.score.score import Score, ScoredRun, ScoreWindow
from paceline.mlperf.score.text import score_lines, score_row

RUN = ScoredRun(file="result_0.txt", status="success", part="counted", minutes=2.0, seeds=(1, 2))
SCORE = Score(
    folder="runs",
    benchmark="flux1",
    system=None,
    organisation=None,
    division=None,
    ruleset="5.1.0",
    ruleset_from="path",
    status="ok",
    runs=(RUN,),
    runs_required=10,
    score_minutes=2.5,
    olympic_mean_minutes=2.0,
    windows=(ScoreWindow(files=("a",) * 10, failed=0, olympic_mean_minutes=2.0, chosen=True),) * 2,
)


def test_a_score_says_its_label_its_spread_and_that_it_is_a_median_window():
    text = "\n".join(score_lines(SCORE))

    assert "flux1 · system not stated · runs" in text
    assert "2.5000 minutes, unofficial, not verified by MLCommons Association" in text
    assert "mean of 8 of 10 runs (2.0000 to 2.0000)" in text
    assert "the median of 2 windows" in text
    assert "FLOP/s" not in text and "convergence" not in text


def test_without_a_score_the_reason_stands_in_its_place():
    refused = SCORE.model_copy(
        update={
            "score_minutes": None,
            "status": "no-reference",
            "reason": "a\nb",
            "warnings": ("c\nd",),
        }
    )
    rcp = Convergence(status="missing", reason="too large", global_batch=9, reference_batches=())
    text = list(score_lines(refused.model_copy(update={"rcp": rcp})))

    assert any(f"none, no-reference: a b ({SCORE.label})" in line for line in text)
    assert any("missing: too large" in line for line in text)
    assert all("\n" not in line for line in text)


def test_a_row_holds_the_run_and_the_score_of_its_set():
    row = score_row(SCORE, RUN)

    assert (row["minutes"], row["seeds"], row["score_minutes"]) == (2.0, "1 2", 2.5)
    assert (row["official"], row["set_status"]) == (False, "ok")


def test_the_energy_is_of_the_counted_runs_alone():
    def run(part: str, watts: float, source: str) -> ScoredRun:
        energy = Energy(
            energy_j=7200.0,
            power_w=watts,
            parts_j={"gpu": 7200.0},
            window_s=9,
            n=9,
            sources=(source,),
        )
        return RUN.model_copy(update={"part": part, "energy": energy})

    runs = (run("fastest", 9000.0, "x"), run("counted", 100.0, "a"), run("counted", 300.0, "b"))
    text = "\n".join(score_lines(SCORE.model_copy(update={"runs": runs, "mean_energy_j": 7200.0})))

    assert "2.000 Wh to the target, mean of 2 runs" in text
    assert "at 200.0 W; of gpu (a, b)" in text
