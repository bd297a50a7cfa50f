"""Two cells that contradict the printed step time together blame it, not themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.audit.cells.agreement import AuditLine, TimedLine, other_step_times, timed
from paceline.audit.cells.derivation import relation
from tests.engines.log_reading.lines_example import cell, line, table, with_cell


def row(rows: list[TimedLine], name: str) -> TimedLine:
    return next(row_ for row_ in rows if row_.line.name == name)


def test_a_sound_table_is_judged_by_what_it_prints():
    rows = timed(table())
    assert [timed_line.meant for timed_line in rows] == [None] * 4
    assert [timed_line.step_time_s for timed_line in rows] == [14.72, 14.73, 14.81, 14.89]


@pytest.mark.parametrize("text", ["14.65", "14.86", "41.72"])
def test_a_misprinted_step_time_is_the_odd_one_out(text: str):
    lines = table()
    lines[0] = with_cell(lines[0], "step_time_s", text)
    timed_line = row(timed(lines), "n64")
    assert timed_line.agreeing == ("tokens_per_s", "mfu", "days")
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
    timed_line = row(timed(lines), "n512")
    assert timed_line.meant is None and timed_line.step_time_s == 14.89


def test_cells_taken_from_a_row_above_whose_step_time_is_misprinted_are_so_too():
    lines = table()
    lines[2] = with_cell(lines[2], "step_time_s", "14.88")
    lines[3] = replace(
        lines[3], cells={**line(512, 14.81).cells, "step_time_s": cell("step_time_s", "14.89")}
    )
    rows = timed(lines)
    assert row(rows, "n256").agreeing and not row(rows, "n512").agreeing


def test_one_contradiction_is_not_enough():
    lines = table()
    lines[0] = with_cell(lines[0], "tokens_per_s", "70000")
    assert row(timed(lines), "n64").meant is None


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
    assert row(timed(lines), "n64").meant is None


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
    assert row(timed(lines), "n64").meant is None


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
    assert [timed_line.meant for timed_line in timed(sound)] == [None] * 5
    one_wrong = [with_cell(sound[0], "tokens_per_s", "8955"), *sound[1:]]
    assert row(timed(one_wrong), "n8").agreeing == ("mfu", "flops_per_s_per_device")
    all_wrong = [
        with_cell(right, "tokens_per_s", f"{1.07 * right.cells['tokens_per_s'].value:.0f}")
        for right in sound
    ]
    assert [timed_line.meant for timed_line in timed(all_wrong)] == [None] * 5


def test_neighbours_are_named_nearest_first_and_once_a_time():
    rows = timed([*table(), line(8, 14.72, table="other")])
    step_times = other_step_times(row(rows, "n256"), rows)
    assert list(step_times) == ["n128", "n512", "n64"]
    assert step_times["n64"] == 14.72


def test_a_row_without_a_speed_takes_its_twins():
    twin = line(64, 14.72)
    bare = replace(twin, name="claim", cells={"mfu": twin.cells["mfu"]}, twin=twin)
    timed_line = row(timed([twin, bare]), "claim")
    assert timed_line.column is None and timed_line.step_time_s == 14.72
