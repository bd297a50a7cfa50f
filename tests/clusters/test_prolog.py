"""The scripts of the guide in a real Slurm: a slow node is drained, a good one runs its job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.bed import Bed, Plan
from tests.clusters.conftest import started
from tests.waiting import wait_until

GUIDE = Path(__file__).parents[2] / "docs/how-to/slurm-prolog.md"
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of the guide, for this installation of Paceline."""
    folder = tmp_path_factory.mktemp("slurm")
    python = f"{sys.executable} -m paceline"
    for script in re.findall(
        r"```bash\n(#!/bin/bash\n# /etc/slurm/.*?)```", GUIDE.read_text(), re.S
    ):
        name = re.search(r"/etc/slurm/(\S+)", script)
        assert name
        text = script.replace("/opt/paceline/bin/paceline", python)
        text = text.replace("--node ", "--node --device cpu --time-limit 60 ")
        text = text.replace("timeout 60", f"timeout {LIMIT_S:g}")
        # All nodes are on this machine: each has runs and a last line of its own.
        text = text.replace("/var/lib/paceline", f"{folder}/$SLURMD_NODENAME")
        (folder / name[1]).write_text(
            f"{text.splitlines()[0]}\nexport PATH={'/usr/bin:/bin'}\n{text}"
        )
        (folder / name[1]).chmod(0o755)
    for node in ("node-001", "node-002"):
        (folder / node).mkdir()
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Bed]:
    lines = f"Prolog={folder}/paceline-prolog.sh\nPrologFlags=Alloc\nPrologEpilogTimeout=200\n"
    yield from started("prolog", Plan(hosts=2, slurm=True, accounting=False, slurm_lines=lines))


def run(bed: Bed, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=bed.env, cwd=bed.shared, capture_output=True, text=True, timeout=2 * LIMIT_S
    )


def state_of(bed: Bed, node: str) -> str:
    return run(bed, "scontrol", "show", "node", node).stdout


def make_slow(folder: Path, node: str) -> None:
    """Give a node a history in which it was 100 times as fast as in its last check."""
    (newest,) = (folder / node / "runs/checks").glob("*/check.json")
    report = json.loads(newest.read_text())
    newest.unlink()
    for number in range(3):
        for figure in report["hosts"][0]["figures"].values():
            figure["value"] *= 1.01 if number else 100
        earlier = newest.parents[1] / f"old-{number}"
        earlier.mkdir()
        (earlier / "check.json").write_text(json.dumps(report))


@pytest.mark.alone
def test_a_prolog_lets_good_nodes_run_and_drains_a_slow_one(cluster: Bed, folder: Path) -> None:
    done = run(cluster, "srun", "-N2", "hostname")
    assert done.returncode == 0, done.stderr
    for node in ("node-001", "node-002"):
        assert ": fit: " in (folder / node / "last-check.txt").read_text()

    make_slow(folder, "node-002")
    run(cluster, "srun", "-w", "node-002", "--immediate=90", "hostname")

    wait_until(
        lambda: "DRAIN" in run(cluster, "scontrol", "show", "node", "node-002").stdout, "drain"
    )
    assert "DRAIN" not in run(cluster, "scontrol", "show", "node", "node-001").stdout
    assert "below its own history" in (folder / "node-002/last-check.txt").read_text()
    assert run(cluster, "srun", "-w", "node-001", "hostname").returncode == 0

    run(cluster, "scontrol", "update", "nodename=node-002", "state=resume")
    settings = f"SLURM_CONF={cluster.env['SLURM_CONF']}"
    health = ["env", settings, "SLURMD_NODENAME=node-002", str(folder / "paceline-health.sh")]
    cluster.hosts["node-002"].call(*health)
    shown = state_of(cluster, "node-002")
    assert "DRAIN" in shown and "Reason=paceline: " in shown and "below its own history" in shown
