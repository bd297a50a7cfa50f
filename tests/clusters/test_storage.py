"""Disks of real hosts: each measures its own, and a host without the folder is named."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.scaling.storage.report import StorageReport
from tests.clusters.bed import Bed
from tests.clusters.test_check import paceline

BRIEF = ("--seconds", "0.1", "--size", "16MiB", "--ops", "sample", "--devices", "2", "--json")


def report(text: str) -> StorageReport:
    document = json.loads(text)
    for name in ("probe", "device", "best", "folder"):
        document.pop(name)
    return StorageReport.model_validate(document)


def test_every_host_measures_its_own_folder_over_ssh(ssh_hosts: Bed, tmp_path: Path):
    ssh_hosts.ssh("node-001", "mkdir", "-p", "/dev/shm/data")  # every host has its own /dev/shm
    over_ssh = ("--hosts", "node-[001-002]", "--ssh-config", str(ssh_hosts.ssh_config))
    place = ("/dev/shm/data", "--runs-dir", str(tmp_path))
    done = paceline(ssh_hosts, "probe", "storage", *place, *over_ssh, *BRIEF)
    assert done.returncode == 4, done.stderr
    measured = report(done.stdout)
    assert {row.host for row in measured.rows} == {"node-001"}
    assert measured.faults == ("node-002:/dev/shm/data is not a folder on this host",)
    left = ssh_hosts.ssh("node-001", "ls", "-A", "/dev/shm/data").stdout
    assert not left
