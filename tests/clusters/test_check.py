"""On real hosts the check names the slow one and the one set up wrongly, and blames no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.bed import Bed
from tests.waiting import wait_until

LIMIT_S = 300.0
NO_HURRY = ("--time-limit", "180")
"""Time for hosts that share this machine with other tests."""
SHARE = 0.25
"""Of a core for each of the eight hosts: two cores together."""


def paceline(bed: Bed, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(
        command,
        env=bed.env,
        cwd=bed.shared,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def checked(bed: Bed, runs: Path, *arguments: str) -> dict[str, Any]:
    over_ssh = ("--hosts", str(bed.hostfile), "--ssh-config", str(bed.ssh_config))
    done = paceline(
        bed, "check", "--fast", "--json", "--runs-dir", str(runs), *over_ssh, *arguments
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {host["host"]: host for host in report["hosts"]}


@pytest.fixture
def even(ssh_hosts: Bed) -> Bed:
    """Eight hosts with an equal share of the processor."""
    for host in ssh_hosts.hosts.values():
        host.limit(SHARE)
    return ssh_hosts


@pytest.mark.alone
def test_a_slow_host_is_named_with_its_evidence(even: Bed, tmp_path: Path):
    even.hosts["node-003"].limit(SHARE / 3)
    # Load of other programs widens the spread of the other hosts, which then hides the slow one.
    for attempt in range(3):
        report = checked(even, tmp_path / str(attempt), "--max-parallel", "2")
        if report["drain"]:
            break
    assert report["drain"] == ["node-003"], report["sentences"]
    slow = by_name(report)["node-003"]
    assert all("below the other nodes (z = " in line for line in slow["evidence"])
    assert slow["figures"]["gemm"]["loss"] > 0.3
    measures = report["measures"]
    assert set(measures) == {"gemm", "memory", "pair"}
    assert all(measure["smallest_fault"] > 0.01 for measure in measures.values())


@pytest.mark.alone
def test_wrong_set_ups_are_named_and_the_other_hosts_are_still_measured(
    ssh_hosts: Bed, tmp_path: Path
):
    hosts = ssh_hosts.hosts
    assert ssh_hosts.sshd
    ssh_hosts.sshd.lock_out(hosts["node-002"])
    hosts["node-005"].unplug()
    report = checked(ssh_hosts, tmp_path, "--max-parallel", "2")
    nodes = by_name(report)
    assert list(nodes) == ssh_hosts.names  # in the order of the hostfile, nobody dropped
    assert "refuses to log in without a password" in nodes["node-002"]["evidence"][0]
    assert nodes["node-005"]["evidence"][0].startswith("does not answer")
    assert {"node-002", "node-005"} <= set(report["drain"])
    others = [host for name, host in nodes.items() if name not in ("node-002", "node-005")]
    assert all(set(host["figures"]) == {"gemm", "memory", "pair"} for host in others)
    assert report["measures"]["gemm"]["smallest_fault"] is None  # six are too few to judge
    assert [host["verdict"] for host in others] == ["fit"] * 6


def test_a_quick_check_outlives_a_host_and_names_it_alone(ssh_hosts: Bed, tmp_path: Path):
    drain = tmp_path / "drain.txt"
    over_ssh = ["--hosts", "node-[001-004]", "--ssh-config", str(ssh_hosts.ssh_config)]
    command = [sys.executable, "-m", "paceline", "check", "--devices-only", "--json", *over_ssh]
    command += [*NO_HURRY, "--drain-file", str(drain), "--runs-dir", str(tmp_path)]
    check = subprocess.Popen(
        command, env=ssh_hosts.env, cwd=ssh_hosts.shared, stdout=subprocess.PIPE, text=True
    )
    with check:
        folder = "checks/*/check/rank-*.jsonl"
        wait_until(lambda: len(list(tmp_path.glob(folder))) == 4, "all to begin")
        ssh_hosts.hosts["node-003"].crash()
        printed, _ = check.communicate(timeout=LIMIT_S)
    report = json.loads(printed)
    assert check.returncode == 0 and report["drain"] == ["node-003"], report["hosts"]
    assert drain.read_text() == "node-003\n"
    assert set(report["measures"]) <= {"gemm", "memory"}


def test_hosts_are_looked_at_without_measuring(ssh_hosts: Bed):
    assert ssh_hosts.sshd
    ssh_hosts.sshd.lock_out(ssh_hosts.hosts["node-004"])
    over_ssh = (str(ssh_hosts.hostfile), "--ssh-config", str(ssh_hosts.ssh_config), "--json")
    done = paceline(ssh_hosts, "check", "hosts", *over_ssh, "--check", "--fail-on-findings")
    assert done.returncode == 3
    faults = {row["host"]: row["fault"] for row in json.loads(done.stdout) if row["fault"]}
    assert list(faults) == ["node-004"]


def test_the_nodes_of_an_allocation_are_checked_inside_it(slurm_cluster: Bed, tmp_path: Path):
    runs = str(slurm_cluster.shared / "runs")
    arguments = ["--fast", "--json", *NO_HURRY, "--runs-dir", runs]
    command = [
        "salloc",
        "-wnode-001,node-003",
        "--quiet",
        sys.executable,
        "-m",
        "paceline",
        "check",
        "--launcher",
        "slurm",
    ]
    done = subprocess.run(
        [*command, *arguments],
        env=slurm_cluster.env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=slurm_cluster.shared,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(by_name(report)) == ["node-001", "node-003"]
    assert all(host["verdict"] == "fit" for host in report["hosts"]), report["hosts"]
    assert set(report["measures"]) == {"gemm", "memory", "pair"}


def test_slurm_leaves_out_the_hosts_of_a_drain_file(slurm_cluster: Bed, tmp_path: Path):
    drain = tmp_path / "drain.txt"
    runs = str(slurm_cluster.shared / "runs")
    command = ["check", "--devices-only", "--launcher", "slurm", "--nodes", "2", "--json"]
    options = [*NO_HURRY, "--drain-file", str(drain), "--runs-dir", runs]
    done = paceline(slurm_cluster, *command, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["drain"] == [], report["hosts"]
    assert drain.read_text() == "" and slurm_cluster.slurm
    ask = slurm_cluster.slurm.ask
    sbatch = [
        "sbatch",
        "--parsable",
        f"--exclude={drain}",
        "-N2",
        "--output=/dev/null",
        "--wrap",
        "true",
    ]
    for names, placed in (("", "node-[001-002]"), ("node-001\nnode-002\n", "node-[003-004]")):
        drain.write_text(names)  # as a check writes it
        job = ask(*sbatch).strip()
        wait_until(lambda job=job: "COMPLETED" in ask("scontrol", "show", "job", job), "its end")
        assert f"NodeList={placed}" in ask("scontrol", "show", "job", job)


def test_slurms_hosts_become_hostfiles(slurm_cluster: Bed):
    assert slurm_cluster.slurm
    slurm_cluster.slurm.drain(slurm_cluster.hosts["node-002"], "memory")
    idle = paceline(slurm_cluster, "check", "hosts", "--idle", "--slots", "2")
    assert idle.stdout == "".join(f"node-00{n} slots=2\n" for n in (1, 3, 4)), idle.stderr
    inside = [
        "salloc",
        "-wnode-001,node-003",
        "--quiet",
        sys.executable,
        "-m",
        "paceline",
        "check",
        "hosts",
        "--slurm",
        "--head",
    ]
    done = subprocess.run(
        inside, env=slurm_cluster.env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == "node-001\n", done.stderr
