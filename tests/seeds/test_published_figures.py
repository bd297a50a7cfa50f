"""Every published figure of the seeds, recomputed with its row's convention, peak and step time."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.audit.crosscheck import check
from paceline.audit.rows import audit_lines, flops_input, row_inputs
from paceline.core import rates
from paceline.core.flops import FlopsInput, flops_per_sample
from paceline.core.layout import Recompute
from paceline.core.memory import memory_per_device
from paceline.core.parallel_run import ParallelRun
from paceline.core.printed import exactly, read_printed
from paceline.files import catalog, references
from paceline.files.references import Row
from tests.core.shapes import SHAPES

PACKAGE = Path(paceline.__file__).parent
SEEDS = ("bigscience-1b3", "lambda-1cc", "nvidia-llama31")
ROWS = [row for name in SEEDS for row in references.source(name).rows]
TIMED = [row for row in ROWS if "timed_steps" in row.printed]
MEASURED_MEMORY = [row for row in ROWS if row.figure("memory_bytes")]

EFFICIENCIES = {
    ("opt-350m-8", 1): "99.05%", ("opt-350m-16", 1): "98.42%", ("opt-350m-32", 1): "97.93%",
    ("opt-350m-64", 1): "97.73%", ("opt-350m-128", 1): "97.82%", ("opt-350m-256", 1): "97.66%",
    ("opt-350m-512", 1): "97.22%", ("opt-350m-16", 8): "99.36%", ("opt-350m-32", 8): "98.86%",
    ("opt-350m-64", 8): "98.66%", ("opt-350m-128", 8): "98.75%", ("opt-350m-256", 8): "98.59%",
    ("opt-350m-512", 8): "98.15%", ("opt-13b-8", 1): "101.39%", ("opt-13b-16", 1): "101.39%",
    ("opt-13b-32", 1): "100.69%", ("opt-13b-64", 1): "100.69%", ("opt-13b-128", 1): "100.43%",
    ("opt-13b-256", 1): "99.57%", ("opt-13b-512", 1): "99.54%", ("opt-13b-16", 8): "100.00%",
    ("opt-13b-32", 8): "99.32%", ("opt-13b-64", 8): "99.32%", ("opt-13b-128", 8): "99.06%",
    ("opt-13b-256", 8): "98.20%", ("opt-13b-512", 8): "98.18%",
}  # fmt: skip
"""Scaling efficiency from the printed samples/s, by row and devices of the base."""


def rounds_to(value: float, text: str) -> bool:
    printed = read_printed(text)
    return printed is not None and printed.rounding_interval().meets(exactly(value))


def shape_input(row: Row) -> FlopsInput:
    """As the audit sees the row, with a shape that no recipe can bend."""
    x = flops_input(row)
    assert x is not None and row.recipe
    return replace(x, shape=SHAPES[row.recipe])


def test_every_cell_is_a_speed_recomputed_or_measured():
    states = Counter(
        v.state for name in SEEDS for v in check(audit_lines(references.source(name).rows))
    )
    assert states == {
        "speed": 49,
        "follows": 143 - 2,
        "strained": 2,
        "cut": 5,
        "fails": 9,
        "unchecked": 30,
    }


@pytest.mark.parametrize("row", [r for r in ROWS if r.convention], ids=lambda row: row.id)
def test_flops_of_recipe_rows_are_those_of_the_shape_written_out_in_the_tests(row: Row):
    assert row.convention
    expected = flops_per_sample(row.convention, shape_input(row))
    assert flops_per_sample(row.convention, flops_input(row) or shape_input(row)) == expected
    flops = row_inputs(row).flops_per_sample
    assert flops and flops.middle == (row.flops_per_sample or expected)


@pytest.mark.parametrize(("row", "base"), EFFICIENCIES)
def test_a_scaling_efficiency_follows_from_the_printed_throughputs(row: str, base: int):
    here, there = references.row(row), references.row(f"{row.rpartition('-')[0]}-{base}")
    rate, base_rate = here.figure("samples_per_s"), there.figure("samples_per_s")
    assert rate and base_rate and here.num_devices
    share = rates.scaling_efficiency(rate, here.num_devices, base_rate, base)
    assert rounds_to(100 * share, EFFICIENCIES[row, base])


def test_only_the_rounded_base_makes_scaling_look_better_than_linear():
    above = {row for (row, base), text in EFFICIENCIES.items() if base == 1 and text > "100"}
    assert {row for row in above if EFFICIENCIES[row, 1].startswith("1")} == {
        f"opt-13b-{n}" for n in (8, 16, 32, 64, 128)
    }


@pytest.mark.parametrize("row", TIMED, ids=lambda row: row.id)
def test_a_logged_throughput_follows_from_the_timed_steps(row: Row):
    total, steps = row.figure("execution_time_s"), row.figure("timed_steps")
    printed = row.figure("samples_per_s_unrounded")
    assert total and steps and printed and row.global_batch
    slowest, fastest = (
        rates.samples_per_s(row.global_batch, (total + half_a_digit) / steps)
        for half_a_digit in (5e-5, -5e-5)
    )
    assert slowest <= printed <= fastest


def test_the_declared_flops_of_a_sequence_are_the_conventions_to_three_digits():
    rows = [row for row in ROWS if row.flops_per_sample]
    assert len(rows) == 15
    for row in rows:
        assert row.convention
        flops = flops_per_sample(row.convention, shape_input(row))
        assert row.flops_per_sample == float(f"{flops:.2e}")


def test_llama_70b_costs_3_9439e15_flops_and_not_what_the_misprinted_length_gives():
    x = shape_input(references.row("llama31-70b-fp8-64-example"))
    per_sample = flops_per_sample("full-attention", x)
    assert rounds_to(per_sample, "3.9439E+15")
    assert rounds_to(per_sample * 8129 / 8192, "3.91E+15")


def test_causal_accounting_lowers_every_mfu_by_the_same_share():
    x = shape_input(references.row("llama31-70b-bf16-64"))
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
        ("six-n+recompute", "full", "47.0"),
        ("six-n", "full", "35.25"),
        ("narayanan+recompute", "full", "53.75"),
        ("megatron-deepspeed", "none", "40.31"),
        ("full-attention", "none", "41.01"),
    ],
)
def test_one_step_time_gives_a_different_figure_in_every_convention(
    convention: str, recompute: Recompute, tflops: str
):
    row = references.row("1b3-32gb-tp1-pp1-mbs1")
    flops = flops_per_sample(convention, replace(shape_input(row), recompute=recompute))
    rate = rates.flops_per_s_per_device(flops, row.global_batch or 0, row.step_time_s or 1, 8)
    assert rounds_to(rate / 1e12, tflops)


@pytest.mark.parametrize("row", MEASURED_MEMORY, ids=lambda row: row.id)
def test_a_layout_that_ran_was_smaller_than_its_card_but_for_a_borderline(row: Row):
    used, card = row.figure("memory_bytes"), catalog.device(row.device or "").memory_bytes
    borderline = "borderline" in row.printed["memory_bytes"]
    assert used and card and (used < card) is not borderline


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
    assert row.recipe and row.device and row.num_devices and row.global_batch and row.seq_len
    assert row.dtype
    return memory_per_device(
        ParallelRun(
            row.layout,
            SHAPES[row.recipe],
            row.num_devices,
            row.global_batch,
            row.seq_len,
            row.dtype,
        ),
        context_bytes=catalog.device(row.device).context_bytes or 0.0,
    ).total_bytes


def test_no_published_figure_is_written_into_the_package():
    code = "\n".join(p.read_text("utf-8") for p in PACKAGE.rglob("*.py"))
    numbers = set(re.findall(r"\d+(?:\.\d+)?", code))
    telling = {figure for figure in figures(ROWS) if significant(figure) >= 4}
    telling |= {figure for figure in figures(references.rows()) if significant(figure) >= 6}
    assert len(telling) > 300
    assert not telling & numbers


def figures(rows: Iterable[Row]) -> set[str]:
    return {re.sub("[%,]", "", text) for row in rows for text in row.printed.values()}


def significant(figure: str) -> int:
    """Digits without the zeros in front."""
    return len(re.sub(r"\D", "", figure).lstrip("0"))


def test_the_copied_throughputs_are_those_of_the_result_files(reference_data: Path):
    with (reference_data / "references/lambda_1cc_reference_table.csv").open() as file:
        lines = {int(line["num_gpus"]): line for line in csv.DictReader(file)}
    for table, column in (
        ("lambda-1cc-opt-350m", "opt350m_bs24_samples_s"),
        ("lambda-1cc-opt-13b", "opt13b_bs16_samples_s"),
    ):
        for row in references.find_rows(table)[1:]:
            assert row.printed["samples_per_s_unrounded"] == lines[row.num_devices or 0][column]
