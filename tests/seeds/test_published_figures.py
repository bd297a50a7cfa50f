"""Every published figure is recomputed with its row's own convention, peak and step time."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline import catalog, references
from paceline.core import rates
from paceline.core.flops import flops_per_sample
from paceline.core.layout import Recompute
from paceline.core.memory import memory_per_device
from paceline.references import Row
from tests.seeds.published import (
    INPUTS,
    RECOMPUTE,
    Cell,
    cells,
    computable,
    convention_flops_per_sample,
    efficiency,
    flops_input,
    follows,
    matches,
)
from tests.shapes import SHAPES

REPOSITORY = Path(paceline.__file__).parents[1]

SOUND = [cell for cell in cells() if computable(cell) and not cell.is_slip]
SLIPS = [cell for cell in cells() if cell.is_slip and cell.column in RECOMPUTE]
EFFICIENCIES = [(row, base) for row in references.rows() for base in row.efficiency]
TIMED = [row for row in references.rows() if "timed_steps" in row.printed]
MEASURED_MEMORY = [row for row in references.rows() if row.figure("memory_bytes")]


@pytest.mark.parametrize("cell", SOUND, ids=str)
def test_a_printed_figure_follows_from_its_row(cell: Cell):
    assert follows(cell)


@pytest.mark.parametrize("cell", SLIPS, ids=str)
def test_a_slip_does_not_follow_as_stated_but_does_under_its_explanation(cell: Cell):
    assert not follows(cell)
    assert follows(cell, cell.correction)


def test_every_cell_is_an_input_or_recomputed():
    columns = {cell.column for cell in cells()}
    assert columns - INPUTS - {"samples_per_s_unrounded"} <= set(RECOMPUTE)
    assert len(SOUND) > 100
    assert len(SLIPS) == 6 + 2 + 3 + 14 + 2 + 4


def test_a_wrong_figure_would_be_noticed():
    row = references.row("llama31-70b-fp8-64")
    for column, wrong in {"tokens_per_s": "95238", "mfu": "36.18%", "days": "121.54"}.items():
        changed = row.model_copy(update={"printed": row.printed | {column: wrong}})
        assert not follows(Cell(changed, column))


@pytest.mark.parametrize(
    ("printed", "value", "rounding", "same"),
    [
        ("47.0", 47.0051, "nearest", True), ("44.4", 44.4505, "nearest", False),
        ("44.4", 44.4505, "down", True), ("3.94E+15", 3.9439e15, "nearest", True),
        ("3.94E+15", 3.9136e15, "nearest", False), ("over 98%", 97.9, "nearest", False),
        ("over 98%", 98.15, "nearest", True), ("136,902", 136902.4, "nearest", True),
    ],
)  # fmt: skip
def test_figures_are_compared_at_the_printed_precision(
    printed: str, value: float, rounding: str, same: bool
):
    assert matches(printed, value, rounding) is same


@pytest.mark.parametrize(("row", "base"), EFFICIENCIES, ids=lambda x: getattr(x, "id", str(x)))
def test_a_scaling_efficiency_follows_from_the_printed_throughputs(row: Row, base: int):
    assert matches(row.efficiency[base], 100 * efficiency(row, base))


def test_only_the_rounded_base_makes_scaling_look_better_than_linear():
    above = {row.id for row, base in EFFICIENCIES if base == 1 and efficiency(row, 1) > 1}
    assert above == {f"opt-13b-{n}" for n in (8, 16, 32, 64, 128)}


@pytest.mark.parametrize("row", TIMED, ids=lambda row: row.id)
def test_a_logged_throughput_follows_from_the_timed_steps(row: Row):
    total, steps = row.figure("execution_time_s"), row.figure("timed_steps")
    printed = row.figure("samples_per_s_unrounded")
    assert total and steps and printed
    slowest, fastest = (
        rates.samples_per_s(row.global_batch, (total + half_a_digit) / steps)
        for half_a_digit in (5e-5, -5e-5)
    )
    assert slowest <= printed <= fastest


def test_the_declared_flops_of_a_sequence_are_the_conventions_to_three_digits():
    rows = [row for row in references.rows() if row.flops_per_sample]
    assert len(rows) == 14
    for row in rows:
        assert row.flops_per_sample == float(f"{convention_flops_per_sample(row):.2e}")


def test_llama_70b_costs_3_9439e15_flops_and_not_what_the_misprinted_length_gives():
    x = flops_input(references.row("llama31-70b-fp8-64-example"))
    per_sample = flops_per_sample("full-attention", x)
    assert matches("3.9439E+15", per_sample)
    assert matches("3.91E+15", per_sample * 8129 / 8192)


def test_causal_accounting_lowers_every_mfu_by_the_same_share():
    x = flops_input(references.row("llama31-70b-bf16-64"))
    ratio = flops_per_sample("causal", x) / flops_per_sample("full-attention", x)
    assert ratio == pytest.approx(0.933, abs=5e-4)


def test_recomputation_flatters_hardware_flops_where_tokens_tell_the_truth():
    lazy = references.row("1b3-32gb-tp1-pp1-mbs4")
    quick = references.row("1b3-32gb-plain-tp1-pp1-mbs1")
    assert (lazy.figure("flops_per_s_per_device") or 0) > (
        quick.figure("flops_per_s_per_device") or 0
    )
    assert (quick.tokens_per_s or 0) / (lazy.tokens_per_s or 1) == pytest.approx(1.22, abs=0.01)


@pytest.mark.parametrize(
    ("convention", "recompute", "tflops"),
    [
        ("six-n", "full", "47.0"), ("narayanan-hw", "full", "53.75"),
        ("megatron-deepspeed", "none", "40.31"), ("full-attention", "none", "41.01"),
    ],
)  # fmt: skip
def test_one_step_time_gives_a_different_figure_in_every_convention(
    convention: str, recompute: Recompute, tflops: str
):
    row = references.row("1b3-32gb-tp1-pp1-mbs1")
    flops = flops_per_sample(convention, replace(flops_input(row), recompute=recompute))
    rate = rates.flops_per_s_per_device(flops, row.global_batch, row.step_time_s or 0, 8)
    assert matches(tflops, rate / 1e12)


@pytest.mark.parametrize("row", MEASURED_MEMORY, ids=lambda row: row.id)
def test_a_layout_that_ran_was_smaller_than_its_card_unless_marked(row: Row):
    used, card = row.figure("memory_bytes"), catalog.device(row.device).memory_bytes
    explained = [slip.follows_with.status for slip in row.slips_in("memory_bytes")]
    assert used and card
    assert (used < card) is ((explained or [row.status]) == ["ok"])


@pytest.mark.parametrize("row", MEASURED_MEMORY, ids=lambda row: row.id)
def test_the_static_memory_bound_stays_below_what_was_measured(row: Row):
    used = row.figure("memory_bytes")
    assert used and bound_bytes(row) < used


def test_the_static_memory_bound_misses_a_third_of_another_frameworks_memory():
    errors = [bound_bytes(row) / (row.figure("memory_bytes") or 1) - 1 for row in MEASURED_MEMORY]
    assert len(errors) == 23
    assert sum(errors) / len(errors) == pytest.approx(-0.34, abs=0.03)
    assert min(errors) > -0.60


def bound_bytes(row: Row) -> float:
    """The static bound in bytes for the row's layout, with the context that the study measured."""
    return memory_per_device(
        SHAPES[row.recipe],
        row.layout,
        row.layout.dp(row.num_devices),
        row.seq_len,
        row.dtype,
        num_microbatches=row.layout.num_microbatches(row.num_devices, row.global_batch),
        context_bytes=catalog.device(row.device).context_bytes or 0.0,
    ).total_bytes


def test_no_published_figure_is_written_into_the_package():
    code = "\n".join(p.read_text("utf-8") for p in (REPOSITORY / "paceline").rglob("*.py"))
    numbers = set(re.findall(r"\d+(?:\.\d+)?", code))
    figures = {re.sub("[%,]", "", cell.printed) for cell in cells()}
    telling = {figure for figure in figures if len(re.sub(r"\D", "", figure)) >= 4}
    assert len(telling) > 60
    assert not telling & numbers


def test_the_copied_throughputs_are_those_of_the_result_files():
    folder = Path(os.environ.get("PACELINE_REFERENCE_DATA", REPOSITORY.parent / "shared" / "data"))
    path = folder / "references" / "lambda_1cc_reference_table.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    with path.open(encoding="utf-8") as file:
        lines = {int(line["num_gpus"]): line for line in csv.DictReader(file)}
    for table, column in (
        ("lambda-1cc-opt-350m", "opt350m_bs24_samples_s"),
        ("lambda-1cc-opt-13b", "opt13b_bs16_samples_s"),
    ):
        for row in references.named(table)[1:]:
            assert row.printed["samples_per_s_unrounded"] == lines[row.num_devices][column]
