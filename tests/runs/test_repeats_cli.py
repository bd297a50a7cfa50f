"""Repeats and interleaved runs, really run on this machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.repeat import exit_code
from paceline.compare.over_time.repeats import GroupResult, SeriesResult
from tests.cli.test_errors import paceline
from tests.runs.test_flow import SMALL, assert_gone, start, trainer_pids
from tests.waiting import wait_until

QUICK = ["run", "tiny-llama", "--no-probe", "--devices", "1", *SMALL, "--set", "steps=40"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Two configurations, twice each in turn: runs folder, JSON document, standard error."""
    runs = tmp_path_factory.mktemp("runs")
    done = paceline(
        *QUICK,
        "--interleave",
        "",
        "seq_len=32",
        "--repeat",
        "2",
        "--group",
        "ab",
        "--tag",
        "trial",
        "--json",
        runs=runs,
    )
    assert done.returncode == 0, done.stderr
    return runs, json.loads(done.stdout), done.stderr


def records(runs: Path) -> list[dict[str, Any]]:
    """Every run.json, in the order in which the runs began."""
    documents = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    return sorted(documents, key=lambda record: record["created"])


def test_two_configurations_give_two_groups_with_their_figures(
    pair: tuple[Path, dict[str, Any], str],
):
    _, document, _ = pair
    first, second = document["groups"]
    assert (first["group"], second["group"]) == ("ab-a", "ab-b")
    assert first["changes"] == ["training.seq_len=64"]
    assert (first["ok"], first["failed"], first["num_repeats"]) == (2, 0, 2)
    step = second["figures"]["step_time_s"]
    values = [run["metrics"]["step_time_s"]["value"] for run in second["runs"]]
    assert step["value"] == pytest.approx(sum(values) / 2) and step["n"] == 2
    assert document["compare"] == "paceline compare ab-a ab-b --allow seq_len"
    assert document["resume"] is None and document["interrupted"] is False


def test_they_ran_in_turn_and_each_run_knows_its_place(pair: tuple[Path, dict[str, Any], str]):
    runs, _, errors = pair
    documents = records(runs)
    assert [record["group"][-1] for record in documents] == ["a", "b", "b", "a"]
    assert [record["repeat"]["number"] for record in documents] == [1, 1, 2, 2]
    assert {record["tag"] for record in documents} == {"trial"}
    assert "A  repeat 1 of 2" in errors and "B  repeat 2 of 2" in errors


def test_the_printed_command_compares_the_two(pair: tuple[Path, dict[str, Any], str]):
    runs, document, _ = pair
    done = paceline(*document["compare"].split()[1:], "--json", runs=runs)
    assert json.loads(done.stdout)["n_a"] == 2 and done.returncode in (0, 3, 4)


def test_a_complete_group_has_nothing_to_add_and_can_be_made_larger(
    pair: tuple[Path, dict[str, Any], str],
):
    runs, _, _ = pair
    done = paceline("run", "--resume", "ab-b", runs=runs)
    assert done.returncode == 0 and "ab-a: 2 of 2 repeats" in done.stdout
    assert len(records(runs)) == 4
    planned = paceline("run", "--resume", "ab-b", "--repeat", "3", "--dry-run", runs=runs)
    assert "in this order: A3 B3" in planned.stderr and planned.stdout.count("#!/") == 2
    assert len(records(runs)) == 4


def test_other_settings_do_not_get_into_a_group(pair: tuple[Path, dict[str, Any], str]):
    runs, _, _ = pair
    done = paceline(*QUICK, "--set", "lr=0.5", "--group", "ab-a", runs=runs)
    assert done.returncode == 1 and "training.lr 0.001 there, 0.5 here" in done.stderr


def test_a_failing_side_is_told_and_the_other_measured(tmp_path: Path):
    done = paceline(
        *QUICK, "--interleave", "", "lr=1e30,grad_clip=0,steps=60", "--repeat", "1", runs=tmp_path
    )
    assert done.returncode == 4, done.stderr
    assert "1 of 1 repeat;" in done.stdout and "0 of 1 repeat, 1 failed" in done.stdout
    assert (
        " nan " in done.stdout and "Run what is missing with `paceline run --resume" in done.stdout
    )


