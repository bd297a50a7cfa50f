"""The history of a recipe: comparable runs in time order, their changes and what came along."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.compare.over_time.step_changes import History, RunSeries
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Result
from paceline.core.run import RunSettings
from paceline.files.documents import read_value, write_value
from paceline.files.run_folder import (
    INVENTORY_FILE,
    RESULT_FILE,
    RUN_FILE,
    read_record,
    run_folders,
)
from paceline.runs import history
from paceline.runs.history import find_recipe_name, recipe_history
from paceline.runs.outcome import evaluate
from tests.example import make_spec
from tests.runs.series_example import around, make_finished, make_many

OLD, NEW = around(0.2, 8, seed=1), around(0.206, 7, seed=2)
DRIVER: dict[str, Any] = {"gpus": [{"name": "H100", "driver": "550.54"}]}
NEW_DRIVER: dict[str, Any] = {"gpus": [{"name": "H100", "driver": "560.35"}]}


def history_of(root: Path, **options: Any) -> History:
    return recipe_history("example", run_folders(root), **options)


def only(root: Path, **options: Any) -> RunSeries:
    (series,) = history_of(root, **options).series
    return series


def updated(root: Path, **after: Any) -> RunSeries:
    """The series of 8 runs before and 7 slower ones after, which were made with other fields."""
    make_many(root, OLD)
    for number, time in enumerate(NEW, start=8):
        make_finished(root, number, time, **after)
    return only(root)


def test_a_slowdown_is_dated_and_the_update_before_it_named(tmp_path: Path):
    series = updated(tmp_path, machine={"kernel": "6.8.0-45"})
    (change,) = series.changes
    assert change.date.startswith("2026-10-09") and change.date_before.startswith("2026-10-08")
    assert (change.n_before, change.n_after, change.worse) == (8, 7, True)
    assert change.low < change.ratio < change.high and change.ratio == pytest.approx(1.03, abs=0.01)
    assert change.new_level / change.old_level == pytest.approx(change.ratio)
    (item,) = change.environment
    assert (item.item, item.before, item.after) == ("kernel", "6.8.0-40", "6.8.0-45")
    assert item.only_here and change.environment_note is None
    assert change.first_after == series.points[8].runs[0]


def test_torch_is_named_as_the_ranks_told_it(tmp_path: Path):
    (change,) = updated(tmp_path, torch="2.14.0").changes
    assert [(e.item, e.before, e.after) for e in change.environment] == [
        ("torch", "2.13.0", "2.14.0")
    ]


def test_a_change_with_nothing_recorded_says_so(tmp_path: Path):
    (change,) = updated(tmp_path).changes
    assert change.environment == ()
    assert change.environment_note == "no recorded item changed"


def test_a_machine_that_was_not_recorded_is_no_unchanged_one(tmp_path: Path):
    make_many(tmp_path, [*OLD, *NEW])
    for folder in run_folders(tmp_path):
        (folder / INVENTORY_FILE).unlink()
    (change,) = only(tmp_path).changes
    assert change.environment_note == "the environment was not recorded on both sides"


def test_an_update_one_run_beside_the_step_is_named_as_such(tmp_path: Path):
    for number, time in enumerate([*OLD, *NEW]):
        make_finished(tmp_path, number, time, machine=NEW_DRIVER if number >= 9 else DRIVER)
    (change,) = only(tmp_path).changes
    assert [item.item for item in change.environment] == ["NVIDIA driver"]
    assert change.environment_note == "seen one value later"


def test_another_trainer_is_named(tmp_path: Path):
    for number, time in enumerate([*OLD, *NEW]):
        folder = make_finished(tmp_path, number, time)
        (folder / "trainer" / "measure").mkdir(parents=True)
        (folder / "trainer" / "measure" / "clock.py").write_text("new" if number >= 8 else "old")
    (change,) = only(tmp_path).changes
    assert [item.item for item in change.environment] == ["files of the trainer"]


def test_noise_has_no_change_and_says_what_could_be_found(tmp_path: Path):
    make_many(tmp_path, around(0.2, 20, seed=5))
    series = only(tmp_path)
    assert series.changes == () and series.drift is None
    assert series.noise == pytest.approx(0.004, rel=0.5)
    assert series.findable is not None and 0.01 < series.findable < 0.03


def test_a_rate_that_falls_is_worse_and_one_that_rises_is_not(tmp_path: Path):
    make_many(tmp_path, [*OLD, *NEW])
    (change,) = only(tmp_path, metric="tokens_per_s").changes
    assert change.worse is True and change.ratio < 1
    assert history_of(tmp_path, metric="tokens_per_s").slowdowns == 1
    for number, time in enumerate(OLD, start=15):
        make_finished(tmp_path, number, time)
    assert [c.worse for c in only(tmp_path).changes] == [True, False]
    assert history_of(tmp_path).slowdowns == 1


def test_a_slow_drift_is_named(tmp_path: Path):
    times = [t * (1 + 0.001 * day) for day, t in enumerate(around(0.2, 30, seed=3))]
    make_many(tmp_path, times)
    series = only(tmp_path)
    assert series.changes == () and series.drift is not None and series.drift.worse
    assert series.drift.low < 1.03 < series.drift.high
    assert history_of(tmp_path).slowdowns == 1


def test_the_order_is_that_of_time_and_not_of_names(tmp_path: Path):
    for number, time in enumerate([*OLD, *NEW]):
        make_finished(tmp_path, number, time, day=100 - number)
    dates = [point.date for point in only(tmp_path).points]
    assert dates == sorted(dates)
    assert only(tmp_path).changes[0].worse is False


def test_other_settings_are_another_series_and_named_by_what_differs(tmp_path: Path):
    make_many(tmp_path, OLD)
    zero = make_spec(ranks=1, layout=Layout(micro_batch=4, zero_stage=3))
    for number, time in enumerate(NEW, start=8):
        make_finished(tmp_path, number, time, spec=zero)
    first, second = history_of(tmp_path).series
    assert (first.n_runs, second.n_runs) == (8, 7) and first.key != second.key
    assert "zero_stage 0" in first.name and "zero_stage 3" in second.name
    assert first.changes == second.changes == ()


def test_what_a_series_is_always_named_by_is_told_once(tmp_path: Path):
    training = make_spec(ranks=1).training
    for number, seq_len in enumerate([32, 32, 64, 64]):
        spec = make_spec(ranks=1, training=training.model_copy(update={"seq_len": seq_len}))
        make_finished(tmp_path, number, 0.2, spec=spec)
    first, second = history_of(tmp_path).series
    assert "seq 32" in first.name and "seq 64" in second.name
    assert "seq_len" not in first.name + second.name


def test_another_kind_of_cpu_is_another_series(tmp_path: Path):
    make_many(tmp_path, OLD)
    spec = make_spec(ranks=1)
    cluster = spec.cluster.model_copy(update={"device_label": "Xeon"})
    for number, time in enumerate(NEW, start=8):
        make_finished(tmp_path, number, time, spec=spec.model_copy(update={"cluster": cluster}))
    assert [s.n_runs for s in history_of(tmp_path).series] == [8, 7]


def test_runs_without_a_figure_are_left_out_with_the_reason(tmp_path: Path):
    make_many(tmp_path, OLD)
    failed = make_finished(tmp_path, 20, 0.2, status="failed")
    torn = make_finished(tmp_path, 21, 0.2)
    (torn / RUN_FILE).write_text("{")
    history = history_of(tmp_path)
    assert history.left_out["ended as failed"] == (failed.name,)
    assert any("run.json" in reason for reason in history.left_out) and len(history.left_out) == 2
    assert history_of(tmp_path, metric="mfu").series == ()


def test_a_torn_result_is_computed_from_the_steps(tmp_path: Path):
    for folder in make_many(tmp_path, OLD):
        (folder / RESULT_FILE).write_text("{")
    assert [point.value for point in only(tmp_path).points] == pytest.approx(OLD, rel=1e-3)


def repeats(root: Path, times: list[float], per_day: int) -> None:
    """Groups of `per_day` repeats, one group a day."""
    for number, time in enumerate(times):
        day = number // per_day
        make_finished(root, number, time, day=day + number % per_day / 100, group=f"g{day}")


def test_repeats_of_one_day_count_as_one_value(tmp_path: Path):
    days = around(0.2, 8, seed=7, spread=0.01)
    repeats(tmp_path, [day * r for day in days for r in (0.9999, 1, 1.0001)], per_day=3)
    series = only(tmp_path)
    assert series.n_runs == 24 and len(series.points) == 8
    assert [point.value for point in series.points] == pytest.approx(days, rel=1e-3)
    assert series.changes == () and "median of each day's runs" in series.notes[0]


def test_untagged_runs_of_one_day_are_one_value_too(tmp_path: Path):
    days = around(0.2, 8, seed=7, spread=0.01)
    for number, (day, repeat) in enumerate((d, r) for d in range(8) for r in (-1, 0, 1)):
        time = days[day] * (1 + 0.0001 * repeat)
        make_finished(tmp_path, number, time, day=day + (repeat + 1) / 100)
    series = only(tmp_path)
    assert len(series.points) == 8 and series.changes == ()
    scatter = series.variation
    assert scatter is not None and (scatter.n_runs, scatter.n_occasions) == (24, 8)
    assert scatter.within < 0.0005 < 0.005 < scatter.between < 0.02


def test_two_groups_count_run_by_run_and_warn(tmp_path: Path):
    repeats(tmp_path, [*around(0.2, 5, 1, 0.001), *around(0.206, 5, 2, 0.001)], per_day=5)
    series = only(tmp_path)
    assert len(series.points) == 10 and [c.n_before for c in series.changes] == [5]
    assert "2 days" in series.notes[0]


@pytest.fixture
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported runs have a result and no log from which it could be computed."""

    def of_folder(folder: Path) -> Any:
        if read_record(folder).spec:
            return evaluate(folder)
        return SimpleNamespace(result=read_value(folder / RESULT_FILE, Result))

    monkeypatch.setattr(history, "evaluate", of_folder)


