"""`paceline scale RECIPE` as a user meets it, on a fleet of made-up hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.scaling.campaigns.record import campaign_folders
from tests.cli.test_errors import paceline
from tests.surroundings import own_folders
from tests.terminals import exit_code_in_closed_terminal
from tests.waiting import wait_until

DRIVER = """
import sys
from tests.scaling.fleet import Fleet
run_s, down = float(sys.argv.pop(1)), set(sys.argv.pop(1).split())
sys.modules["paceline.machines.ssh"] = Fleet(run_s=run_s, at_least=2, down=down)
from paceline.__main__ import main
main()
"""
FOUR = ("scale", "tiny-gpt", "--device", "cpu", "--hosts", "node-[1-4]", "--sizes", "1,2,N")


def start(runs: Path, run_s: float, *arguments: str, down: str = "") -> subprocess.Popen[str]:
    """Run the command line in a process of its own; each run takes `run_s`."""
    environment = {**os.environ, **own_folders(runs)}
    environment.pop("SLURM_JOB_ID", None)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run_s), down, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def records(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in runs.glob("*/run.json")]


def all_run(runs: Path, count: int, size: int) -> bool:
    """Whether `count` sub-clusters of this size run."""
    running = [r for r in records(runs) if r["status"] == "running"]
    return sum(len(r["trial"]["hosts"]) == size for r in running) == count


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A campaign with one host that is down: runs folder, standard output, standard error."""
    runs = tmp_path_factory.mktemp("runs")
    process = start(runs, 0.0, *FOUR, "--tag", "night", down="node-4")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 4, errors  # there is no fourth host for the largest size
    return runs, output, errors


def test_the_table_names_the_kind_of_scaling_and_the_base(finished: tuple[Path, str, str]):
    _, output, _ = finished
    lines = output.splitlines()
    head, first = lines[(at := [line.split()[:1] for line in lines].index(["nodes"])) : at + 2]
    assert "\n  2 nodes reach " in output
    assert head.split()[:4] == ["nodes", "gpus", "sub-clusters", "samples/s"]
    assert first.split()[:3] == ["1", "1", "3"]
    assert "weak scaling, base: median of 3 nodes" in output
    assert "No value for node-4: node-4: does not answer." in output


def test_progress_says_what_runs_where_and_what_is_left(finished: tuple[Path, str, str]):
    _, _, errors = finished
    assert "weak scaling · hosts node-[1-4] · sizes 1, 2, 4 · 7 sub-clusters in 3 rounds" in errors
    assert "round 1 of 3: 4 x 1 node x 1 · 7 left in 3 rounds" in errors
    assert "on node-1  node-2  node-3  node-4" in errors
    assert "node-4 is excluded from here on: node-4: does not answer" in errors
    assert "samples/s, steps ±" in errors and "left in" in errors


def test_runs_are_found_by_group_and_tag_and_the_campaign_keeps_its_files(
    finished: tuple[Path, str, str],
):
    runs, _, _ = finished
    (folder,) = campaign_folders(runs)
    names = {path.name for path in folder.iterdir()}
    assert {"campaign.json", "results.csv", "trials.csv", "scale.json", "report.html"} <= names
    rows = json.loads(
        paceline("runs", "list", "--json", "--where", f"group={folder.name}-1x1", runs=runs).stdout
    )
    assert len(rows) == 4 and {row["tag"] for row in rows} == {"night"}
    kept = json.loads((folder / "scale.json").read_text())
    again = start(runs, 0.0, "scale", "--resume", folder.name, "--json", down="node-4")
    assert json.loads(again.communicate(timeout=120)[0])["sizes"] == kept["sizes"]


