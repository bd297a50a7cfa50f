"""What does not follow is found, with its size and its cause, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.audit.cells.agreement import AuditLine
from paceline.audit.cells.crosscheck import ALONE, CUT, UNEXPLAINED, CellVerdict, check
from paceline.audit.cells.derivation import Inputs, relation
from paceline.core.printed import exactly
from tests.engines.log_reading.lines_example import cell, line, table, with_cell


def failing(lines: list[AuditLine]) -> dict[tuple[str, str], CellVerdict]:
    verdicts = check(lines)
    return {(v.line.name, v.cell.column): v for v in verdicts if v.state == "fails"}


def test_a_sound_table_has_no_findings():
    states = [v.state for v in check(table())]
    assert states == ["speed", "follows", "follows", "follows"] * 4


@pytest.mark.parametrize("column", ["step_time_s", "tokens_per_s", "mfu", "days"])
@pytest.mark.parametrize("factor", [0.995, 1.005, 1.1])
@pytest.mark.parametrize("at", range(4))
def test_one_changed_cell_is_found_and_no_other(column: str, factor: float, at: int):
    lines = table()
    digits = lines[at].cells[column].printed
    decimals = len(digits.digits.partition(".")[2])
    lines[at] = with_cell(lines[at], column, f"{digits.value * factor:.{decimals}f}")
    verdicts = failing(lines)
    assert set(verdicts) == {(lines[at].name, column)}
    verdict = verdicts[lines[at].name, column]
    assert verdict.difference == pytest.approx(factor - 1, abs=1e-3)


def test_the_cause_of_a_misprinted_step_time_names_what_agrees():
    lines = table()
    lines[0] = with_cell(lines[0], "step_time_s", "17.42")
    cause = failing(lines)["n64", "step_time_s"].cause
    assert cause == (
        "tokens_per_s and mfu and days follow together from 14.72; "
        "two digits swapped: 14.72 would follow"
    )


def test_cells_of_another_rows_step_time_are_all_told_so():
    lines = table()
    taken = {**line(512, 14.81).cells, "step_time_s": cell("step_time_s", "14.89")}
    lines[3] = replace(lines[3], cells=taken)
    verdicts = failing(lines)
    assert {key[1] for key in verdicts} == {"tokens_per_s", "mfu", "days"}
    assert {v.cause for v in verdicts.values()} == {"follows from 14.81 s, the step time of n256"}


def test_a_column_on_another_peak_is_explained_by_the_peak():
    lines = [on_peak(line, 1979) for line in table()]
    verdicts = failing(lines)
    assert len(verdicts) == 4
    assert all("1979 TFLOP/s, the sparse peak" in (v.cause or "") for v in verdicts.values())


def on_peak(line: AuditLine, peak_tflops: float) -> AuditLine:
    """The line with its MFU on another peak than the 989 TFLOP/s it states."""
    t = line.cells["step_time_s"].value
    how = relation("mfu", replace(line.inputs, peak_flops_per_s=peak_tflops * 1e12))
    assert how is not None
    return with_cell(line, "mfu", f"{100 * how.at(t):.2f}")


def test_a_nuance_that_the_rest_of_the_column_does_not_bear_is_no_cause():
    lines = table()
    lines[3] = on_peak(lines[3], 989.5)
    verdicts = failing(lines)
    assert set(verdicts) == {("n512", "mfu")}
    assert verdicts["n512", "mfu"].cause == UNEXPLAINED


def test_a_nuance_of_the_whole_column_is_one():
    verdicts = failing([on_peak(line, 989.5) for line in table()])
    assert verdicts and all("989.5" in (v.cause or "") for v in verdicts.values())


def test_a_batch_that_other_cells_of_the_row_confirm_is_no_cause():
    lines = table()
    lines[0] = on_peak(lines[0], 1979)
    cause = failing(lines)["n64", "mfu"].cause or ""
    assert "sparse peak" in cause
    lines[0] = on_peak(lines[0], 2 * 989)
    assert "batch" not in (failing(lines)["n64", "mfu"].cause or "")


def test_a_multiple_of_another_row_is_named():
    lines = table()
    double = f"{2 * lines[0].cells['tokens_per_s'].printed.value:.0f}"
    lines[1] = with_cell(lines[1], "step_time_s", "14.79")
    lines[1] = with_cell(lines[1], "tokens_per_s", double)
    lines[1] = with_cell(lines[1], "mfu", line(128, 14.79).cells["mfu"].printed.text)
    lines[1] = with_cell(lines[1], "days", line(128, 14.79).cells["days"].printed.text)
    cause = failing(lines)["n128", "tokens_per_s"].cause or ""
    assert cause in (
        f"is {lines[0].cells['tokens_per_s'].printed.digits} of n64 times 2",
        "follows from 14.72 s, the step time of n64",
    )


def test_an_unexplained_cell_says_so():
    lines = table()
    lines[0] = with_cell(lines[0], "mfu", "47.77")
    assert failing(lines)["n64", "mfu"].cause == UNEXPLAINED


def verdict_on(lines: list[AuditLine], name: str, column: str) -> CellVerdict:
    return next(v for v in check(lines) if (v.line.name, v.cell.column) == (name, column))


def test_cut_digits_follow_but_are_marked():
    lines = table()
    # 8192 x 512 / 14.81 s = 283,207.56 tokens/s
    lines[2] = with_cell(lines[2], "tokens_per_s", "283207")
    cut = verdict_on(lines, "n256", "tokens_per_s")
    assert (cut.state, cut.cause) == ("cut", CUT)


def test_a_cell_that_follows_only_without_its_neighbours_is_strained():
    coarse = with_cell(line(256, 14.8), "step_time_s", "14.8")
    lines = [on_peak(row, 989.5) for row in (*table()[:2], coarse, table()[3])]
    strained = verdict_on(lines, "n256", "mfu")
    assert strained.state == "strained" and "989.5" in (strained.cause or "")
    assert ("n256", "mfu") not in failing(lines)


def test_twins_that_print_different_speeds_contradict_each_other():
    twin = line(64, 14.72)
    other = replace(line(64, 15.31), name="example", twin=twin)
    verdicts = failing([twin, other])
    assert set(verdicts) == {("example", "step_time_s")}
    cause = verdicts["example", "step_time_s"].cause or ""
    assert cause.startswith("n64 prints 14.72 for the same configuration, from which the other")


def test_what_nothing_gives_is_not_checked():
    alone = AuditLine("memory", "table", {"memory_bytes": cell("memory_bytes", "16")}, Inputs())
    (verdict,) = check([alone])
    assert (verdict.state, verdict.cause) == ("unchecked", ALONE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flops_per_sample": None}, "no known count of FLOPs"),
        ({"peak_flops_per_s": None}, "no declared peak"),
        ({"flops_per_sample": None, "peak_flops_per_s": None}, "no declared peak"),
    ],
)
def test_a_missing_input_is_the_reason(change: dict[str, None], reason: str):
    line = table()[0]
    bare = replace(line, inputs=replace(line.inputs, **change))
    verdict = next(v for v in check([bare]) if v.cell.column == "mfu")
    assert verdict.state == "unchecked" and reason in (verdict.cause or "")


def test_a_row_without_a_speed_says_so():
    line = replace(table()[0], inputs=Inputs(8192, 128, 64, exactly(3.94e15), 989e12, 1e12))
    only = replace(line, cells={"num_layers": cell("num_layers", "80")})
    assert check([only])[0].cause == ALONE


def test_every_resolution_is_what_a_change_must_exceed():
    for verdict in check(table()):
        if verdict.state == "follows":
            assert verdict.resolution is not None and 0 < verdict.resolution < 0.003
