"""Scaling campaigns on real hosts: sub-clusters at once, a killed controller, two launchers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.bed import Bed
from tests.surroundings import own_folders
from tests.waiting import wait_until

HOSTS = 4
SIZES = (1, 2, 4)
QUICK = [
    "opt-350m-sft-tiny",
    "--sizes",
    "1,2,4",
    "--extra-rounds",
    "0",
    "--name",
    "trial",
    *(
        word
        for change in (
            "num_layers=1",
            "hidden_size=64",
            "ffn_size=128",
            "embedding_size=32",
            "seq_len=64",
            "dtype=fp32",
            "steps=40",
            "memory_parts=false",
            "hang_limit_s=120",
        )
        for word in ("--set", change)
    ),
]


def scale(bed: Bed, runs: Path, *arguments: str) -> subprocess.Popen[str]:
    """`paceline scale` in the background."""
    environment = {**bed.env, **own_folders(runs)}
    command = [sys.executable, "-m", "paceline", "scale", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def cluster_file(bed: Bed, launcher: str, folder: Path) -> str:
    """Nodes of one rank with one thread each."""
    file = folder / "cluster.yaml"
    hosts = f"hosts: [{', '.join(bed.names[:HOSTS])}]\n" if launcher == "ssh" else ""
    file.write_text(
        f"name: bed\ndevice: cpu\ndevices_per_node: 1\nthreads_per_device: 1\nnodes: {HOSTS}\n"
        f"launcher: {launcher}\n{hosts}ssh: {{config: {bed.ssh_config}, connect_timeout_s: 60}}\n"
    )
    return str(file)


def records(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(runs.glob("*/run.json"))]


def of_size(runs: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    return [run for run in runs if len(run["trial"]["hosts"]) == size]


def all_overlap(runs: list[dict[str, Any]]) -> bool:
    """Whether every two of the runs were under way at the same time."""
    spans = [(run["launched_unix"], run["ended_unix"]) for run in runs]
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in combinations(spans, 2))


@pytest.fixture(scope="module")
def killed(
    ssh_hosts: Bed, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """A scaling test over SSH whose controller was killed while pairs ran, then resumed.

    Runs folder, what was finished before the kill, and what the second call printed.
    """
    runs = tmp_path_factory.mktemp("ssh")
    first = scale(ssh_hosts, runs, *QUICK, "--cluster", cluster_file(ssh_hosts, "ssh", runs))

    def pairs_run() -> bool:
        return any(run["status"] == "running" for run in of_size(records(runs), 2))

    try:
        wait_until(lambda: pairs_run() or first.poll() is not None, "the second round", 240)
    except TimeoutError:
        first.send_signal(signal.SIGINT)
        raise AssertionError(first.communicate()[1]) from None
    assert first.poll() is None, first.communicate()[1]
    first.kill()
    first.communicate()
    before = [run for run in records(runs) if run["status"] == "ok"]
    again = scale(ssh_hosts, runs, "--resume", "trial", "--extra-rounds", "0", "--json")
    output, errors = again.communicate(timeout=240)
    failed = [path.read_text() for path in runs.glob("trial/trials.csv")]
    assert again.returncode == 0, (errors, failed)
    return runs, before, json.loads(output)


def test_a_killed_campaign_goes_on_with_what_is_missing(
    killed: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    runs, before, result = killed
    assert len(before) >= 4, "the first round was over"
    names = {run["run"] for run in result["runs"]}
    assert {run["name"] for run in before} <= names and len(result["runs"]) == 7
    assert result["missing"] == 0 and result["resume"] is None
    broken_off = [run for run in records(runs) if run["name"] not in names]
    assert {run["status"] for run in broken_off} <= {"running", "queued"}
    assert all(len(run["trial"]["hosts"]) == 2 for run in broken_off)


def test_sub_clusters_of_a_round_ran_at_the_same_time_on_hosts_of_their_own(
    killed: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    runs, _, result = killed
    for size in SIZES:
        finished = [run for run in of_size(records(runs), size) if run["status"] == "ok"]
        assert all_overlap(finished)
        hosts = [host for run in finished for host in run["trial"]["hosts"]]
        assert sorted(hosts) == sorted(f"node-{n:03d}" for n in range(1, HOSTS + 1))
    for run in result["runs"]:
        rank_hosts = [
            json.loads(path.read_text().splitlines()[0])["host"]
            for path in sorted((runs / run["run"]).glob("steps/rank-*.jsonl"))
        ]
        assert rank_hosts == run["hosts"]


@pytest.fixture(scope="module")
def on_slurm(
    slurm_cluster: Bed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The same campaign as steps of an allocation."""
    runs = tmp_path_factory.mktemp("slurm")
    words = ["salloc", "--no-shell", f"--nodes={HOSTS}", "--exclusive", "--mem=0"]
    done = subprocess.run(words, env=slurm_cluster.env, capture_output=True, text=True, timeout=60)
    job = done.stderr.split()[-1]
    try:
        place = ["--cluster", cluster_file(slurm_cluster, "slurm", runs), "--allocation", job]
        process = scale(slurm_cluster, runs, *QUICK, *place, "--json")
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        yield runs, json.loads(output)
    finally:
        slurm_cluster.slurm.ask("scancel", job)


@pytest.mark.nightly
def test_sub_clusters_are_steps_of_an_allocation_at_the_same_time(
    on_slurm: tuple[Path, dict[str, Any]],
) -> None:
    runs, result = on_slurm
    assert [(row["nodes"], row["n"]) for row in result["sizes"]] == [(1, 4), (2, 2), (4, 1)]
    for size in SIZES:
        assert all_overlap(of_size(records(runs), size))


@pytest.mark.nightly
def test_both_launchers_give_results_of_one_form(
    on_slurm: tuple[Path, dict[str, Any]],
    killed: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    ours, theirs = on_slurm[1], killed[2]
    assert ours.keys() == theirs.keys()
    assert [run.keys() for run in ours["runs"]] == [run.keys() for run in theirs["runs"]]
    places = [
        [(run["round"], run["hosts"], run["global_batch"]) for run in result["runs"]]
        for result in (ours, theirs)
    ]
    assert places[0] == places[1]
