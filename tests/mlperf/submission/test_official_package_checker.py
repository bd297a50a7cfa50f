"""The official package checker is started on a copy; whatever becomes of it is an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.check import official_checker
from paceline.mlperf.check.official_checker import (
    check_description_copy,
    check_package_copy,
)
from tests.mlperf.submissions import description, whole_submission, whole_trial

pytestmark = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
RUNS = "results/box_2x8/llama2_70b_lora"


def test_a_name_that_leads_to_other_rules_is_not_given_to_the_checker(tmp_path: Path):
    planted = tmp_path / "planted_common.yaml"
    planted.write_text(f"- BEGIN:\n    CODE: open('{tmp_path}/ran', 'w').close()\n")
    leads = "../" * 30 + str(planted).removesuffix("_common.yaml").lstrip("/")
    folder = whole_submission(tmp_path / "Example")
    (folder / RUNS / "result_3.txt").write_text(whole_trial(3, submission_division=leads))

    verdict = check_package_copy(folder, "5.1.0")

    assert not verdict.passed and "is not a valid benchmark or division" in str(
        verdict.checker_error
    )
    assert not (tmp_path / "ran").exists()


def test_a_description_is_judged_and_a_checker_that_breaks_off_is_an_answer(tmp_path: Path):
    assert check_description_copy(description(tmp_path / "a.json"), "5.1.0").passed

    missing = check_description_copy(description(tmp_path / "b.json", cooling=None), "5.1.0")
    assert not missing.passed and "Missing field cooling" in missing.messages[0].text

    broken = check_description_copy(description(tmp_path / "c.json", submitter=3), "5.1.0")
    assert "the checker crashed: TypeError" in str(broken.checker_error)


def test_a_checker_that_cannot_start_or_takes_too_long_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = description(tmp_path / "a.json")
    monkeypatch.setattr(official_checker, "CHECK_TIMEOUT_S", 0.001)
    assert "took longer" in str(check_description_copy(path, "5.1.0").checker_error)

    monkeypatch.undo()
    monkeypatch.setattr(official_checker, "PROGRAM", tmp_path / "gone.py")
    assert str(check_description_copy(path, "5.1.0").checker_error).startswith(
        "the checker crashed: "
    )
