"""The official checker is started as a program, and whatever becomes of it is an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.check import official_checker
from tests.mlperf.samples import trial

installed = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)


@installed
def test_the_rounds_of_the_package_are_known_in_order():
    rulesets = official_checker.checker_rulesets()

    assert "5.1.0" in rulesets and rulesets.index("4.1.0") < rulesets.index("5.0.0")
    assert official_checker.checker_version()


@installed
def test_messages_come_in_the_checkers_own_words(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(trial() + ":::MLLOG {\n")

    verdict = official_checker.check_copy(copy, "5.1.0")

    assert "Required EXACTLY_ONE occurrence of 'train_samples' but found 0" in verdict.messages
    assert verdict.unread[0][0] == ":::MLLOG {" and verdict.broken is None


@installed
def test_rules_that_are_not_there_are_an_answer(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(trial())

    assert "not supported" in str(official_checker.check_copy(copy, "5.2.0").broken)


def test_a_program_that_cannot_start_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "log.txt").write_text(trial())
    monkeypatch.setattr(official_checker, "PROGRAM", tmp_path / "gone.py")

    broken = official_checker.check_copy(tmp_path / "log.txt", "5.1.0").broken

    assert broken is not None and broken.startswith("the checker broke off: ")


@installed
def test_a_checker_that_takes_too_long_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "log.txt").write_text(trial())
    monkeypatch.setattr(official_checker, "LONGEST_CHECK_S", 0.001)

    assert "took longer" in str(official_checker.check_copy(tmp_path / "log.txt", "5.1.0").broken)
