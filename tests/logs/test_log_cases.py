"""Small logs of programs of all kinds, each with the values that a reader finds in it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.units import TERA
from paceline.files.catalog import find_device
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.profiles import nccl_logs, torch_traces
from paceline.runs.goodput.attempt import attempts_of_log
from paceline.runs.goodput.ledger import ledger_of
from tests.command import paceline

FIGURES = ("step_time_s", "tokens_per_s", "samples_per_s", "global_batch", "num_devices")
SHARES = {
    "matrix products": "gemm",  # language: allow
    "memory-bound": "memory_bound",
    "optimizer": "optimizer",
}
"""Categories of a profile, by their names in the table."""


def test_every_case_has_its_expected_values(reference_data: Path):
    table = reference_data.parent / "cases" / "logs" / "expected.csv"
    if not table.is_file():
        pytest.skip(f"no table of cases in {table.parent}")
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    wrong: dict[str, list[str]] = {}
    for row in rows:
        verb = row["command"].split(" --seq-len")[0]
        if faults := CHECKS[verb](table.parent / row["name"], row):
            wrong[row["name"]] = faults
    assert wrong == {}
    assert len(rows) > 38


def _parse_faults(path: Path, row: dict[str, str]) -> list[str]:
    given = "--seq-len" in row["command"]
    user = UserSettings(seq_len=4096, num_devices=8) if given else UserSettings()
    document = parse_log(path, user).document
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
    if "the sum over 8 devices" in row["other"]:
        causes = [each.cause for each in document.disagreements]
        faults += [] if any("all 8 devices" in cause for cause in causes) else [f"causes: {causes}"]
    if "MFU of" in row["other"]:
        told = any("MFU" in warning for warning in document.warnings)
        faults += [] if told else [f"warnings: {document.warnings}"]
    return faults


def _goodput_faults(path: Path, row: dict[str, str]) -> list[str]:
    seconds = ledger_of(attempts_of_log(path)).seconds
    expected = [float(text) for text in re.findall(r"(\d+) s of (\d+) s", row["other"])[0]]
    values = [seconds["evaluation"], sum(seconds.values())]
    near = values == pytest.approx(expected, rel=0.01) and seconds["slow_steps"] < 1
    return [] if near else [f"{seconds}, expected {expected}"]


def _audit_faults(path: Path, row: dict[str, str]) -> list[str]:
    (finding,) = json.loads(paceline("table", "audit", path, "--json").stdout)
    expected = re.findall(r"per device ([\d,]+);.*?(\d+ devices)", row["other"])[0]
    is_right = f"{finding['recomputed']:,.0f}" == expected[0] and expected[1] in finding["cause"]
    return [] if is_right else [f"{finding}, expected {expected}"]


def _profile_faults(path: Path, row: dict[str, str]) -> list[str]:
    profile = torch_traces.read_file(path)
    assert profile.step_time_s
    percents = {
        part: re.search(rf"{name} ([\d.]+) %", row["other"]) for name, part in SHARES.items()
    }
    shares = {part: float(match[1]) / 100 for part, match in percents.items() if match}
    values = {name: profile.parts[name] / profile.step_time_s for name in shares}
    faults = [] if values == pytest.approx(shares, abs=0.005) else [f"{values}, expected {shares}"]
    if profile.step_time_s != pytest.approx(float(row["step_time_s"]), rel=0.01):
        faults.append(f"step {profile.step_time_s}")
    return faults


def _nccl_faults(path: Path, row: dict[str, str]) -> list[str]:
    warnings = nccl_logs.read_file(path).warnings
    return [text for text in warnings if "sockets" in text]


def _catalog_faults(path: Path, row: dict[str, str]) -> list[str]:
    faults: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, peaks = line.partition(" ")
        low, *high = map(float, re.match(r"[\d.]+(?:\.\.[\d.]+)?", peaks)[0].split(".."))
        try:
            match = find_device(name)
        except UserError as error:
            faults.append(f"{name}: {error}")
            continue
        peak = match.device.peaks["bf16"].flops_per_s / TERA
        if not low * 0.995 <= peak <= (high or [low])[-1] * 1.005:
            faults.append(f"{name}: {match.device.name} with {peak}, expected {peaks}")
    return faults


CHECKS = {
    "parse": _parse_faults,
    "goodput": _goodput_faults,
    "audit": _audit_faults,
    "profile --from": _profile_faults,
    "profile --tool nccl --from": _nccl_faults,
    "convert --device": _catalog_faults,
}
