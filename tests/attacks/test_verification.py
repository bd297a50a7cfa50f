"""Bundles whose derived files do not follow from their raw files: every value is found."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runs.bundles.verification import BundleCheck, check_bundle
from paceline.runs.bundles.writing import write_bundle
from paceline.runs.flow import finish
from paceline.runs.recomputation import Recomputation, recompute
from tests.attacks.fields import RUNS
from tests.command import paceline

GOOD = "2026-01-15-tiny-llama-good-dp2-2xcpu-7a10b1a2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all files that its end writes."""
    root = tmp_path_factory.mktemp("runs")
    folder = Path(shutil.copytree(RUNS / GOOD, root / GOOD))
    finish(folder, root)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / GOOD))


@pytest.fixture
def without_page(run: Path) -> Path:
    """The run without its page, which takes a second to draw."""
    (run / "report.html").unlink()
    return run


def bundled(folder: Path) -> BundleCheck:
    """What `verify` says of a bundle whose digests are those of the changed files."""
    path, _ = write_bundle(folder, folder.with_name("forged.tar.gz"))
    return check_bundle(path)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "result.json"
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))


def test_the_run_itself_is_confirmed_as_a_whole(run: Path) -> None:
    check = bundled(run)
    assert (check.verdict, check.differences, check.unchecked_parts) == ("intact", (), ())
    assert check.n_values > 1000
    assert {"steps/", "run.json", "inventory.json"} <= set(check.raw_files)


def speed(**fields: str) -> Callable[[dict[str, Any]], object]:
    return lambda result: result["metrics"]["tokens_per_s"].update(fields)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "metrics.tokens_per_s.unit": speed(unit="tokens/ms"),
    "metrics.tokens_per_s.convention": lambda r: r["metrics"]["tokens_per_s"].update(
        convention="x"
    ),
    "metrics.tokens_per_s.statistic": lambda r: r["metrics"]["tokens_per_s"].update(
        statistic="max"
    ),
    "metrics.tokens_per_s.source": speed(source="us"),
    "window.n_warmup": lambda r: r["window"].update(n_warmup=0),
    "warnings[0]": lambda r: r.update(warnings=[]),
    "ranks[1].host": lambda r: r["ranks"][1].update(host="other"),
    "memory.limit_bytes": lambda r: r["memory"].update(limit_bytes=1.0),
    "num_parameters": lambda r: r.update(num_parameters=8_000_000_000),
    "steps_done": lambda r: r.update(steps_done=1000),
    "recipe": lambda r: r.update(recipe="llama31-8b"),
    "run": lambda r: r.update(run="another"),
    "versions.torch": lambda r: r["versions"].pop("torch"),
    "verdict.comment": lambda r: r["verdict"].update(comment="audited"),
    "audited": lambda r: r.update(audited=True),
    "metrics": lambda r: r.update(metrics=None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_added_or_removed_value_is_named(without_page: Path, name: str) -> None:
    edit(without_page, CHANGES[name])
    check = bundled(without_page)
    assert check.verdict == "values differ"
    assert [each.document for each in check.differences] == ["result.json"]
    assert [each.field for each in check.differences] == [name]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*path, key))


def test_no_value_of_a_result_can_change_or_go_unseen(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    paths = list(leaves(result))
    assert len(paths) > 200
    for *parents, key in paths:
        for other in ("changed", None):
            forged = copy.deepcopy(result)
            place = forged
            for parent in parents:
                place = place[parent]
            if other is None:
                del place[key]
            elif isinstance(place[key], int | float):
                place[key] = place[key] * (1 + 1e-6) + 1e-6
            else:
                place[key] = other
            outcome = Recomputation()
            outcome.compare("result.json", forged, result)
            assert outcome.differences, (parents, key, other)


def test_the_last_digit_that_another_cpu_rounds_is_no_difference() -> None:
    outcome = Recomputation()
    outcome.compare("x", {"a": [0.1 + 0.2]}, {"a": [0.3]})
    outcome.compare("x", {"a": True}, {"a": True})
    assert not outcome.differences
    outcome.compare("x", {"a": 1}, {"a": True})
    outcome.compare("x", {"a": 10**400}, {"a": 1.0})
    assert len(outcome.differences) == 2


def test_a_value_without_its_secret_is_listed_as_not_checked(without_page: Path) -> None:
    edit(without_page, lambda result: result["versions"].update(torch="(redacted)"))
    outcome = recompute(without_page)
    assert not outcome.differences
    assert [each.path for each in outcome.unchecked_parts] == ["result.json: versions.torch"]


def changed_text(path: Path, old: str, new: str) -> None:
    text, count = re.subn(old, new, path.read_text(), count=1)
    assert count, (path, old)
    path.write_text(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'<p class="big">[0-9,]+', '<p class="big">99,999'),
        (r"<title>tiny-llama", "<title>llama31-8b"),
        (r"</header>", '<p class="sentence">Audited.</p></header>'),
        (r'<section class="panel prose alerted"', '<section hidden class="panel prose alerted"'),
        (r"<p class=\"notes\">spikes[^<]*</p>", ""),
        (r'aria-label="step: 7; [^"]*"', 'aria-label="step: 7; step time: 0.01 s"'),
        (r"color-scheme: light dark;", "color-scheme: light dark; color: white;"),
        (r"</main>", '<section class="panel" id="more"><p>Signed.</p></section></main>'),
    ],
)
def test_a_page_that_states_something_else_is_found(run: Path, old: str, new: str) -> None:
    changed_text(run / "report.html", old, new)
    differences = recompute(run).differences
    assert differences and {each.document for each in differences} == {"report.html"}


def test_a_chart_with_other_shapes_is_listed_as_not_checked(run: Path) -> None:
    changed_text(run / "report.html", r'transform="translate\(\d+', 'transform="translate(999')
    outcome = recompute(run)
    assert not outcome.differences
    assert "shapes of the charts Step times" in outcome.unchecked_parts[0].path


def test_steps_of_all_ranks_together_are_compared(without_page: Path) -> None:
    changed_text(without_page / "steps.jsonl", r'"loss": [0-9.]+', '"loss": 0.5')
    fields = [(each.document, each.field) for each in recompute(without_page).differences]
    assert fields == [("steps.jsonl", "line 1.loss")]


def test_a_profile_of_a_run_without_a_profiler_is_found(without_page: Path) -> None:
    (without_page / "profile.json").write_text("{}")
    assert [each.document for each in recompute(without_page).differences] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{", "[" * 10**6, "[" * 900 + "]" * 900, "null"])
def test_a_damaged_result_is_one_difference(without_page: Path, text: str) -> None:
    (without_page / "result.json").write_text(text)
    assert len(recompute(without_page).differences) == 1


def test_the_file_list_states_the_status_of_the_run(
    without_page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.runs.bundles.writing.current_status", lambda record: "failed")
    assert [each.field for each in bundled(without_page).differences] == ["status"]


def test_no_list_believes_a_forged_result(without_page: Path) -> None:
    def faster(result: dict[str, Any]) -> None:
        result["metrics"]["step_time_s"]["value"] /= 10

    edit(without_page, faster)
    root = without_page.parent
    for words in (("list",), ("history", "tiny-llama")):
        done = paceline("runs", *words, runs=root)
        assert done.returncode == 0, done.stderr
        assert f"note: {GOOD}: result.json states step_time_s 0.00238" in done.stderr
        assert "but its raw files do not" in done.stderr
        assert "0.02387" in done.stdout and "0.002387" not in done.stdout
