"""Hosts that have a loopback address under their own name, as Debian's installer leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.bed import Bed
from tests.clusters.slurm_jobs import make_job, start, wait

TOLD = """
import os, pathlib, socket
mine = [os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME", "none")]
pathlib.Path("told-" + os.environ["RANK"]).write_text(" ".join(mine))
if os.environ["RANK"] == "0":
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_server(place) as server:
        server.settimeout(30)
        server.accept()
else:
    for _ in range(100):
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5)
            break
        except OSError:
            import time
            time.sleep(0.1)
    else:
        raise SystemExit(9)
"""


def test_ranks_of_such_hosts_meet_under_slurm(
    slurm_cluster: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in slurm_cluster.settings.items():
        monkeypatch.setenv(name, value)
    names, hosts_text = slurm_cluster.names[:2], slurm_cluster.hosts_file.read_text()
    for name in names:
        lines = [line for line in hosts_text.splitlines() if not line.endswith(f" {name}")]
        text = "\n".join([f"127.0.1.1 {name}", *lines]) + "\n"
        slurm_cluster.hosts[name].cover(Path("/etc/hosts"), text)
    run = start(make_job(hosts=tuple(names), program=TOLD), tmp_path / "run")
    assert wait(run) == 0
    first, second = ((tmp_path / "run" / f"told-{rank}").read_text() for rank in (0, 1))
    assert first == f"{slurm_cluster.addresses[0]} eth0" and second == f"{names[0]} eth0"
