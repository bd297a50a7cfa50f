"""The package checker's messages are put into plain words; what is not understood is passed on."""

from __future__ import annotations

import pytest

from paceline.mlperf.submission.official_package_checker import CheckerMessage
from paceline.mlperf.submission.package_wording import package_findings

FAILS = "the test against the reference convergence points fails"
SEEDS = (
    "Seed checker failed and found the following errors: Result file a/result_4.txt logs no seed.\n"
    "Result file a/result_3.txt logs seed 7 on train.py:1. However, result file a/result_1.txt "
    "already logs the same seed on the same line.\n"
    "Error found when querying seeds from a/result_0.txt: invalid literal"
)


def words(text: str) -> list[str]:
    return [finding.message for finding in package_findings((CheckerMessage("error", "a", text),))]


@pytest.mark.parametrize(
    ("official", "plain"),
    [
        (
            "Incorrect number of files in dir, or wrong file names in directory x, found 9, "
            "expected 10",
            "9 files are called result_<number>.txt, the rules want exactly 10",
        ),
        (
            "Incorrect number of files in dir, or wrong file names in directory x, found 1, "
            "expected 10",
            "1 file is called result_<number>.txt, the rules want exactly 10",
        ),
        (
            "2 files do not comply, directory cannot be accepted",
            "2 logs break the rules, and only 1 may: it counts as the run that is dropped",
        ),
        (
            "1 file does not comply, accepting this under olympic scoring",
            "1 log breaks the rules; it counts as the run that is dropped",
        ),
        (
            "Skipping benchmark: bert",
            "bert is no benchmark of this round: nothing in it was checked",
        ),
        (
            "RCP Test Failed: Missing RCP, please submit RCP with BS = 4096",
            f"{FAILS}: no reference reaches a batch of 4,096",
        ),
        (
            "RCP Test Failed: Insufficient convergence",
            f"{FAILS}: more than one run did not converge",
        ),
        ("something new", "something new"),
    ],
)
def test_a_message_in_plain_words(official: str, plain: str):
    assert words(official) == [plain]


def test_each_fault_of_the_seeds_is_a_finding():
    assert words(SEEDS) == [
        "result_4.txt states no seed",
        "result_3.txt and result_1.txt state the same seed 7",
        "the seeds of result_0.txt cannot be read: invalid literal",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "System description file checker failed",
        "Seed checker failed",
        "Unknown files in result directory: x",
        "Detected %d total files in directory %s, but some",
    ],
)
def test_what_other_messages_say_is_not_said_twice(text: str):
    assert words(text) == []