def imported(
    root: Path, number: int, time: float, facts: RunSettings, date: str | None = None
) -> Path:
    """A run that was not started here: no spec, only facts, and perhaps the date of its log."""
    folder = make_finished(root, number, time)
    record = read_record(folder).model_copy(update={"spec": None, "log_settings": facts})
    write_value(folder / RUN_FILE, record)
    result = read_value(folder / RESULT_FILE, Result)
    write_value(folder / RESULT_FILE, result.model_copy(update={"created": date}))
    return folder


def known_facts() -> RunSettings:
    return RunSettings.of(make_spec(ranks=1)).model_copy(update={"origin": "imported"})


@pytest.mark.usefixtures("no_logs")
def test_an_imported_log_with_all_facts_equal_stands_among_the_runs(tmp_path: Path):
    make_many(tmp_path, OLD)
    imported(tmp_path, 9, 0.2, known_facts())
    series = only(tmp_path)
    assert series.n_runs == 9 and any("dated by their import" in note for note in series.notes)


@pytest.mark.usefixtures("no_logs")
def test_an_imported_log_with_dates_has_its_own_place_in_time(tmp_path: Path):
    make_many(tmp_path, OLD)
    date = "2020-02-03T04:05:06+00:00"
    imported(tmp_path, 9, 0.2, known_facts(), date)
    series = only(tmp_path)
    assert series.points[0].date == date
    assert not any("dated by their import" in note for note in series.notes)


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize("change", [{"layout": None}, {"seq_len": 64}, {"engine": "nemo"}])
def test_an_imported_log_of_which_less_is_known_stands_apart(
    tmp_path: Path, change: dict[str, Any]
):
    make_many(tmp_path, OLD)
    imported(tmp_path, 9, 0.2, known_facts().model_copy(update=change))
    assert [series.n_runs for series in history_of(tmp_path).series] == [8, 1]


