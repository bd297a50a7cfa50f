"""From the peak to the estimate: levels that add up, and a page that escapes what it shows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.estimate.evidence import shipped
from paceline.estimating import Question, estimate
from paceline.report.theme import EXPORT
from paceline.report.waterfall import bars, estimate_html, waterfall_chart

FOUND = estimate(Question("llama31-70b", "H100-SXM", 64), shipped())


def test_the_levels_lead_from_the_peak_to_the_estimated_rate():
    levels = FOUND.waterfall
    assert levels[0].name == "peak" and levels[0].share == 1 and levels[-1].name == "estimated"
    assert levels[-1].flops_per_s == pytest.approx(FOUND.flops_per_s_per_device)
    assert FOUND.mfu == pytest.approx(levels[-1].share)
    ideal = FOUND.flops_per_s_per_device * FOUND.step_time_s / levels[0].flops_per_s
    assert sum(level.lost_s for level in levels) == pytest.approx(FOUND.step_time_s - ideal)
    assert {"tensor parallelism", "context parallelism", "bubble"} <= {
        level.name for level in levels
    }
    assert "expert parallelism" not in {level.name for level in levels}


def test_a_bar_hangs_from_the_one_before():
    rows = bars(FOUND.waterfall)
    assert rows[0]["start"] == rows[-1]["start"] == 0
    assert all(row["start"] == before["end"] for before, row in pairwise(rows[:-1]))
    chart = waterfall_chart(FOUND.waterfall, EXPORT).to_dict()
    assert "peak" in str(chart) and "bubble" in str(chart)


def test_the_page_escapes_names():
    page = estimate_html("<script>x</script>", ["a & b"], [("1 < 2", FOUND.waterfall)], ["</p>"])
    assert "<script>x" not in page and "1 &lt; 2" in page and "a &amp; b" in page
    assert "large products" in page
