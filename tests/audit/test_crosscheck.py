"""What does not follow is found, with its size and its cause, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.audit.crosscheck import (
    ALONE,
    CUT,
    UNEXPLAINED,
    AuditLine,
    CellVerdict,
    TimedLine,
    check,
    other_step_times,
    with_step_times,
)
from paceline.audit.derivation import Inputs, relation
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
        "tokens_per_s and mfu and days all follow from 14.72; "
        "two digits swapped: 14.72 would be consistent"
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
    assert cause.startswith("n64 prints 14.72 for the same configuration, and the other figures")


def test_what_nothing_gives_is_not_checked():
    alone = AuditLine("memory", "table", {"memory_bytes": cell("memory_bytes", "16")}, Inputs())
    (verdict,) = check([alone])
    assert (verdict.state, verdict.cause) == ("unchecked", ALONE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flops_per_sample": None}, "no FLOPs count"),
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


def row(rows: list[TimedLine], name: str) -> TimedLine:
    return next(row_ for row_ in rows if row_.line.name == name)


def test_a_sound_table_is_judged_by_what_it_prints():
    rows = with_step_times(table())
    assert [timed_line.consistent_step_times for timed_line in rows] == [None] * 4
    assert [timed_line.step_time_s for timed_line in rows] == [14.72, 14.73, 14.81, 14.89]


@pytest.mark.parametrize("text", ["14.65", "14.86", "41.72"])
def test_a_misprinted_step_time_is_the_odd_one_out(text: str):
    lines = table()
    lines[0] = with_cell(lines[0], "step_time_s", text)
    timed_line = row(with_step_times(lines), "n64")
    assert timed_line.agreeing_columns == ("tokens_per_s", "mfu", "days")
    assert timed_line.step_time_s == 14.72
    assert timed_line.speed and (
        timed_line.speed.interval.low,
        timed_line.speed.interval.high,
    ) == pytest.approx((14.715, 14.725))


def test_cells_taken_from_another_row_do_not_blame_the_step_time():
    lines = table()
    lines[3] = replace(
        lines[3], cells={**line(512, 14.81).cells, "step_time_s": cell("step_time_s", "14.89")}
    )
    timed_line = row(with_step_times(lines), "n512")
    assert timed_line.consistent_step_times is None and timed_line.step_time_s == 14.89


def test_cells_taken_from_a_row_above_whose_step_time_is_misprinted_are_so_too():
    lines = table()
    lines[2] = with_cell(lines[2], "step_time_s", "14.88")
    lines[3] = replace(
        lines[3], cells={**line(512, 14.81).cells, "step_time_s": cell("step_time_s", "14.89")}
    )
    rows = with_step_times(lines)
    assert row(rows, "n256").agreeing_columns and not row(rows, "n512").agreeing_columns


def test_one_contradiction_is_not_enough():
    lines = table()
    lines[0] = with_cell(lines[0], "tokens_per_s", "70000")
    assert row(with_step_times(lines), "n64").consistent_step_times is None


def test_a_cell_that_follows_speaks_for_the_step_time():
    lines = table()
    halved = line(64, 2 * 14.72)
    lines[0] = replace(
        lines[0],
        cells={
            **halved.cells,
            "step_time_s": cell("step_time_s", "14.72"),
            "mfu": lines[0].cells["mfu"],
        },
    )
    assert row(with_step_times(lines), "n64").consistent_step_times is None


def test_another_input_is_preferred_where_it_explains_all():
    lines = [
        replace(neat, cells={c: neat.cells[c] for c in ("step_time_s", "tokens_per_s", "days")})
        for neat in table()
    ]
    halved = line(64, 2 * 14.72).cells
    lines[0] = replace(
        lines[0],
        cells={**lines[0].cells, "tokens_per_s": halved["tokens_per_s"], "days": halved["days"]},
    )
    assert row(with_step_times(lines), "n64").consistent_step_times is None


def with_flops(line: AuditLine) -> AuditLine:
    """The line with tokens/s, MFU and TFLOP/s, and no step time printed."""
    how = relation("flops_per_s_per_device", line.inputs)
    tokens = relation("tokens_per_s", line.inputs)
    assert how and tokens
    t = tokens.coefficient.middle / line.cells["tokens_per_s"].value
    tera = replace(cell("flops_per_s_per_device", f"{how.at(t) / 1e12:.1f}"), unit=1e12)
    kept = {c: line.cells[c] for c in ("tokens_per_s", "mfu")}
    return replace(line, cells={**kept, "flops_per_s_per_device": tera})


def test_flops_alone_speak_against_the_speed_only_where_their_count_is_sound():
    sound = [with_flops(line(num, 14.7 + num / 1000)) for num in (8, 16, 32, 64, 128)]
    assert [timed_line.consistent_step_times for timed_line in with_step_times(sound)] == [None] * 5
    one_wrong = [with_cell(sound[0], "tokens_per_s", "8955"), *sound[1:]]
    assert row(with_step_times(one_wrong), "n8").agreeing_columns == (
        "mfu",
        "flops_per_s_per_device",
    )
    all_wrong = [
        with_cell(right, "tokens_per_s", f"{1.07 * right.cells['tokens_per_s'].value:.0f}")
        for right in sound
    ]
    assert [timed_line.consistent_step_times for timed_line in with_step_times(all_wrong)] == [
        None
    ] * 5


def test_neighbours_are_named_nearest_first_and_once_a_time():
    rows = with_step_times([*table(), line(8, 14.72, table="other")])
    step_times = other_step_times(row(rows, "n256"), rows)
    assert list(step_times) == ["n128", "n512", "n64"]
    assert step_times["n64"] == 14.72


def test_a_row_without_a_speed_takes_its_twins():
    twin = line(64, 14.72)
    bare = replace(twin, name="claim", cells={"mfu": twin.cells["mfu"]}, twin=twin)
    timed_line = row(with_step_times([twin, bare]), "claim")
    assert timed_line.column is None and timed_line.step_time_s == 14.72
