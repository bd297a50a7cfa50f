"""Recomputes a published cell through the functions that measure and estimate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from paceline import references
from paceline.core import rates
from paceline.core.flops import FlopsInput, attention_per_token, flops_per_sample
from paceline.core.shape import LoraTarget, linear_sizes
from paceline.references import UNIT_SIZES, Correction, Row
from tests.shapes import SHAPES

INPUTS = {"step_time_s", "samples_per_s", "execution_time_s", "timed_steps", "memory_bytes"}
"""Columns that are measured: nothing else in their row determines them."""


@dataclass(frozen=True)
class Cell:
    """One published figure."""

    row: Row
    column: str

    @property
    def printed(self) -> str:
        return self.row.printed[self.column]

    @property
    def correction(self) -> Correction:
        """All explanations of the cell's slips together."""
        stated = [
            s.follows_with.model_dump(exclude_none=True) for s in self.row.slips_in(self.column)
        ]
        return Correction.model_validate({k: v for fields in stated for k, v in fields.items()})

    @property
    def is_slip(self) -> bool:
        return bool(self.row.slips_in(self.column))

    def __str__(self) -> str:
        return f"{self.row.id}-{self.column}"


def cells() -> Iterator[Cell]:
    """Every printed figure of every row."""
    for row in references.rows():
        for column in row.printed:
            if row.figure(column) is not None:
                yield Cell(row, column)


def computable(cell: Cell) -> bool:
    """True when the cell can be recomputed from other cells or settings of its row."""
    if cell.column == "step_time_s":
        return cell.row.repeats is not None
    if cell.column == "samples_per_s":
        return "samples_per_s_unrounded" in cell.row.printed
    return cell.column not in INPUTS and cell.column != "samples_per_s_unrounded"


def follows(cell: Cell, correction: Correction | None = None) -> bool:
    """True when the cell is what core computes, at the printed precision."""
    correction = correction or Correction()
    value = RECOMPUTE[cell.column](cell.row, correction)
    unit = UNIT_SIZES.get(cell.row.units[cell.column], 1.0)
    return matches(cell.printed, value / unit, correction.rounding or "nearest")


