"""Lines of a made-up table whose cells all follow, for tests that then change one."""

from __future__ import annotations

from dataclasses import replace

from paceline.audit.crosscheck import AuditLine
from paceline.audit.derivation import AlternativeInputs, Cell, Inputs, relation
from paceline.core.printed import exactly, read_printed

UNITS = {"mfu": 0.01}
DIGITS = {"step_time_s": ".2f", "tokens_per_s": ".0f", "mfu": ".2f", "days": ".2f"}
STEP_TIMES = {64: 14.72, 128: 14.73, 256: 14.81, 512: 14.89}
OPTIONS = AlternativeInputs(
    peaks_flops_per_s={"half of the sparse peak": 989.5e12, "the sparse peak": 1979e12}
)


def cell(column: str, text: str) -> Cell:
    printed = read_printed(text)
    assert printed is not None
    return Cell(column, printed, UNITS.get(column, 1.0))


def line(num_devices: int, step_time_s: float, table: str = "table") -> AuditLine:
    """A row whose tokens/s, MFU and days are those of its step time."""
    inputs = Inputs(
        seq_len=8192,
        global_batch=2 * num_devices,
        num_devices=num_devices,
        total_tokens=1e12,
        flops_per_sample=exactly(3.94e15),
        peak_flops_per_s=989e12,
    )
    cells: dict[str, Cell] = {}
    for column, digits in DIGITS.items():
        how = relation(column, inputs)
        assert how is not None
        cells[column] = cell(column, format(how.at(step_time_s) / UNITS.get(column, 1), digits))
    return AuditLine(f"n{num_devices}", table, cells, inputs, OPTIONS)


def table() -> list[AuditLine]:
    """Four rows, weakly scaled, in which every cell follows."""
    return [line(num, t) for num, t in STEP_TIMES.items()]


def with_cell(line: AuditLine, column: str, text: str) -> AuditLine:
    """The line with another text in one cell."""
    return replace(line, cells={**line.cells, column: cell(column, text)})
