"""One cell of a published table changed by 0.5% is found, and no other.

Only cells whose resolution is finer than the change can be found: a step time in whole seconds
hides 3%. A changed speed is found if two other cells of its row are fine enough and
contradict it together; where a row prints one more figure only, either of the two could be the
changed one, and where another row prints the original step time, the cells could have been taken
from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from paceline.audit.crosscheck import CellVerdict, check
from paceline.audit.rows import audit_lines
from paceline.audit.tables import audit_rows
from paceline.core.printed import like
from paceline.files import references
from paceline.files.references import Row
from tests.nightly import NIGHTLY

CHANGE = 0.005
FINE = 0.8 * CHANGE
"""The printed digits leave that much of the change at least."""
SEEDED = random.Random(20)


@dataclass(frozen=True)
class Cell:
    source: str
    verdict: CellVerdict

    def __str__(self) -> str:
        return f"{self.verdict.line.name}-{self.verdict.cell.column}"


def fine_cells(source: str) -> Iterator[Cell]:
    """The consistent cells of a source that are printed finely enough."""
    rows = references.source(source).rows
    verdicts = check(audit_lines(rows))
    for verdict in verdicts:
        row = [v for v in verdicts if v.line.name == verdict.line.name]
        derived = verdict.state in ("follows", "cut", "strained")
        if derived and verdict.resolution and verdict.resolution < FINE:
            yield Cell(source, verdict)
        if verdict.state == "speed" and _can_be_told(verdict, row, verdicts):
            yield Cell(source, verdict)


def _can_be_told(
    speed: CellVerdict, row: Sequence[CellVerdict], all_of_them: Sequence[CellVerdict]
) -> bool:
    witnesses = [v for v in row if v.state in ("follows", "cut") and (v.resolution or 1) < FINE]
    same = [v for v in all_of_them if v.state == "speed" and v.cell.value == speed.cell.value]
    sound = all(v.state != "fails" for v in row if v.cell.column != "mfu")
    return speed.cell.printed.resolution < FINE and len(witnesses) >= 2 and len(same) == 1 and sound


def findings(rows: Sequence[Row]) -> set[tuple[str, str]]:
    return {(f.row, f.column) for f in audit_rows(rows).findings}


@cache
def findings_of(source: str) -> set[tuple[str, str]]:
    return findings(references.source(source).rows)


def changed(cell: Cell, factor: float) -> tuple[list[Row], str]:
    """The rows of the source with the cell multiplied, and its new text."""
    name, printed = cell.verdict.line.name, cell.verdict.cell.printed
    text = printed.text.replace(printed.digits, like(printed.value * factor, printed), 1)
    column = cell.verdict.cell.column
    rows = [
        row.model_copy(update={"printed": row.printed | {column: text}}) if row.id == name else row
        for row in references.source(cell.source).rows
    ]
    return rows, text


SEEDS = [c for s in ("nvidia-llama31", "lambda-1cc", "bigscience-1b3") for c in fine_cells(s)]
OTHERS = [
    c
    for s in ("nvidia-dgxc", "megatron-bridge", "nvidia-nemo", "bigscience-large")
    for c in SEEDED.sample(list(fine_cells(s)), 5)
]


@pytest.mark.parametrize("cell", [*SEEDS, *OTHERS], ids=str)
@pytest.mark.parametrize("factor", [1 + CHANGE, 1 - CHANGE] if NIGHTLY else [1 + CHANGE])
def test_a_cell_changed_by_half_a_per_cent_is_found_and_no_other(cell: Cell, factor: float):
    rows, text = changed(cell, factor)
    assert text != cell.verdict.cell.printed.text
    before = findings_of(cell.source)
    place = (cell.verdict.line.name, cell.verdict.cell.column)
    assert place not in before
    assert findings(rows) == before | {place}


def test_derived_cells_and_speeds_are_among_them():
    columns = {cell.verdict.cell.column for cell in SEEDS}
    assert {"tokens_per_s", "mfu", "days", "step_time_s", "flops_per_sample"} <= columns
    assert len(SEEDS) > 50


def test_a_change_below_the_resolution_is_not_claimed_to_be_found():
    rows = references.source("bigscience-1b3").rows
    same = [
        row.model_copy(update={"printed": row.printed | {"flops_per_s_per_device": "47.2"}})
        if row.id == "1b3-32gb-tp1-pp1-mbs1"
        else row
        for row in rows
    ]
    assert findings(same) == findings(rows) == set()
    assert [c for c in SEEDS if c.source == "bigscience-1b3"] == []