def matches(printed: str, value: float, rounding: str = "nearest") -> bool:
    """True when `value` rounds (or is cut) to the digits printed, or exceeds an `over ...`."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?(?:E[+-]?\d+)?", printed)
    assert found, printed
    number = Decimal(found[0].replace(",", ""))
    if printed.startswith("over"):
        return value > float(number)
    last_digit = Decimal(1).scaleb(int(number.as_tuple().exponent))
    mode = ROUND_DOWN if rounding == "down" else ROUND_HALF_UP
    return Decimal(value).quantize(last_digit, mode) == number


def flops_input(row: Row) -> FlopsInput:
    return FlopsInput(
        SHAPES[row.recipe], row.seq_len, row.layout.recompute,
        nominal_parameters=row.nominal_parameters,
    )  # fmt: skip


def convention_flops_per_sample(row: Row) -> float:
    assert row.convention
    return flops_per_sample(row.convention, flops_input(row))


def _step_time_s(row: Row, change: Correction) -> float:
    stated = change.step_time_s or row.figure("step_time_s")
    assert stated
    return stated


def _known_step_time_s(row: Row, change: Correction) -> float:
    twin = references.row(row.repeats or "").step_time_s
    assert twin
    return change.step_time_s or twin


def _tokens_per_s(row: Row, change: Correction) -> float:
    return rates.tokens_per_s(row.seq_len, row.global_batch, _step_time_s(row, change))


def _flops_per_s_per_device(row: Row, change: Correction) -> float:
    flops = row.flops_per_sample or convention_flops_per_sample(row)
    step_time_s = _step_time_s(row, change)
    return rates.flops_per_s_per_device(flops, row.global_batch, step_time_s, row.num_devices)


def _mfu(row: Row, change: Correction) -> float:
    peak = change.peak_flops_per_s or row.peak_flops_per_s
    share = rates.mfu(_flops_per_s_per_device(row, change), peak)
    assert share
    return share


def _days(row: Row, change: Correction) -> float:
    assert row.total_tokens
    return rates.days(row.total_tokens, _tokens_per_s(row, change))


def _part_flops_per_token(*targets: LoraTarget) -> Callable[[Row, Correction], float]:
    def compute(row: Row, change: Correction) -> float:
        shape = SHAPES[row.recipe]
        sizes = linear_sizes(shape)
        return 6.0 * shape.num_layers * sum(sizes[t][0] * sizes[t][1] for t in targets)

    return compute


def _attention_flops_per_token(row: Row, change: Correction) -> float:
    projections = _part_flops_per_token("q", "k", "v", "o")(row, change)
    return projections + attention_per_token(flops_input(row))


def _head_flops_per_token(row: Row, change: Correction) -> float:
    shape = SHAPES[row.recipe]
    return 6.0 * shape.vocab_size * shape.hidden_size


def base_of(row: Row, num_devices: int) -> Row:
    """The row of the same table on `num_devices` devices."""
    return next(
        r for t in references.tables() if t.id == row.table for r in t.rows
        if r.num_devices == num_devices
    )  # fmt: skip


def _speedup(row: Row, change: Correction) -> float:
    if change.base_samples_per_s:
        unrounded = row.figure("samples_per_s_unrounded")
        assert unrounded
        return rates.scaling_efficiency(unrounded, 1, change.base_samples_per_s, 1)
    base = base_of(row, row.base_num_devices or 1)
    assert row.samples_per_s and base.samples_per_s
    return rates.scaling_efficiency(row.samples_per_s, 1, base.samples_per_s, 1)


def _scaling_efficiency(row: Row, change: Correction) -> float:
    """Against one GPU from the plot's speed-up, against more from the table."""
    base_num = change.base_num_devices or row.base_num_devices or 1
    if base_num == 1:
        speedup = row.figure("speedup")
        assert speedup
        return rates.scaling_efficiency(speedup, row.num_devices, 1.0, 1)
    return efficiency(row, base_num)


def efficiency(row: Row, base_num: int) -> float:
    """Scaling efficiency from printed samples/s."""
    base = base_of(row, base_num)
    assert row.samples_per_s and base.samples_per_s
    return rates.scaling_efficiency(
        row.samples_per_s, row.num_devices, base.samples_per_s, base_num
    )


def _nodes(row: Row, change: Correction) -> float:
    """Nodes on which every replica holds exactly one micro-batch of the global batch."""
    replicas = row.global_batch / row.layout.micro_batch
    return replicas * row.layout.model_devices / row.devices_per_node


def _unrounded(row: Row, change: Correction) -> float:
    value = row.figure("samples_per_s_unrounded")
    assert value
    return value


RECOMPUTE: dict[str, Callable[[Row, Correction], float]] = {
    "step_time_s": _known_step_time_s,
    "tokens_per_s": _tokens_per_s,
    "samples_per_s": _unrounded,
    "flops_per_s_per_device": _flops_per_s_per_device,
    "mfu": _mfu,
    "days": _days,
    "num_microbatches": lambda row, _: row.layout.num_microbatches(
        row.num_devices, row.global_batch
    ),
    "dp": lambda row, _: row.layout.dp(row.num_devices),
    "nodes": _nodes,
    "seq_len": lambda row, change: change.seq_len or row.seq_len,
    "attention_flops_per_token": _attention_flops_per_token,
    "mlp_flops_per_token": _part_flops_per_token("up", "gate", "down"),
    "head_flops_per_token": _head_flops_per_token,
    "flops_per_sample": lambda row, _: convention_flops_per_sample(row),
    "speedup": _speedup,
    "scaling_efficiency": _scaling_efficiency,
}