@pytest.mark.usefixtures("no_logs")
def test_imported_logs_with_the_same_gaps_are_one_series_that_says_so(tmp_path: Path):
    facts = known_facts().model_copy(update={"layout": None})
    for number, time in enumerate([*OLD, *NEW]):
        imported(tmp_path, number, time, facts)
    series = only(tmp_path)
    assert series.key is None and len(series.changes) == 1
    assert any("layout" in note and "assumed to be the same" in note for note in series.notes)


@pytest.mark.usefixtures("no_logs")
def test_whole_second_logs_have_no_step_of_one_second(tmp_path: Path):
    for number, time in enumerate([28.0] * 8 + [29.0] * 8):
        imported(tmp_path, number, time, known_facts())
    series = only(tmp_path)
    assert series.changes == () and any("round to 3.5" in note for note in series.notes)


@pytest.mark.usefixtures("no_logs")
def test_the_interval_of_a_step_in_rounded_logs_holds_what_rounding_leaves_open(tmp_path: Path):
    for number, time in enumerate([28.0] * 8 + [31.0] * 8):
        imported(tmp_path, number, time, known_facts())
    (change,) = only(tmp_path).changes
    assert change.low < 30.5 / 28.5 and change.high > 31.5 / 27.5


@pytest.mark.usefixtures("no_logs")
def test_a_profiled_run_is_left_out(tmp_path: Path):
    imported(tmp_path, 1, 0.2, known_facts().model_copy(update={"profiled": True}))
    assert list(history_of(tmp_path).left_out) == ["were profiled"]


def test_a_metric_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="did you mean 'step_time_s'"):
        recipe_history("example", [], "step_tim_s")


def test_a_recipe_without_runs_is_refused_with_those_that_have_some():
    with pytest.raises(UserError, match="allowed: tiny-gpt, tiny-llama; did you mean"):
        find_recipe_name("tiny-lama", ["tiny-llama", "tiny-gpt", "tiny-llama"])


def test_a_recipe_is_named_by_its_file_as_well(tmp_path: Path):
    from paceline.files.recipe import recipe_path

    file = tmp_path / "copy.yaml"
    file.write_text(recipe_path("tiny-llama").read_text())
    assert find_recipe_name(str(file), ["tiny-llama"]) == "tiny-llama"


def test_the_history_is_strict_json(tmp_path: Path):
    make_many(tmp_path, [*OLD, *NEW])
    text = history_of(tmp_path).model_dump_json()
    document = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
    assert document["series"][0]["changes"][0]["worse"] is True
