"""Predicted against measured: nothing is dropped silently, and figures are what the rows give."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.validation import (
    REQUIRED_COLUMNS,
    memory_as_reported,
    read_memory_row,
    read_table,
    validate_rows,
)
from tests.estimate.fit.test_published import ROW

ROWS = [
    ROW,
    {**ROW, "id": "a-2", "mbs": "8"},
    {**ROW, "id": "b-1", "source": "b", "model": "Llama LoRA"},
    {**ROW, "id": "b-2", "source": "b", "gpu": "Wonder-9000"},
    {**ROW, "id": "line 6", "source": "b", "step_time_s": ""},
]


def test_every_row_is_scored_or_has_its_reason():
    validation = validate_rows("t", ROWS, shipped_evidence())
    assert [row.id for row in validation.rows] == ["a-1", "a-2", "b-1"]
    assert [(row.id, row.reason[:12]) for row in validation.unsupported_rows] == [
        ("b-2", "the device i"),
        ("line 6", "no step time"),
    ]
    assert {name: score.n for name, score in validation.by_source.items()} == {"a": 2, "b": 1}
    assert {name: score.n for name, score in validation.by_kind.items()} == {"dense": 2, "lora": 1}


def test_figures_are_those_of_the_rows():
    validation = validate_rows("t", ROWS, shipped_evidence())
    errors = np.array([abs(row.predicted_s / row.measured_s - 1) for row in validation.rows])
    assert validation.overall.mape == pytest.approx(errors.mean())
    assert validation.overall.within_20 == pytest.approx(np.mean(errors <= 0.2))
    assert all(row.low_s < row.predicted_s < row.high_s for row in validation.rows)
    assert validation.rows[0].error == pytest.approx(validation.rows[0].predicted_s / 3.696 - 1)


def test_a_measured_time_out_of_all_proportion_still_has_a_score():
    validation = validate_rows("t", [{**ROW, "step_time_s": "1e11"}], shipped_evidence())
    assert validation.overall.median and 20 < validation.overall.median < 30


def test_a_table_of_nothing_has_no_score():
    validation = validate_rows("t", ROWS[3:], shipped_evidence())
    assert (
        validation.overall.n == 0
        and validation.overall.mape is None
        and len(validation.unsupported_rows) == 2
    )
    assert validate_rows("t", [], shipped_evidence()).overall.n == 0


def test_a_table_is_read_with_its_columns_or_refused(tmp_path: Path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*REQUIRED_COLUMNS, "id"], extrasaction="ignore")
        writer.writeheader()
        writer.writerow(ROW)
    assert read_table(path)[0]["hidden"] == "4096"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="lacks the columns layers"):
        read_table(path)
    path.write_text("")
    with pytest.raises(UserError, match="is empty; allowed: a header line and rows"):
        read_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError):
        read_table(path)
    with pytest.raises(UserError, match=r"cannot be read: No such file or directory$"):
        read_table(tmp_path / "none.csv")


def test_a_table_that_would_lose_rows_or_figures_is_refused(tmp_path: Path):
    path, header = tmp_path / "t.csv", ",".join([*REQUIRED_COLUMNS, "id"])
    row = ",".join(ROW[name] for name in [*REQUIRED_COLUMNS, "id"])
    path.write_text(f'{header}\n"{row}\n{row}\n{row}\n')
    with pytest.raises(UserError, match="cannot be read as CSV: unexpected end of data"):
        read_table(path)
    path.write_text(f"{header},layers\n{row},99\n")
    with pytest.raises(UserError, match="has duplicate columns: layers"):
        read_table(path)


def test_a_row_without_an_id_is_known_by_its_line(tmp_path: Path):
    path, header = tmp_path / "t.csv", ",".join([*REQUIRED_COLUMNS, "notes"])
    row = ",".join(ROW[name] for name in REQUIRED_COLUMNS)
    path.write_text(f'{header}\n{row},"two\nlines"\n{row}\n\n{row},\n')
    assert [line["id"] for line in read_table(path)] == ["line 3", "line 4", "line 6"]
    assert [row.id for row in validate_rows("t", read_table(path), shipped_evidence()).rows][
        -1
    ] == "line 6"


def test_a_row_that_a_comma_shifts_is_refused(tmp_path: Path):
    path, header = tmp_path / "t.csv", ",".join(REQUIRED_COLUMNS)
    row = ",".join(ROW[name] for name in REQUIRED_COLUMNS)
    path.write_text(f"{header}\n{row},,\n{row},5\n")
    with pytest.raises(UserError, match=r"t\.csv:3: has more cells than columns: 5; put text"):
        read_table(path)


def test_memories_are_judged_where_they_are_stated():
    stated = {**ROW, "mem_gb": "20"}
    unreadable = [{**ROW, "mem_gb": text} for text in ("", "nan", "-3", "much", "inf")]
    accuracy = validate_rows("t", [stated, *unreadable], shipped_evidence()).memory
    predicted = memory_as_reported([read_memory_row(stated)])[0]
    assert accuracy.n == 1 and accuracy.mape == accuracy.median == pytest.approx(
        abs(predicted / 20 / 2**30 - 1)
    )
    assert accuracy.within_10 == float(abs(predicted / 20 / 2**30 - 1) <= 0.1)
    exact = {**ROW, "mem_gb": str(predicted / 2**30)}
    near = {**ROW, "mem_gb": str(predicted / 2**30 / 1.07)}
    both = validate_rows("t", [exact, near], shipped_evidence()).memory
    assert (both.within_5, both.within_10) == (0.5, 1)
    nothing = validate_rows("t", ROWS, shipped_evidence()).memory
    assert nothing.n == 0 and nothing.mape is None
