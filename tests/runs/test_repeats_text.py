"""Text about a group of repeats: run-to-run spread and failures."""

from __future__ import annotations

from pathlib import Path

from paceline.compare.over_time.repeats import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.result import Result
from paceline.runs.outcome import evaluate
from paceline.runs.repeats_text import (
    changes_text,
    group_lines,
    group_rows,
    run_text,
    series_lines,
)
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


def test_the_text_has_the_median_its_interval_and_every_run(tmp_path: Path):
    text = "\n".join(group_lines(group(results(tmp_path, 0.2, 0.21, 0.204))))
    assert "g: 3 of 3 repeats" in text and "median of 3 runs; run-to-run 95%" in text
    assert "tokens/s  ± " in text and "run-to-run spread 2." in text
    assert "each 0.2000 0.2100 0.2040 s" in text


def test_two_runs_have_no_interval_and_say_what_it_takes(tmp_path: Path):
    text = "\n".join(group_lines(group(results(tmp_path, 0.2, 0.21))))
    assert "no interval: 3 runs are needed" in text and "±" not in text


def test_a_failed_repeat_is_told_with_its_reason(tmp_path: Path):
    runs = [*results(tmp_path, 0.2), failed(tmp_path)]
    text = "\n".join(group_lines(group(runs, faults=("disk: is full",))))
    assert "1 of 3 repeats, 1 failed" in text
    assert "run 2 failed: rank 1 was killed" in text and "\x1b" not in text
    assert "no run: disk: is full" in text


def test_warnings_of_single_runs_are_counted_and_one_is_told(tmp_path: Path):
    runs = results(tmp_path, 0.2, 0.21)
    runs[1] = runs[1].model_copy(update={"warnings": ("the cores were busy", "and hot")})
    text = "\n".join(group_lines(group(runs)))
    assert "1 of 2 runs with warnings, the last: the cores were busy" in text


def test_a_group_without_any_figure_has_no_figures_in_its_text(tmp_path: Path):
    text = "\n".join(group_lines(group([failed(tmp_path)])))
    assert "0 of 3 repeats" in text and "median" not in text and "each" not in text


def test_the_series_says_how_to_compare_and_how_to_go_on(tmp_path: Path):
    whole = group(results(tmp_path, 0.2), num_repeats=1)
    assert list(series_lines(SeriesResult(groups=(whole,))))[-1].startswith(
        "compare: paceline compare g OTHER"
    )
    pair = SeriesResult(
        groups=(whole, whole),
        compare="paceline compare a b",
        interrupted=True,
        resume="paceline run --resume a",
    )
    assert list(series_lines(pair))[-3:] == [
        "interrupted: finished runs are kept",
        "compare: paceline compare a b",
        "run what is missing: paceline run --resume a",
    ]


def test_many_differences_are_told_in_one_line():
    assert changes_text(("a=1", "b=2")) == "a=1, b=2"
    assert changes_text(tuple(f"k{i}=1" for i in range(9))) == "k0=1, k1=1, k2=1, k3=1 and 5 more"


def test_a_finished_repeat_is_told_in_a_few_words(tmp_path: Path):
    (run,) = results(tmp_path, 0.2)
    assert run_text(run).startswith("ok · 0.2000 s · ")
    assert run_text(failed(tmp_path)).endswith("rank 1 was killed")


def test_rows_have_every_run_and_the_median(tmp_path: Path):
    rows = group_rows(SeriesResult(groups=(group(results(tmp_path, 0.2, 0.21, 0.204)),)))
    assert [row["repeat"] for row in rows] == ["1", "2", "3", "median"]
    assert rows[-1]["step_time_s"] == sorted(row["step_time_s"] for row in rows[:3])[1]
    assert rows[-1]["n"] == 3 and rows[0]["n"] >= 5


def test_a_group_of_padded_samples_is_told_in_samples(tmp_path: Path):
    runs = [
        run.model_copy(update={"headline": "samples_per_s"}) for run in results(tmp_path, 0.2, 0.21)
    ]
    lines = list(group_lines(group(runs)))
    assert "samples/s" in lines[1] and "samples/s" in run_text(runs[0])
