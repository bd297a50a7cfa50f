"""Document of repeats: run-to-run spread, failures, and how to go on."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.compare.over_time.repeats import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.result import Result
from paceline.report.terminal import plain_text
from paceline.runs.outcome import evaluate
from paceline.runs.repeats_report import changes_text, run_text, series_document
from tests.runs.series_example import make_finished


def results(root: Path, *times: float) -> list[Result]:
    return [evaluate(make_finished(root, at, time)).result for at, time in enumerate(times)]


def group(runs: list[Result], num_repeats: int = 3, **fields: object) -> GroupResult:
    ok = sum(map(has_figure, runs))
    return GroupResult.model_validate(
        {
            "group": "g",
            "recipe": "example",
            "key": "k",
            "num_repeats": num_repeats,
            "ok": ok,
            "failed": len(runs) - ok,
            "runs": runs,
            "figures": group_figures(runs),
            **fields,
        }
    )


def failed(root: Path) -> Result:
    result = evaluate(make_finished(root, 90, 0.2, status="failed")).result
    return result.model_copy(update={"reason": "rank 1\x1b[2J was killed"})


def text_of(*groups: GroupResult, **fields: object) -> str:
    series = SeriesResult.model_validate({"groups": groups, **fields})
    return plain_text(series_document(series))


def test_a_group_shows_its_median_with_interval_and_every_run(tmp_path: Path):
    text = text_of(group(results(tmp_path, 0.2, 0.21, 0.204)))
    assert "g: 3 of 3 repeats" in text
    assert re.search(r"tokens/s  ± .* run-to-run 95% · median of 3 runs", text)
    assert re.search(r"g step +0\.2040 s +run-to-run spread 2\.", text)
    assert re.search(r"g +2 +ok +0\.2100 s", text)


def test_two_runs_have_no_interval(tmp_path: Path):
    text = text_of(group(results(tmp_path, 0.2, 0.21)))
    assert "no interval: 3 runs are needed" in text and "±" not in text


def test_a_failed_repeat_shows_its_reason(tmp_path: Path):
    text = text_of(group([*results(tmp_path, 0.2), failed(tmp_path)], faults=("disk: is full",)))
    assert "1 of 3 repeats, 1 failed" in text
    assert re.search(r"g +2 +failed .*rank 1 was killed", text) and "\x1b" not in text
    assert "no run: disk: is full" in text


def test_runs_with_warnings_are_counted(tmp_path: Path):
    runs = results(tmp_path, 0.2, 0.21)
    runs[1] = runs[1].model_copy(update={"warnings": ("the cores were busy", "and hot")})
    assert "1 of 2 runs with warnings, the last: the cores were busy" in text_of(group(runs))


def test_a_group_without_any_figure_says_so(tmp_path: Path):
    text = text_of(group([failed(tmp_path)]))
    assert "0 of 3 repeats" in text and "median" not in text
    assert "not known  no run has a figure" in text


def test_a_series_says_how_to_compare_and_resume(tmp_path: Path):
    whole = group(results(tmp_path, 0.2), num_repeats=1)
    assert "Compare with `paceline compare g OTHER`" in text_of(whole)
    text = text_of(
        whole,
        whole,
        compare="paceline compare a b",
        interrupted=True,
        resume="paceline run --resume a",
    )
    assert "The series was interrupted. Finished runs are kept." in text
    assert text.endswith(
        "  Compare them with `paceline compare a b`.\n"
        "  Run what is missing with `paceline run --resume a`.\n"
    )


def test_many_changes_fit_in_one_line():
    assert changes_text(("a=1", "b=2")) == "a=1, b=2"
    assert changes_text(tuple(f"k{i}=1" for i in range(9))) == "k0=1, k1=1, k2=1, k3=1 and 5 more"


def test_a_finished_repeat_in_a_few_words(tmp_path: Path):
    (run,) = results(tmp_path, 0.2)
    assert run_text(run).startswith("ok · 0.2000 s · ")
    assert "rank 1" in run_text(failed(tmp_path))


def test_csv_has_every_run_and_the_median(tmp_path: Path):
    series = SeriesResult(groups=(group(results(tmp_path, 0.2, 0.21, 0.204)),))
    table = series_document(series).csv_table()
    assert table is not None
    rows = table.rows
    assert [row["repeat"] for row in rows] == ["1", "2", "3", "median"]
    assert rows[-1]["step_time_s"] == sorted(row["step_time_s"] for row in rows[:3])[1]
    assert rows[-1]["n"] == 3 and rows[0]["n"] >= 5


def test_a_group_of_padded_samples_shows_samples_per_second(tmp_path: Path):
    runs = [
        run.model_copy(update={"headline": "samples_per_s"}) for run in results(tmp_path, 0.2, 0.21)
    ]
    assert re.search(r"^  g .*samples/s", text_of(group(runs)), re.M)
    assert "samples/s" in run_text(runs[0])
