"""Small logs of programs of all kinds, each with the values that a reader finds in it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log

OPEN = frozenset[str]()
"""Cases whose format does not give all expected values yet."""
FIGURES = ("step_time_s", "tokens_per_s", "samples_per_s", "global_batch", "num_devices")


def test_every_case_has_its_expected_values(reference_data: Path):
    table = reference_data.parent / "cases" / "logs" / "expected.csv"
    if not table.is_file():
        pytest.skip(f"no table of cases in {table.parent}")
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["command"].startswith("parse")]
    wrong = {row["name"]: faults for row in rows if (faults := _faults(table.parent, row))}
    assert wrong.keys() <= OPEN, wrong
    assert len(rows) > 30


def _faults(folder: Path, row: dict[str, str]) -> list[str]:
    given = "--seq-len" in row["command"]
    user = UserSettings(seq_len=4096, num_devices=8) if given else UserSettings()
    document = parse_log(folder / row["name"], user).document
    window_batch = document.window.global_batch if document.window else None
    values = {
        "step_time_s": document.step_time_s.median if document.step_time_s else None,
        "tokens_per_s": document.tokens_per_s,
        "samples_per_s": document.samples_per_s,
        "global_batch": document.settings.global_batch or window_batch,
        "num_devices": document.settings.num_devices,
    }
    faults = [] if document.status == row["status"] else [f"{document.status}: {document.reason}"]
    for name in FIGURES:
        expected, value = row[name], values[name]
        if expected and (value is None or value != pytest.approx(float(expected), rel=0.005)):
            faults.append(f"{name}: {value}, expected {expected}")
    return faults
