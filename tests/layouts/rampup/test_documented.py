"""Hand-made ramp-up schedules in the evidence page match what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_errors import paceline

SECTION = (Path(__file__).parents[3] / "docs" / "dev" / "evidence" / "estimator.md").read_text()
SECTION = SECTION.partition("## Batch ramp-up by hand")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\| *\d+ GB.*$", SECTION, re.MULTILINE)
]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each documented command answers, by the name of its schedule."""
    folder = tmp_path_factory.mktemp("schedules")
    for text, name in re.findall(r"^printf '(.*)' > (\S+)$", SECTION, re.MULTILINE):
        (folder / name).write_text(text.replace("\\n", "\n"))
    answers: dict[str, dict[str, Any]] = {}
    for line in re.findall(r"^paceline (estimate rampup .*)$", SECTION, re.MULTILINE):
        *arguments, name = shlex.split(line)
        answers[name] = json.loads(paceline(*arguments, str(folder / name), "--json").stdout)
    return answers


def share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_every_line_is_judged_as_the_table_says(answered: dict[str, dict[str, Any]]):
    stages = [
        (f"{name.removesuffix('gb.csv')} GB", stage)
        for name, answer in answered.items()
        for stage in answer["checked"]["stages"]
    ]
    assert len(stages) == len(ROWS) == 8
    for row, (node, stage) in zip(ROWS, stages, strict=True):
        label, where, micro_batches, bubble_share, exchange_share, slowdown, verdict = row
        assert label.startswith(node) and where == f"{stage['batch']}: {stage['nodes']}"
        assert stage["verdict"] == verdict == ("slow" if node == "16 GB" else "good")
        assert stage["plan"]["micro_batches"] == int(micro_batches) == 1
        assert stage["plan"]["bubble_share"] == pytest.approx(share(bubble_share), abs=0.01)
        assert stage["plan"]["exchange_share"] == pytest.approx(share(exchange_share), abs=0.01)
        assert stage["slowdown"] == pytest.approx(float(slowdown), abs=0.02)


def test_the_days_are_those_of_the_text(answered: dict[str, dict[str, Any]]):
    days_in_text = re.search(r"takes (\d+\.\d) days where the plan takes (\d+\.\d)", SECTION)
    assert days_in_text is not None
    answer = answered["16gb.csv"]
    days = (answer["checked"]["days"], answer["days"])
    assert days == pytest.approx([float(days_in_text[1]), float(days_in_text[2])], abs=0.06)
