"""How a run ended is read from its files: the ranks' last words first, the exit code second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import catalog
from paceline.comparison import compare_with_references
from paceline.core.facts import facts_of
from paceline.core.hardware import Cluster
from paceline.core.result import Metric
from paceline.events import RankLog, read_rank
from paceline.outcome import evaluate, judge, log_tail
from paceline.recipe import load_recipe, resolve
from paceline.rundir import RUN_FILE, Controller, boot_id, write_value
from tests.example import noisy
from tests.test_events import END, START, STEP, lines
from tests.test_rundir import make_record


def rank(status: str | None = "ok", reason: str | None = None) -> RankLog:
    end = [{**END, "status": status, "reason": reason}] if status else []
    return read_rank(lines(START, STEP, *end))


def test_all_ranks_ok_is_ok():
    assert judge({0: rank(), 1: rank()}, 2, 0, False, []).status == "ok"


def test_a_crash_after_the_last_step_is_ok_with_a_warning():
    ending = judge({0: rank(), 1: rank()}, 2, -6, False, [])
    assert ending.status == "ok" and "-6" in ending.warnings[0]


@pytest.mark.parametrize("status", ["oom", "nan", "failed"])
def test_one_ranks_trouble_is_the_runs(status: str):
    ending = judge({0: rank(), 1: rank(status, "because")}, 2, 1, False, [])
    assert (ending.status, ending.reason) == (status, "because")


def test_out_of_memory_explains_the_other_ranks_failure():
    ranks = {0: rank("failed", "connection closed by peer"), 1: rank("oom", "no memory")}
    assert judge(ranks, 2, 1, False, []).status == "oom"


def test_a_lost_peer_is_not_the_cause_of_an_out_of_memory_kill():
    ranks = {0: rank("failed", "another rank ended first: connection closed"), 1: rank(None)}
    assert judge(ranks, 2, 1, True, []).status == "oom"


def test_a_killed_rank_is_named_before_the_peer_that_noticed():
    ranks = {0: rank("failed", "another rank ended first: connection closed"), 1: rank(None)}
    ending = judge(ranks, 2, 1, False, ["RuntimeError: connection closed"], "rank 1 was killed")
    assert (ending.status, ending.reason) == ("failed", "rank 1 was killed")


def test_a_rank_killed_by_the_kernel_is_out_of_memory():
    assert judge({0: rank(), 1: rank(None)}, 2, 1, True, []).status == "oom"


def test_a_silent_death_takes_its_reason_from_the_log():
    tail = ["Traceback (most recent call last):", "ValueError: no such thing"]
    ending = judge({0: rank(None)}, 1, 1, False, tail)
    assert (ending.status, ending.reason) == ("failed", "ValueError: no such thing")


def test_a_missing_rank_is_not_ok():
    assert judge({0: rank()}, 2, 0, False, []).status == "failed"


def make_folder(tmp_path: Path, n: int, status: str = "ok", **fields: object) -> Path:
    folder = tmp_path / "run"
    write_value(folder / RUN_FILE, make_record(status, name="run", **fields))  # type: ignore[arg-type]
    for number in range(2):
        times = noisy(n, seed=number)
        events: list[dict[str, Any]] = [
            {**STEP, "step": i + 1, "step_time_s": t, "busy_time_s": t / 2, "global_batch": 8}
            for i, t in enumerate(times)
        ]
        path = folder / "steps" / f"rank-{number:05d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines({**START, "rank": number, "world_size": 2}, *events)))
    return folder


def test_a_finished_folder_gives_figures(tmp_path: Path):
    result = evaluate(make_folder(tmp_path, 40)).result
    assert result.status == "ok" and result.steps_done == 40
    assert result.metrics["tokens_per_s"].value == pytest.approx(128 / 0.2, rel=0.05)
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


def test_a_folder_without_steps_is_readable(tmp_path: Path):
    folder = tmp_path / "run"
    write_value(folder / RUN_FILE, make_record("failed", name="run", reason="no torch"))
    result = evaluate(folder).result
    assert (result.status, result.reason, result.metrics) == ("failed", "no torch", {})


def test_the_tail_prefers_the_rank_that_failed(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00000.log").write_text("all well\n")
    (logs / "rank-00001.log").write_bytes(b"\xff\xfeRuntimeError: broken\n")
    (logs / "launcher.log").write_text("ChildFailedError:\n")
    assert log_tail(tmp_path)[-1].endswith("RuntimeError: broken")


FIGURES = {
    "samples_per_s": Metric(value=990.0, unit="samples/s"),
    "jitter_tax": Metric(value=0.1, unit="fraction"),
}


def test_a_run_like_the_published_one_is_compared_with_it():
    cluster = Cluster(
        name="c", device=catalog.find_device("H100").device.name, nodes=1, devices_per_node=8
    )
    spec = resolve(load_recipe("opt-350m-sft"), cluster, True, None)
    found = compare_with_references(facts_of(spec), spec.references, FIGURES)
    assert found[0].comparable and found[0].ratio == pytest.approx(900 / 943, abs=0.001)
    assert not any(c.comparable for c in found[1:])
    assert found[0].statistic == "mean"
    smaller = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": 2})})
    changed = compare_with_references(facts_of(smaller), smaller.references, FIGURES)
    assert not any(c.comparable for c in changed) and "model" in (changed[0].why_not or "")
    assert found[1].why_not is not None and "devices" in found[1].why_not


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