def test_an_interrupted_series_keeps_what_has_ended_and_goes_on(tmp_path: Path):
    process = start(tmp_path, "--repeat", "2", "--group", "g", "--set", "steps=400", "--json")
    pids = second_runs_ranks(tmp_path)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4 and "Traceback" not in errors
    document = json.loads(output)
    (group,) = document["groups"]
    assert (group["ok"], group["failed"], document["interrupted"]) == (1, 1, True)
    assert_gone(pids)
    command = document["resume"].split()
    whole = paceline(*command[1:], "--no-probe", "--json", runs=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)["groups"][0]["ok"] == 2
    assert [record["status"] for record in records(tmp_path)] == ["ok", "cancelled", "ok"]


def second_runs_ranks(runs: Path) -> list[int]:
    """Wait until the second run trains; its process ids."""
    return wait_until(lambda: trainer_pids(runs, 0, "*-2"), "the second run", 300)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeat", "3"], "RECIPE: is missing"),
        (["tiny-llama", "--repeat", "0"], "1 to 1000, or `same` for 5"),
        (["tiny-llama", "--repeat", "many"], "is not a number of repeats"),
        (["tiny-llama", "--interleave", ""], "--interleave"),
        (["tiny-llama", "--interleave", "", "stpes=3"], "did you mean 'steps'"),
        (["--interleave", "tiny-llama", "steps=3"], "has no recipe"),
        (["--resume", "nothing"], "is not in"),
        (["tiny-llama", "--max-parallel", "2"], "apply to several runs"),
        (
            ["tiny-llama", "--repeat", "2", "--nodes-per-trial", "2", "--device", "cpu"],
            "only this machine is available",
        ),
        (["tiny-llama", "--resume", "g"], "takes its settings from the group"),
        (["--resume", "g", "--set", "steps=3"], "takes its settings from the group"),
        (["--resume", "g", "--devices", "2"], "takes its settings from the group"),
        (["tiny-llama", "--group", "last"], "is not a valid group name"),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, arguments: list[str], words: str):
    done = paceline("run", *arguments, runs=tmp_path)
    assert done.returncode == 1 and words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and records(tmp_path) == []


def test_same_stands_for_five_and_interleaving_has_five_by_default():
    for options in (["--repeat", "same"], ["--interleave", "", "seq_len=32"], ["--group", "g"]):
        done = paceline(*QUICK, *options, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert len(document["order"]) == 5 * len(document["groups"])


def test_the_same_configuration_twice_is_a_trial_and_said_to_be_one():
    done = paceline(*QUICK, "--interleave", "", "", "--dry-run")
    assert done.returncode == 0 and "this tests the method itself" in done.stderr


def series_with(
    ok: int, num_repeats: int = 2, status: str = "failed", **fields: object
) -> SeriesResult:
    """A series of one group that has `ok` figures; the other runs ended with `status`."""
    verdict = {"kind": "none", "sentence": ""}
    runs = [
        {"run": "r", "recipe": "x", "status": s, "verdict": verdict}
        for s in ["ok"] * ok + [status] * (num_repeats - ok)
    ]
    group = {
        "group": "g",
        "recipe": "x",
        "key": "k",
        "num_repeats": num_repeats,
        "ok": ok,
        "failed": num_repeats - ok,
        "runs": runs,
    }
    return SeriesResult(groups=(GroupResult.model_validate(group),), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("series", "code"),
    [
        (series_with(2), 0),
        (series_with(1), 4),
        (series_with(0), 2),
        (series_with(0, status="incomplete"), 4),
        (series_with(0, status="cancelled", interrupted=True), 4),
        (series_with(1, interrupted=True), 4),
    ],
)
def test_the_exit_code_says_whether_there_are_figures(series: SeriesResult, code: int):
    assert exit_code(series) == code
