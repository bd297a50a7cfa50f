"""Sides are found by name, files are read, and references judge as `run` itself does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.compare.judge import judge, single_run_verdict
from paceline.compare.published import (
    compare_with_references,
    nearest_row,
    published_side,
    resolution,
    row_comparability,
    row_facts,
    rows_with_step_time,
)
from paceline.compare.sides import ComparedRun, ComparisonSide
from paceline.core.errors import UserError
from paceline.core.result import WindowRecord
from paceline.core.run import RunSettings
from paceline.files import references
from paceline.runs.comparison import (
    ComparisonOptions,
    compare_runs,
    compare_with_reference,
    parse_margin,
)
from paceline.runs.comparison_inputs import find_side
from paceline.runs.outcome import evaluate
from tests.compare.members import metrics_at
from tests.example import make_spec
from tests.files.test_events import START
from tests.runs.example import write_repeats, write_run

ROW = references.row("opt-13b-8")
WINDOW = WindowRecord(rule="auto", first_step=5, last_step=60, n=56, n_warmup=4, state="steady")


def test_a_tag_a_name_and_a_list_are_sides(tmp_path: Path):
    write_repeats(tmp_path, "before", 3)
    folder = write_run(tmp_path, "2026-01-02-one")
    assert len(find_side(tmp_path, "before").members) == 3
    assert [m.name for m in find_side(tmp_path, str(folder)).members] == ["2026-01-02-one"]
    both = find_side(tmp_path, " before , 2026-01-02-one,before")
    assert len(both.members) == 4 and both.name == " before , 2026-01-02-one,before"
    with pytest.raises(UserError, match="is not in"):
        find_side(tmp_path, "no-such-run")
    with pytest.raises(UserError):
        find_side(tmp_path, ",")
    many = ",".join(["2026-01-02-one"] * 400)
    assert len(find_side(tmp_path, many).members) == 1
    with pytest.raises(UserError, match="is not in"):
        find_side(tmp_path, "x" * 5000 + ".json")


def test_the_hosts_of_a_run_are_those_of_its_ranks(tmp_path: Path):
    folder = write_run(tmp_path, "run", inventory='{"host": "login-1"}')
    (member,) = find_side(tmp_path, str(folder)).members
    assert member.hosts == (START["host"],) and START["host"] != "login-1"


def test_runs_of_the_same_name_in_two_places_are_two_runs(tmp_path: Path):
    first, second = (write_run(tmp_path / place, "run") for place in "ab")
    judged = compare_runs(tmp_path, str(first), str(second), ComparisonOptions())
    assert not any("both sides" in reason for reason in judged.why_low)
    assert len(find_side(tmp_path, f"{first},{second}").members) == 2


def test_repeats_are_judged_from_their_folders(tmp_path: Path):
    write_repeats(tmp_path, "before", 3, torch="2.12.0")
    write_repeats(tmp_path, "after", 3, change=0.03)
    judged = compare_runs(tmp_path, "before", "after", ComparisonOptions())
    assert (judged.verdict, judged.confidence) == ("slower", "normal")
    assert judged.ratio == pytest.approx(1.03, abs=0.002)
    assert any("torch 2.12.0 -> 2.13.0" in cause for cause in judged.causes)
    lenient = compare_runs(tmp_path, "before", "after", ComparisonOptions(margin=0.05))
    assert lenient.verdict == "same"


def test_an_unfinished_repeat_is_left_out_by_name(tmp_path: Path):
    write_repeats(tmp_path, "before", 3)
    write_repeats(tmp_path, "after", 3)
    write_run(tmp_path, "2026-01-03-after-x", tag="after", steps=3)
    judged = compare_runs(tmp_path, "before", "after", ComparisonOptions())
    assert judged.n_b == 3 and "2026-01-03-after-x: 3 steady steps" in judged.warnings[0]


def test_a_result_file_is_a_side(tmp_path: Path):
    folder = write_run(tmp_path, "run")
    text = evaluate(folder).result.model_dump_json()
    (folder / "result.json").write_text(text)
    copy = tmp_path / "kept.json"
    copy.write_text(text)
    assert find_side(tmp_path, str(folder / "result.json")).members[0].facts.model is not None
    alone = find_side(tmp_path, str(copy)).members[0]
    copy.rename(copy := tmp_path / "kept, as it was.json")
    assert len(find_side(tmp_path, str(copy)).members) == 1
    assert alone.facts.model is None and alone.metrics["step_time_s"].value
    judged = compare_runs(tmp_path, str(copy), str(copy), ComparisonOptions())
    assert "model" in judged.unknown_keys and judged.confidence == "low"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run": 1}', "[" * 100_000, '{"file": "x"}'])
def test_a_file_that_is_no_result_is_the_users_error(tmp_path: Path, text: str):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        find_side(tmp_path, str(path))


def test_what_parse_prints_is_a_side(tmp_path: Path):
    log = {
        "file": "a.log",
        "engine": "megatron",
        "status": "ok",
        "n_steps": 50,
        "settings": {"origin": "imported", "seq_len": 2048},
        "window": {
            "rule": "auto",
            "first_step": 5,
            "last_step": 50,
            "n": 46,
            "n_warmup": 4,
            "state": "steady",
            "global_batch": 512,
        },
        "metrics": {"step_time_s": {"value": 29.0, "unit": "s", "n": 46}},
    }
    path = tmp_path / "logs.json"
    path.write_text(json.dumps([log, {**log, "file": "b.log", "status": "empty", "metrics": {}}]))
    good, bad = find_side(tmp_path, str(path)).members
    assert (good.facts.global_batch, good.usable, bad.usable) == (512, True, False)
    assert bad.why_not.startswith("b.log: ")


@pytest.mark.parametrize(
    ("text", "margin"),
    [("1%", 0.01), (" 2.5% ", 0.025), ("0.01", 0.01), ("0", 0.0), ("3e-3", 0.003)],
)
def test_a_margin_is_per_cent_or_a_fraction(text: str, margin: float):
    assert parse_margin(text) == pytest.approx(margin)


@pytest.mark.parametrize("text", ["1", "", "%", "-1%", "60%", "nan", "inf%", "1%%", "one", "1%x"])
def test_what_is_no_margin_is_refused(text: str):
    with pytest.raises(UserError, match="is not a margin"):
        parse_margin(text)


def test_unknown_keys_and_metrics_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'dtype'"):
        ComparisonOptions(allowed=("dtyp",))
    with pytest.raises(UserError, match="did you mean 'step_time_s'"):
        ComparisonOptions(metrics=("step_time",))


def run_like(row: references.Row, step_time_s: float, n: int = 1) -> ComparisonSide:
    """n runs exactly as a row was measured, at this mean step time."""
    facts = row_facts(row)
    layout = facts.layout and facts.layout.model_copy(update={"schedule": "1f1b"})
    facts = facts.model_copy(update={"layout": layout, "data": "text", "profiled": False})
    runs = [
        ComparedRun(
            f"run-{i}",
            "ok",
            facts,
            metrics_at(step_time_s * (1 + 0.001 * i), jitter=0.0),
            window=WINDOW,
        )
        for i in range(n)
    ]
    return ComparisonSide("mine", tuple(runs))


@pytest.mark.parametrize(
    ("row", "half_digit"),
    [
        ("1b3-32gb-tp1-pp1-mbs1", 0.5 / 29),
        ("opt-13b-1", 0.5 / 9),
        ("llama31-70b-fp8-64", 0.005 / 11.01),
    ],
)
def test_a_reference_is_known_to_half_its_last_digit(row: str, half_digit: float):
    assert resolution(references.row(row)) == pytest.approx(half_digit)


def test_a_reference_printed_in_whole_numbers_widens_the_margin():
    row = references.row("opt-13b-1")
    assert row.step_time_s is not None
    within, beyond = (
        judge(published_side(row), run_like(row, row.step_time_s * factor, n=3))
        for factor in (1.05, 1.08)
    )
    assert (within.verdict, beyond.verdict) == ("same", "slower")
    assert within.resolution == pytest.approx(0.0556, abs=1e-3)
    assert any("widens the margin" in note for note in within.notes)
    assert (within.n_a, within.n_b, within.baseline.kind) == (3, 1, "reference")


def test_three_runs_against_a_reference_are_a_test():
    row = references.row("llama31-70b-fp8-64")
    judged = judge(published_side(row), run_like(row, (row.step_time_s or 0) * 1.03, n=3))
    assert (judged.verdict, judged.confidence) == ("slower", "normal")
    assert judged.low is not None and judged.low > 1 and judged.n_a == 3
    assert any("does not state" in note for note in judged.notes)


@pytest.mark.parametrize("factor", [0.9, 0.97, 0.995, 1.0, 1.02, 1.05, 1.07, 1.2])
@pytest.mark.parametrize("row_id", ["opt-13b-1", "llama31-70b-fp8-64"])
def test_a_runs_own_verdict_is_that_of_compare_against(row_id: str, factor: float):
    row = references.row(row_id)
    side = run_like(row, (row.step_time_s or 0.0) * factor)
    run = side.members[0]
    rates = {
        name: metric.model_copy(update={"value": 1 / (run.metrics["step_time_s"].value or 1)})
        for name, metric in run.metrics.items()
        if name.startswith("tokens")
    }
    batch, seq_len = row.global_batch or 1, row.seq_len or 1
    rates["tokens_per_s"] = rates["tokens_per_s"].model_copy(
        update={"value": (rates["tokens_per_s"].value or 0) * batch * seq_len}
    )
    rates["samples_per_s"] = rates["tokens_per_s"].model_copy(
        update={"value": (rates["tokens_per_s"].value or 0) / seq_len}
    )
    verdict = single_run_verdict(
        "ok", None, WINDOW, compare_with_references(run.facts, (row_id,), {**run.metrics, **rates})
    )
    theirs = judge(published_side(row), side)
    assert verdict.kind == {"same": "pass"}.get(theirs.verdict, theirs.verdict)
    assert ("suspiciously fast" in verdict.sentence) == (theirs.too_good is not None)


def test_the_nearest_row_has_the_fewest_differences():
    rows = rows_with_step_time(references.find_rows("lambda-1cc-opt-13b"))
    like = row_facts(ROW).model_copy(update={"profiled": False, "data": "text"})
    assert nearest_row(rows, [like], ()).id == ROW.id
    assert row_comparability(ROW, [like]).keys == ()
    tiny = RunSettings(device="cpu", num_devices=2)
    assert "model" in row_comparability(nearest_row(rows, [tiny], ()), [tiny]).keys


def test_a_run_without_published_rows_is_told_so(tmp_path: Path):
    write_run(tmp_path, "run")
    judged = compare_with_reference(tmp_path, "run", "reference", ComparisonOptions())
    assert judged.verdict == "not comparable" and "model" in judged.differing_keys
    assert any("no published row" in note for note in judged.notes)
    with pytest.raises(UserError, match="is unknown"):
        compare_with_reference(tmp_path, "run", "no-such-table", ComparisonOptions())


def test_the_spec_of_a_run_decides_what_is_comparable(tmp_path: Path):
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", spec=make_spec(ranks=4))
    judged = compare_runs(tmp_path, "a", "b", ComparisonOptions())
    assert judged.differing_keys == ("num_devices", "global_batch")
    allowed = compare_runs(tmp_path, "a", "b", ComparisonOptions(allowed=("num_devices",)))
    assert allowed.metric == "tokens_per_s_per_device"
