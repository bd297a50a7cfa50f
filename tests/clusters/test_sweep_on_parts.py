"""Sweeps and repeats on parts of real clusters: at once, resumed, and as arrays of Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clusters.bed import Bed
from tests.clusters.test_scale import all_overlap, cluster_file, records
from tests.surroundings import own_folders
from tests.waiting import wait_until

TINY = [
    "tiny-gpt",
    *(
        word
        for change in (
            "num_layers=1",
            "hidden_size=32",
            "ffn_size=64",
            "seq_len=32",
            "dtype=fp32",
            "steps=20",
            "memory_parts=false",
            "hang_limit_s=120",
            "global_batch=4",
        )
        for word in ("--set", change)
    ),
]


def paceline(bed: Bed, runs: Path, verb: str, *arguments: str) -> subprocess.Popen[str]:
    """A verb on the tiny recipe, in the background."""
    environment = {**bed.env, **own_folders(runs)}
    environment.pop("SLURM_JOB_ID", None)
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", verb, *TINY, *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answer(process: subprocess.Popen[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """Return the JSON that a verb printed, and its messages."""
    output, messages = process.communicate(timeout=240)
    assert process.returncode == code, messages
    return json.loads(output), messages


def hosts_of(record: dict[str, Any]) -> list[str]:
    return record["spec"]["cluster"]["hosts"]


def finished(runs: Path) -> list[dict[str, Any]]:
    """Records of the runs that ended well, in the order of their starts."""
    good = [run for run in records(runs) if run["status"] == "ok"]
    return sorted(good, key=lambda run: run["launched_unix"])


def allocated(bed: Bed, nodes: int) -> str:
    """The number of a new allocation."""
    words = ["salloc", "--no-shell", f"--nodes={nodes}", "--exclusive", "--mem=0"]
    done = subprocess.run(words, env=bed.env, capture_output=True, text=True, timeout=60)
    return done.stderr.split()[-1]


def test_a_sweep_runs_on_pairs_of_ssh_hosts_at_once_and_does_without_a_dead_one(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    ssh_hosts.hosts["node-004"].crash()
    place = ["--cluster", cluster_file(ssh_hosts, "ssh", tmp_path), "--nodes-per-trial", "2"]
    words = ("sweep", "--mbs", "1,2", *place, "--name", "pairs")
    result, messages = answer(paceline(ssh_hosts, tmp_path, *words))
    assert [row["status"] for row in result["rows"]] == ["ok", "ok"]
    assert all(row["nodes"] == 2 for row in result["rows"])
    assert [hosts_of(run) for run in finished(tmp_path)] == [["node-001", "node-002"]] * 2
    assert "node-[003-004] gets no more runs" in messages
    (first,) = [run for run in records(tmp_path) if run["status"] != "ok"]
    assert hosts_of(first) == ["node-003", "node-004"] and "node-004" in first["faulty_hosts"]
    assert "report.html" in {path.name for path in (tmp_path / "pairs").iterdir()}


def test_repeats_run_on_parts_at_once_both_of_a_pair_on_the_same(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    place = ["--cluster", cluster_file(ssh_hosts, "ssh", tmp_path), "--hosts", "node-[001-002]"]
    sides = ["--interleave", "layout.micro_batch=1", "layout.micro_batch=2", "--group", "ab"]
    many = ["--repeat", "2", "--nodes-per-trial", "1"]
    result, _ = answer(paceline(ssh_hosts, tmp_path, "run", *place, *sides, *many))
    assert [group["ok"] for group in result["groups"]] == [2, 2]
    good = finished(tmp_path)
    by_host = {
        host: [run["group"] for run in good if hosts_of(run) == [host]]
        for host in ("node-001", "node-002")
    }
    assert by_host == {"node-001": ["ab-a", "ab-b"], "node-002": ["ab-a", "ab-b"]}
    assert all_overlap([run for run in good if run["group"] == "ab-a"])


def test_a_sweep_is_steps_of_an_allocation_keeps_what_is_finished_and_goes_on_in_another(
    slurm_cluster: Bed, tmp_path: Path
) -> None:
    place = ["--cluster", cluster_file(slurm_cluster, "slurm", tmp_path)]
    words = (
        "sweep",
        *place,
        "--mbs",
        "1,2,4",
        "--nodes-per-trial",
        "1",
        "--max-parallel",
        "2",
        "--name",
        "steps",
        "--set",
        "steps=40",
    )
    first, second = allocated(slurm_cluster, 4), ""
    try:
        going = paceline(slurm_cluster, tmp_path, *words, "--allocation", first)
        wait_until(lambda: finished(tmp_path) or going.poll() is not None, "a finished run", 180)
        slurm_cluster.slurm.ask("scancel", first)
        result, messages = answer(going, 4)
        assert first in result["halt_reason"] and result["resume_command"]
        assert "error: stopped:" in messages
        kept = {run["name"] for run in finished(tmp_path)}
        second = allocated(slurm_cluster, 2)
        result, _ = answer(paceline(slurm_cluster, tmp_path, *words, "--allocation", second))
    finally:
        slurm_cluster.slurm.ask("scancel", first, second)
    assert [row["status"] for row in result["rows"]] == ["ok"] * 3
    good = finished(tmp_path)
    assert kept and kept <= {run["name"] for run in good} and len(good) == 3
    begun = sorted((run for run in records(tmp_path)), key=lambda run: run["launched_unix"])
    assert all_overlap(begun[:2])
    assert {tuple(hosts_of(run)) for run in begun} == {("node-001",), ("node-002",)}


def test_a_sweep_in_the_queue_is_one_array_whose_tasks_are_told_by_their_own_marks(
    slurm_cluster: Bed, tmp_path: Path
) -> None:
    place = ["--cluster", cluster_file(slurm_cluster, "slurm", tmp_path)]
    words = (
        "sweep",
        *place,
        "--mbs",
        "1,2,4",
        "--nodes-per-trial",
        "1",
        "--max-parallel",
        "2",
        "--name",
        "array",
    )
    result, _ = answer(paceline(slurm_cluster, tmp_path, *words))
    assert [row["status"] for row in result["rows"]] == ["ok"] * 3
    assert "#SBATCH --array=0-2%2" in (tmp_path / "array" / "array.sh").read_text()
    slurm_records = {
        path.parent: json.loads(path.read_text())["attempts"]
        for path in tmp_path.glob("*/slurm.json")
    }
    jobs = [attempt["job"] for (attempt,) in slurm_records.values()]
    assert len({job.partition("_")[0] for job in jobs}) == 1
    assert {job.partition("_")[2] for job in jobs} == {"0", "1", "2"}
    for folder, (attempt,) in slurm_records.items():
        begin, end, _ = (folder / "slurm.status").read_text().split("\n")
        assert begin.startswith(f"start {attempt['job']} 0 node-")
        assert end == f"end {attempt['job']} 0 0"


def test_a_check_without_a_place_in_the_queue_ends_in_time_and_leaves_no_job(
    slurm_cluster: Bed, tmp_path: Path
) -> None:
    holder = allocated(slurm_cluster, 4)
    words = [
        sys.executable,
        "-m",
        "paceline",
        "check",
        "--fast",
        "--launcher",
        "slurm",
        "--nodes",
        "2",
        "--wait",
        "3",
        "--runs-dir",
        str(tmp_path),
    ]
    try:
        done = subprocess.run(
            words, env=slurm_cluster.env, capture_output=True, text=True, timeout=120
        )
        left = slurm_cluster.slurm.ask("squeue", "-h", "-o", "%i").split()
    finally:
        slurm_cluster.slurm.ask("scancel", holder)
    assert done.returncode == 4 and "waits in Slurm's queue" in done.stderr, done.stderr
    assert "--wait SECONDS" in done.stderr and left == [holder]