def test_the_results_can_be_analysed_as_if_they_came_from_elsewhere(
    finished: tuple[Path, str, str],
):
    runs, _, _ = finished
    (folder,) = campaign_folders(runs)
    kept = json.loads((folder / "scale.json").read_text())
    for table in ("results.csv", "trials.csv"):
        done = paceline("scale", "--from", str(folder / table), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["base"]["value"] == pytest.approx(kept["base"]["value"])


def test_interrupts_end_everything_and_what_was_finished_stays(tmp_path: Path):
    process = start(tmp_path, 300.0, *FOUR, "--json")
    wait_until(lambda: all_run(tmp_path, 2, size=2), "2 runs of 2 nodes", limit_s=120)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert "Traceback" not in errors and "finished runs are kept" in errors
    document = json.loads(output)
    assert document["interrupted"] and document["missing"] == 3
    assert document["resume"].startswith("paceline scale --resume ")
    assert sorted(r["status"] for r in records(tmp_path)) == ["cancelled"] * 2 + ["ok"] * 4

    again = start(tmp_path, 0.0, "scale", "--resume", "last", "--json")
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert len(json.loads(output)["runs"]) == 7
    assert sum(r["status"] == "ok" for r in records(tmp_path)) == 7


def test_a_campaign_on_which_nothing_runs_is_a_fault_with_its_cause(tmp_path: Path):
    process = start(tmp_path, 0.0, *FOUR, down="node-1 node-2 node-3 node-4")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and output == ""
    assert "every host failed, so this machine may be at fault: node-1: does not answer" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs an input"),
        (("tiny-gpt", "--from", "x.csv"), "got more than one input"),
        (("--resume", "last"), "does not exist in"),
        (("--resume", "last", "--sizes", "2"), "takes its settings from the scaling test"),
        (("tiny-gpt", "--hosts", "a,b", "--sizes", "1,3"), "there are 2 hosts"),
        (("tiny-gpt", "--hosts", "a,b", "--gpus-per-node", "0"), "is not a list of numbers"),
        (("tiny-gpt", "--hosts", "a,b", "--split", "topology"), "the switch of a is not known"),
        (("tiny-gpt", "--hosts", "a,b", "--scaling", "strong"), "--set global_batch=N"),
        (("tiny-gpt", "--hosts", "a;reboot"), "is not a host name"),
        (("tiny-gpt", "--hosts", "a,b", "--name", "x\ny"), "is not a valid name of a scaling test"),
        (("tiny-gpt", "--hosts", "a,b", "--device", "tpu"), "not one of 'auto', 'cpu', 'cuda'"),
        (("tiny-gpt", "--launcher", "ssh"), "needs hosts; specify them"),
        (("tiny-gpt", "--hosts", "a,b", "--where", "a=1"), "requires --from CSV"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], words: str):
    done = paceline("scale", *arguments, runs=tmp_path)
    assert done.returncode == 1, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/campaign.json"))


def test_a_dry_run_shows_every_round_and_makes_nothing(tmp_path: Path):
    done = paceline(*FOUR, "--gpus-per-node", "1,2", "--dry-run", "--format", "csv", runs=tmp_path)
    head, *rows = done.stdout.splitlines()
    assert head == "round,nodes,gpus,global_batch,n,left_over,groups" and len(rows) == 4
    assert rows[0] == "1,1,1,8,4,,node-1  node-2  node-3  node-4"
    assert not list(tmp_path.glob("*/campaign.json"))


@pytest.mark.parametrize("slots", ["", " slots=1", " slots=8"])
def test_the_row_of_one_gpu_is_planned_from_a_head_node_without_one(tmp_path: Path, slots: str):
    (tmp_path / "hosts").write_text("".join(f"node-{n}{slots}\n" for n in (1, 2)))
    place = ("--hosts", str(tmp_path / "hosts"), "--cluster", "lambda-1cc-h100")
    done = paceline(
        *("scale", "opt-350m-sft", *place, "--gpus-per-node", "1,8", "--sizes", "1,2"),
        *("--dry-run", "--format", "csv"),
        runs=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(",")[:3] for line in done.stdout.splitlines()[1:]]
    assert rows == [["1", "1", "1"], ["2", "1", "8"], ["3", "2", "16"]]
    assert "H100-SXM" in done.stderr


def test_a_reference_stands_in_the_page_of_a_campaign(
    finished: tuple[Path, str, str], tmp_path: Path
):
    runs, _, _ = finished
    (folder,) = campaign_folders(runs)
    page = tmp_path / "page.html"
    resume = ("scale", "--resume", folder.name, "--reference", "123.5", "--html", str(page))
    start(runs, 0.0, *resume, down="node-4").communicate(timeout=120)
    assert "Green: the reference, 123.5 samples/s per node." in page.read_text()


def test_a_dry_run_draws_no_page(tmp_path: Path):
    done = paceline(*FOUR, "--dry-run", "--html", str(tmp_path / "page.html"), runs=tmp_path)
    assert done.returncode == 1 and "--dry-run makes none" in done.stderr


def test_a_closed_terminal_ends_everything_and_what_was_finished_stays(tmp_path: Path):
    code = exit_code_in_closed_terminal(
        ["-c", DRIVER, "300.0", "", *FOUR],
        {**os.environ, **own_folders(tmp_path)},
        lambda: all_run(tmp_path, 2, size=2),
    )
    assert code == 4
    (folder,) = campaign_folders(tmp_path)
    assert len((folder / "results.csv").read_text().splitlines()) > 4
    assert sorted(r["status"] for r in records(tmp_path)) == ["cancelled"] * 2 + ["ok"] * 4
