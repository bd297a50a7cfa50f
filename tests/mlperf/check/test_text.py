"""Checks as lines and rows: every finding stands with its line under its file."""

from __future__ import annotations

from paceline.mlperf.check.findings import Check, CheckedFile, CheckFinding
from paceline.mlperf.check.text import check_lines, check_rows

FINDING = CheckFinding(key="seed", line=1200, message="seed is\nmissing")


def test_findings_stand_with_their_line_under_their_file():
    files = (
        CheckedFile(file="a", status="failed", findings=(FINDING,), warnings=(FINDING,)),
        CheckedFile(file="b", status="passed"),
    )
    check = Check(
        place="p",
        ruleset="5.1.0",
        ruleset_from="option",
        checker="mlperf-logging 1",
        status="failed",
        files=files,
    )

    text = list(check_lines(check))
    assert text[0] == "1 of 2 logs pass 5.1.0 (as asked for), mlperf-logging 1 · p"
    assert "    line 1,200: seed is missing" in text
    assert "    line 1,200: warning: seed is missing" in text
    assert text[-1] == "unofficial, not verified by MLCommons Association"
    assert [row.get("level") for row in check_rows(check)] == ["finding", "warning", None]
