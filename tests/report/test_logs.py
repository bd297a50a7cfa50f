"""Parsed logs as lines, rows and series."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from paceline.core.steps import Step, Steps
from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import Disagreement
from paceline.logs.parser import parse_log
from paceline.report.logs import (
    disagreement_text,
    log_lines,
    log_row,
    step_csv,
    step_json,
    step_rows,
)
from tests.example import noisy
from tests.logs.example import maxtext_log


@pytest.fixture
def document(tmp_path: Path):
    (path := tmp_path / "a.log").write_text(maxtext_log(noisy(30, 2.0, 0.01)))
    settings = UserSettings(
        model="llama31-8b", device="H100", num_devices=8, global_batch=8, seq_len=8192, dtype="bf16"
    )
    return parse_log(path, settings).document


def test_the_first_lines_say_what_was_run_and_how_fast(document):
    lines = list(log_lines(document))
    assert "8 x H100-SXM · bf16 · seq 8,192 · global batch 8 sequences" in lines[0]
    assert "s per step" in lines[1] and "30 steady steps (0-29)" in lines[1]
    assert "tokens/s" in lines[2] and "(causal)" in lines[2]


def test_what_cannot_be_told_says_what_is_missing(tmp_path: Path):
    (path := tmp_path / "a.log").write_text(maxtext_log(noisy(30, 2.0)))
    text = "\n".join(log_lines(parse_log(path, UserSettings()).document))
    assert "no FLOP/s: not known: model" in text and "MFU" not in text


def test_flops_without_an_mfu_say_what_that_takes(tmp_path: Path):
    (path := tmp_path / "a.log").write_text(maxtext_log(noisy(30, 2.0)))
    settings = UserSettings(
        model="llama31-8b", device="B200", num_devices=8, global_batch=8, seq_len=8192
    )
    text = "\n".join(log_lines(parse_log(path, settings).document))
    assert "TFLOP/s per device" in text and "no MFU: not known: dtype" in text


def test_a_row_and_the_row_of_nothing_have_the_same_columns(document):
    assert list(log_row(document)) == list(log_row(None))
    assert log_row(document)["tflops_per_device"] == pytest.approx(
        document.metrics["model_flops_per_s_per_device"].value / 1e12
    )


def test_a_finding_names_both_figures_and_the_cause():
    finding = Disagreement(
        figure="tflops_per_device",
        printed=1.249e15,
        computed=1.1096e15,
        unit="FLOP/s",
        ratio=1.1256,
        cause="counted in another way",
    )
    text = disagreement_text(finding)
    assert "1,249 TFLOP/s" in text and "1,110 TFLOP/s" in text and text.endswith("another way")


def test_a_series_tells_unknown_from_nan():
    steps = Steps.of(
        [Step(1, step_time_s=0.5, loss=float("inf")), Step(2, step_time_s=0.25, loss=2.0)]
    )
    first, second = step_rows(steps)
    assert first["loss"] == "nan" and first["grad_norm"] is None and second["loss"] == 2.0


def test_a_long_series_goes_out_whole():
    steps = Steps.of(Step(n, step_time_s=1 / (n + 1)) for n in range(25_000))
    text = "".join(step_csv(steps, "a,b.log", header=True))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 25_000 and rows[-1]["step"] == "24999" and rows[0]["file"] == "a,b.log"


def test_a_series_in_json_is_one_document_however_long():
    for count in (0, 1, 25_000):
        steps = Steps.of(Step(n, step_time_s=1 / (n + 1)) for n in range(count))
        document = json.loads("".join(step_json('a"b.log', "ok", steps)))
        assert (document["file"], document["status"]) == ('a"b.log', "ok")
        assert document["steps"] == step_rows(steps) and len(document["steps"]) == count


def test_a_name_over_two_lines_stays_on_one(document):
    lines = list(log_lines(document.model_copy(update={"file": "a\nb.log"})))
    assert lines[0].startswith("a b.log · ")


def test_a_share_is_told_in_per_cent():
    finding = Disagreement(
        figure="mfu", printed=0.40, computed=0.41, unit="fraction", ratio=0.9756, cause="rounding"
    )
    assert "prints 40.00%, but its step times give 41.00% (" in disagreement_text(finding)


def test_three_warnings_are_shown_and_the_number_of_the_others(document):
    many = document.model_copy(update={"warnings": tuple(f"warning {n}" for n in range(5))})
    assert sum("warning: " in line for line in log_lines(many)) == 5
    lines = list(log_lines(many, max_warnings=3))
    assert sum("warning: " in line for line in lines) == 3
    assert lines[-1] == "  2 more warnings: --verbose"
    few = document.model_copy(update={"warnings": ("one",)})
    assert list(log_lines(few, max_warnings=3)) == list(log_lines(few))
