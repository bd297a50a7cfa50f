"""Tuning on real hosts: the best layout runs on them again, and a host that dies loses nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.bed import Bed
from tests.clusters.test_scale import records
from tests.clusters.test_sweep_on_parts import allocated, answer, finished, hosts_of
from tests.surroundings import own_folders
from tests.waiting import wait_until

SMALL = [
    "opt-350m-sft-tiny",
    "--gpus",
    "2",
    "--name",
    "fast",
    "--steps",
    "48",
    "--json",
    "--max-tp",
    "1",
    "--max-cp",
    "1",  # on busy cores their many exchanges take minutes
    *(
        word
        for change in (
            "num_layers=1",
            "hidden_size=64",
            "ffn_size=128",
            "embedding_size=32",
            "seq_len=32",
            "batch_per_device=2",
            "dtype=fp32",
            "memory_parts=false",
            "hang_limit_s=120",
            "steps=40",
        )
        for word in ("--set", change)
    ),
]


def started(bed: Bed, runs: Path, *words: str) -> subprocess.Popen[str]:
    """The command line in the background."""
    environment = {**bed.env, **own_folders(runs)}
    environment.pop("SLURM_JOB_ID", None)
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def tune(bed: Bed, runs: Path, budget: int, *place: str) -> subprocess.Popen[str]:
    return started(bed, runs, "tune", *SMALL, "--budget", f"{budget} trials", *place)


def over_ssh(bed: Bed, hosts: str) -> list[str]:
    return ["--hosts", hosts, "--ssh-config", str(bed.ssh_config)]


def runs_of(result: dict[str, Any]) -> set[str]:
    return {run for row in result["rows"] for run in row["runs"]}


def run_best(bed: Bed, runs: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The result of the command that the tuning gives for its recipe."""
    (sentence,) = [line for line in result["sentences"] if "paceline run" in line]
    _, _, command = sentence.partition("paceline ")
    result, _ = answer(started(bed, runs, *shlex.split(command), "--no-probe", "--json"))
    return result


@pytest.mark.nightly
def test_the_best_layout_of_two_ssh_hosts_runs_on_them_again(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    result, _ = answer(tune(ssh_hosts, tmp_path, 2, *over_ssh(ssh_hosts, "node-[001-002]")))
    assert result["num_runs"] == 2 and {row["status"] for row in result["rows"]} == {"ok"}
    assert len({row["label"] for row in result["rows"]}) == 2
    assert all(hosts_of(run) == ["node-001", "node-002"] for run in finished(tmp_path))
    (best,) = [row for row in result["rows"] if row["best"]]
    again = run_best(ssh_hosts, tmp_path, result)
    assert again["status"] == "ok" and again["steps_done"] == 40
    (record,) = [run for run in records(tmp_path) if run["name"] == again["run"]]
    assert hosts_of(record) == ["node-001", "node-002"]
    assert record["spec"]["layout"] == best["layout"]


@pytest.mark.nightly
def test_a_host_that_dies_ends_it_and_the_same_command_goes_on_also_elsewhere(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    going = tune(ssh_hosts, tmp_path, 3, *over_ssh(ssh_hosts, "node-[001-002]"))
    wait_until(lambda: finished(tmp_path) or going.poll() is not None, "a finished run", 120)
    wait_until(lambda: len(records(tmp_path)) > 1 or going.poll() is not None, "the next run", 60)
    ssh_hosts.hosts["node-002"].crash()
    broken, messages = answer(going, 4)
    assert broken["stop"] == "interrupted" and broken["resume_command"].startswith("paceline tune")
    assert any("every slot has lost a host" in line for line in broken["sentences"])
    assert "node-[001-002] lost a host" in messages
    assert "node-[001-002] gets no more runs" in messages
    kept = runs_of(broken)
    assert (
        kept == {run["name"] for run in finished(tmp_path)}
        and Path(broken["recipe_file"]).is_file()
    )
    lost = [run for run in records(tmp_path) if run["status"] != "ok"]
    assert 1 <= len(lost) <= 2 and any("node-002" in run["faulty_hosts"] for run in lost)
    wait_until(lambda: not ssh_hosts.hosts["node-001"].leftovers(), "the end of all ranks", 30)

    elsewhere = over_ssh(ssh_hosts, "node-001,node-003")
    whole, _ = answer(tune(ssh_hosts, tmp_path, 3, *elsewhere))
    # On busy cores the first two may differ so much that no third is worth its time.
    assert kept < runs_of(whole) and whole["stop"] != "interrupted"
    assert whole["num_runs"] == 3 or (whole["num_runs"], whole["stop"]) == (2, "bound")
    assert {tuple(hosts_of(run)) for run in finished(tmp_path) if run["name"] not in kept} == {
        ("node-001", "node-003")
    }


@pytest.mark.nightly
def test_trials_are_steps_of_an_allocation_and_so_is_the_best(
    slurm_cluster: Bed, tmp_path: Path
) -> None:
    job = allocated(slurm_cluster, 2)
    try:
        place = ["--allocation", job, "--nodes", "2"]
        result, _ = answer(tune(slurm_cluster, tmp_path, 2, *place))
        again = run_best(slurm_cluster, tmp_path, result)
        queued = slurm_cluster.slurm.jobs()
    finally:
        slurm_cluster.slurm.ask("scancel", job)
    assert result["num_runs"] == 2 and again["status"] == "ok" and queued == [job]
    assert {rank["host"] for rank in again["ranks"]} == {"node-001", "node-002"}
    assert json.loads((tmp_path / "fast" / "tune.json").read_text()) == result
