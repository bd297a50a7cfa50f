"""How a run ended is read from its files: the ranks' last words first, the exit code second."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.compare.published import compare_with_references
from paceline.core.hardware import Cluster
from paceline.core.result import Metric
from paceline.core.run import RunSettings
from paceline.files import catalog
from paceline.files.documents import write_value
from paceline.files.recipe import load_recipe, resolve
from paceline.files.run_folder import RUN_FILE, Controller, boot_id
from paceline.report.run_description import progress
from paceline.runs.ending import log_tail
from paceline.runs.outcome import evaluate
from tests.example import make_spec, noisy
from tests.files.rank_files import step_times, write_ranks
from tests.files.test_events import lines
from tests.files.test_run_folder import make_record


def make_folder(tmp_path: Path, n: int, status: str = "ok", **fields: object) -> Path:
    folder = tmp_path / "run"
    write_value(folder / RUN_FILE, make_record(status, name="run", **fields))  # type: ignore[arg-type]
    own = {rank: {"steps": step_times(noisy(n, seed=rank))} for rank in range(2)}
    write_ranks(folder, make_spec(), [], changes=own, ended=status == "ok")
    return folder


def test_a_finished_folder_gives_figures(tmp_path: Path):
    result = evaluate(make_folder(tmp_path, 40)).result
    assert result.status == "ok" and result.steps_done == 40
    assert result.metrics["tokens_per_s"].value == pytest.approx(256 / 0.2, rel=0.05)
    assert len(result.ranks) == 2


def test_too_few_steps_are_a_status_and_not_a_number(tmp_path: Path):
    result = evaluate(make_folder(tmp_path, 4)).result
    assert result.status == "incomplete" and result.metrics == {}
    assert result.reason is not None and "at least 5" in result.reason


def test_a_killed_controller_leaves_a_readable_folder(tmp_path: Path):
    gone = Controller(pid=2**22 - 1, boot_id="before", started_unix=1.0, host="")
    import os

    gone = gone.model_copy(update={"host": os.uname().nodename, "boot_id": boot_id()})
    result = evaluate(make_folder(tmp_path, 30, "running", controller=gone)).result
    assert result.status == "incomplete" and result.steps_done == 30
    assert result.verdict.kind == "invalid"


def test_a_disk_that_was_full_is_the_cause_that_nobody_could_write_down(tmp_path: Path):
    gone = Controller(pid=2**22 - 1, boot_id="before", started_unix=1.0, host=os.uname().nodename)
    folder = make_folder(tmp_path, 30, "running", controller=gone)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-00001.log").write_text(f"OSError: [Errno 28] {os.strerror(28)}\n")
    result = evaluate(folder).result
    assert (result.status, result.steps_done) == ("incomplete", 30)
    assert result.reason is not None
    assert result.reason.endswith("log ends with: OSError: [Errno 28] No space left on device")


def test_a_folder_without_steps_is_readable(tmp_path: Path):
    folder = tmp_path / "run"
    write_value(folder / RUN_FILE, make_record("failed", name="run", reason="no torch"))
    result = evaluate(folder).result
    assert (result.status, result.reason, result.metrics) == ("failed", "no torch", {})


FIGURES = {
    "samples_per_s": Metric(value=990.0, unit="samples/s"),
    "jitter_overhead": Metric(value=0.1, unit="fraction"),
}


def test_a_run_like_the_published_one_is_compared_with_it():
    cluster = Cluster(
        name="c", device=catalog.find_device("H100").device.name, nodes=1, devices_per_node=8
    )
    spec = resolve(load_recipe("opt-350m-sft"), cluster, True, None)
    comparisons = compare_with_references(RunSettings.of(spec), spec.references, FIGURES)
    assert comparisons[0].comparable and comparisons[0].ratio == pytest.approx(900 / 943, abs=0.001)
    assert not any(c.comparable for c in comparisons[1:])
    assert comparisons[0].statistic == "mean"
    smaller = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": 2})})
    changed = compare_with_references(RunSettings.of(smaller), smaller.references, FIGURES)
    assert not any(c.comparable for c in changed) and "model" in (changed[0].why_not or "")
    assert comparisons[1].why_not is not None and "devices" in comparisons[1].why_not


def test_merged_json_is_strict(tmp_path: Path):
    result = evaluate(make_folder(tmp_path, 20)).result
    json.loads(result.model_dump_json(), parse_constant=lambda c: pytest.fail(f"{c} in JSON"))


def test_the_tail_tells_the_error_without_the_stack(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.log").write_text(
        "step 1\nTraceback (most recent call last):\n"
        '  File "/a/main.py", line 3, in main\n    train()\n    ^^^^^^^\nValueError: too small\n'
    )
    assert log_tail(tmp_path) == ["step 1", "ValueError: too small"]


def with_checkpoints(folder: Path, every: int, first_step: int = 1) -> Path:
    """The folder with a checkpoint wait in every `every`th step."""
    for path in (folder / "steps").glob("*.jsonl"):
        start, *steps, end = map(json.loads, path.read_text().splitlines())
        for step in steps:
            step["step"] += first_step - 1
            if step["step"] % every == 0:
                step["checkpoint_s"] = 0.1
                step["step_time_s"] += 0.1
        path.write_text("".join(lines({**start, "first_step": first_step}, *steps, end)))
    return folder


def test_steps_that_waited_for_a_checkpoint_count_in_the_mean_and_are_told(tmp_path: Path):
    result = evaluate(with_checkpoints(make_folder(tmp_path, 40), every=10)).result
    (warning,) = [warning for warning in result.warnings if "checkpoint" in warning]
    assert (
        "4 of 40 steady steps waited for a checkpoint, 4." in warning and "median hardly" in warning
    )
    assert result.metrics["step_time_s"].value == pytest.approx(0.2, rel=0.02)
    assert result.metrics["step_time_mean_s"].value == pytest.approx(0.21, rel=0.02)


def test_too_many_checkpoints_for_the_median_are_told(tmp_path: Path):
    result = evaluate(with_checkpoints(make_folder(tmp_path, 40), every=1)).result
    assert any("40 of 40" in w and "so does the median" in w for w in result.warnings)


def test_a_run_that_went_on_says_from_where(tmp_path: Path):
    result = evaluate(with_checkpoints(make_folder(tmp_path, 20), 10**6, first_step=41)).result
    assert result.resumed_after == 40 and result.steps_done == 20
    assert progress(result).startswith("60 of ") and "the first 40 by an earlier run" in progress(
        result
    )
