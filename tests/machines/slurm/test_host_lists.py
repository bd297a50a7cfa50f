"""Hosts that Slurm names, and what it says against a question."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host
from paceline.machines.slurm.client import allocation_hosts, partition_hosts


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stand in for Slurm's; each writes down how it was called."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def answer(folder: Path, command: str, text: str, code: int = 0) -> None:
    path = folder / command
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\nprintf "%s" "{text}"\nexit {code}\n')
    path.chmod(0o755)


def test_a_running_job_names_its_hosts(slurm: Path):
    answer(slurm, "squeue", "node[001-003],gpu-a\n")
    assert names(allocation_hosts("17")) == ["node001", "node002", "node003", "gpu-a"]
    assert "--jobs 17" in (slurm / "asked").read_text()


def test_settings_of_the_users_shell_hide_no_hosts(slurm: Path, monkeypatch: pytest.MonkeyPatch):
    for name, command in (("SQUEUE_PARTITION", "squeue"), ("SINFO_PARTITION", "sinfo")):
        monkeypatch.setenv(name, "another")
        (slurm / command).write_text(f'#!/bin/sh\necho "${{{name}:-idle node-1}}"\n')
        (slurm / command).chmod(0o755)
    assert names(partition_hosts()) == ["node-1"]
    assert names(allocation_hosts("4711")) == ["idle", "node-1"]


def test_a_job_that_waits_has_none(slurm: Path):
    answer(slurm, "squeue", "")
    with pytest.raises(UserError, match="job 17: is not running"):
        allocation_hosts("17")


def test_idle_hosts_of_a_partition(slurm: Path):
    answer(slurm, "sinfo", "idle node[1-2]\nidle node[2,5]\ndrain node3\nidle* node4\nmix node6\n")
    assert names(partition_hosts("gpu")) == ["node1", "node2", "node5"]
    assert "--partition=gpu" in (slurm / "asked").read_text()
    answer(slurm, "sinfo", "drain node3")
    with pytest.raises(UserError, match="partition gpu: has no idle node"):
        partition_hosts("gpu")
    with pytest.raises(UserError, match="is not a valid partition name"):
        partition_hosts("-x; reboot")


def test_what_slurm_says_against_it_is_told(slurm: Path, monkeypatch: pytest.MonkeyPatch):
    answer(slurm, "sinfo", "", code=1)
    with pytest.raises(SystemFaultError, match="sinfo: exit code 1"):
        partition_hosts()
    monkeypatch.setenv("PATH", str(slurm / "nothing"))
    with pytest.raises(SystemFaultError, match="is not installed on this machine"):
        allocation_hosts("17")
