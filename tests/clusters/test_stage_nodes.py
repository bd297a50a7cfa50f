"""Staged assets on the own disks of real hosts, by SSH and in Slurm, and a job that reads them.

/dev/shm is private to every host, and to this machine: nobody sees it from another one.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.files.recipe import load_recipe
from paceline.files.staged import staged_path
from tests.clusters.bed import Bed, Host
from tests.clusters.bed.needs import need_programs
from tests.clusters.ssh_jobs import follow, log_of, make_job, start
from tests.command import paceline

RECIPE = "tiny-llama"
LOCAL = "/dev/shm/node-disk"
SMALL = "/dev/shm/small"
READS = """
import pathlib, socket, sys
print(socket.gethostname(), len(pathlib.Path(sys.argv[1]).read_bytes()))
"""


@pytest.fixture(autouse=True, scope="module")
def rsync() -> None:
    """Of this machine, whose programs the hosts have too."""
    need_programs("rsync")


@pytest.fixture
def source() -> Iterator[Path]:
    """A stage folder that no host sees."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def stage(root: Path, *words: object, env: dict[str, str] | None = None) -> tuple[int, Any]:
    """The exit code of `paceline recipes stage`, and what became of each node by its name."""
    done = paceline("recipes", "stage", RECIPE, "--to", root, "--json", *words, env=env)
    print(done.stderr)  # shown where the test fails
    document = json.loads(done.stdout) if done.stdout else {"nodes": []}
    return done.returncode, {node["host"]: node for node in document["nodes"]}


def states(nodes: dict[str, Any]) -> dict[str, str]:
    return {host: node["state"] for host, node in nodes.items()}


def mount_small_disk(node: Host) -> None:
    """Give a host a disk that has no room for the corpus."""
    node.call("sh", "-c", f"mkdir {SMALL} && mount -t tmpfs -o size=1m tmpfs {SMALL}")


def test_each_host_gets_its_copy_and_the_one_that_refuses_is_named(ssh_hosts: Bed, source: Path):
    names = ssh_hosts.names[:3]
    over_ssh = ("--local", LOCAL, "--hosts", ",".join(names), "--ssh-config", ssh_hosts.ssh_config)
    ssh_hosts.sshd.lock_out(ssh_hosts.hosts["node-002"])
    code, nodes = stage(source, *over_ssh)
    assert code == 2
    assert states(nodes) == {"node-001": "staged", "node-002": "failed", "node-003": "staged"}
    assert nodes["node-002"]["fault"] == "refuses to log in without a password"
    assert {nodes[name]["transfer"] for name in ("node-001", "node-003")} == {"sent"}

    ssh_hosts.sshd.let_in(ssh_hosts.hosts["node-002"])
    code, nodes = stage(source, *over_ssh)
    assert code == 0 and set(states(nodes).values()) == {"staged"}
    assert {name: node["copied"] for name, node in nodes.items()} == {
        "node-001": [],
        "node-002": ["corpus"],
        "node-003": [],
    }

    node = ssh_hosts.hosts["node-003"]
    node.call("sh", "-c", f"echo more | tee -a {LOCAL}/corpus-*/content/code.jsonl")
    code, nodes = stage(source, *over_ssh, "--verify")
    assert code == 3 and states(nodes)["node-003"] == "damaged"
    assert nodes["node-003"]["faults"] == [
        {"asset": "corpus", "fault": "changed", "path": "code.jsonl"}
    ]
    mount_small_disk(node)
    code, nodes = stage(source, "--local", SMALL, *over_ssh[2:])
    assert code == 2 and states(nodes)["node-003"] == "failed"
    assert nodes["node-003"]["fault"] == "the disk is full"


def test_inside_slurm_nodes_read_what_they_see_and_are_sent_the_rest(
    slurm_cluster: Bed, source: Path
):
    words = ["salloc", "--no-shell", "--nodes=2", "--exclusive", "--mem=0"]
    done = subprocess.run(words, env=slurm_cluster.env, capture_output=True, text=True, timeout=60)
    number = done.stderr.split()[-1]
    ways: set[str] = set()
    for root, local in ((source, LOCAL), (slurm_cluster.shared / "stage", f"{LOCAL}-too")):
        inside = {**slurm_cluster.settings, "SLURM_JOB_ID": number}
        code, nodes = stage(root, "--local", local, env=inside)
        assert code == 0 and states(nodes) == {"node-001": "staged", "node-002": "staged"}
        ways |= {node["transfer"] for node in nodes.values()}
    assert ways == {"sent", "shared"}
    mount_small_disk(slurm_cluster.hosts["node-002"])
    code, nodes = stage(source, "--local", SMALL, env=inside)
    assert code == 2 and states(nodes) == {"node-001": "staged", "node-002": "failed"}
    assert nodes["node-002"]["fault"] == "the disk is full"
    code, nodes = stage(source, "--local", "/proc/nothing", env=inside)
    faults = {node["fault"] for node in nodes.values()}
    assert code == 2 and faults == {
        "mkdir: cannot create directory '/proc/nothing': No such file or directory"
    }
    slurm_cluster.slurm.ask("scancel", number)


def test_a_job_reads_the_copy_of_its_node_and_ends_where_there_is_none(
    ssh_hosts: Bed, source: Path, monkeypatch: pytest.MonkeyPatch
):
    hosts = ssh_hosts.names[3:5]
    reached = ("--ssh-config", ssh_hosts.ssh_config)
    code, _ = stage(source, "--local", LOCAL, "--hosts", ",".join(hosts), *reached)
    assert code == 0
    monkeypatch.setenv("PACELINE_STAGE", str(source))
    corpus = staged_path(load_recipe(RECIPE), "corpus") / "code.jsonl"
    job = make_job(ssh_hosts, hosts, files={"rank.py": READS})
    assert job.cluster is not None
    on_disks = job.cluster.model_copy(update={"stage": LOCAL})
    reads = {"program": ("rank.py", str(corpus)), "cluster": on_disks}
    folder = ssh_hosts.shared / "reads"
    assert follow([start(type(job)(**{**vars(job), **reads}), folder)]) == [0]
    size = corpus.stat().st_size
    assert [log_of(folder, host).strip() for host in hosts] == [f"{host} {size}" for host in hosts]

    ssh_hosts.hosts[hosts[1]].call("rm", "-r", LOCAL)
    folder = ssh_hosts.shared / "reads-nothing"
    assert follow([start(type(job)(**{**vars(job), **reads}), folder)]) == [66]
    assert f"error: {hosts[1]}: corpus-" in log_of(folder, hosts[1])
    assert f"is not staged in {LOCAL}; run `paceline recipes stage RECIPE`" in log_of(
        folder, hosts[1]
    )
