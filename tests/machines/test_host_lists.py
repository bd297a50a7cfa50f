"""Hosts come from what names them, and whatever could be a command is refused with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host, parse_hostfile
from paceline.machines.host_lists import (
    cut,
    from_allocation,
    from_etc_hosts,
    from_partition,
    write_groups,
)

ETC_HOSTS = """127.0.0.1 localhost
# 10.0.0.9 ml-node-009 out of order
10.0.0.1 ml-node-001 n1  # first
10.0.0.2 n2 ml-node-002
10.0.0.3\tml-node-003
fd00::1 ml-node-001
10.0.0.7 login
"""


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


@pytest.fixture
def etc_hosts(tmp_path: Path) -> Path:
    path = tmp_path / "etc hosts"
    path.write_text(ETC_HOSTS)
    return path


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("-node-", ["ml-node-001", "ml-node-002", "ml-node-003"]),
        ("ml-node-00[12]", ["ml-node-001", "ml-node-002"]),
        ("n?", ["n1", "n2"]),
        ("login", ["login"]),
    ],
)
def test_names_that_match_count_once_and_comments_never(
    etc_hosts: Path, pattern: str, matches: list[str]
):
    assert names(from_etc_hosts(pattern, etc_hosts)) == matches


def test_a_pattern_that_nothing_matches_is_an_error_not_an_empty_file(etc_hosts: Path):
    with pytest.raises(UserError, match=r"no host matches 'logon'; did you mean 'login'"):
        from_etc_hosts("logon", etc_hosts)
    with pytest.raises(UserError, match="cannot be read"):
        from_etc_hosts("x", etc_hosts / "absent")


@pytest.mark.parametrize("name", ["a-node-1;reboot", "$(reboot)-node-", "-oProxyCommand=-node-"])
def test_a_name_that_could_be_a_command_is_refused_with_its_line(tmp_path: Path, name: str):
    path = tmp_path / "hosts"
    path.write_text(f"10.0.0.1 ml-node-1\n10.0.0.2 {name}\n")
    with pytest.raises(UserError, match=r"hosts:2: .* is no host name"):
        from_etc_hosts("-node-", path)


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
    assert names(from_allocation("17")) == ["node001", "node002", "node003", "gpu-a"]
    assert "--jobs 17" in (slurm / "asked").read_text()


def test_settings_of_the_users_shell_hide_no_hosts(slurm: Path, monkeypatch: pytest.MonkeyPatch):
    for name, command in (("SQUEUE_PARTITION", "squeue"), ("SINFO_PARTITION", "sinfo")):
        monkeypatch.setenv(name, "another")
        (slurm / command).write_text(f'#!/bin/sh\necho "${{{name}:-idle node-1}}"\n')
        (slurm / command).chmod(0o755)
    assert names(from_partition()) == ["node-1"]
    assert names(from_allocation("4711")) == ["idle", "node-1"]


def test_a_job_that_waits_has_none(slurm: Path):
    answer(slurm, "squeue", "")
    with pytest.raises(UserError, match="job 17: has no hosts"):
        from_allocation("17")


def test_idle_hosts_of_a_partition(slurm: Path):
    answer(slurm, "sinfo", "idle node[1-2]\nidle node[2,5]\ndrain node3\nidle* node4\nmix node6\n")
    assert names(from_partition("gpu")) == ["node1", "node2", "node5"]
    assert "--partition=gpu" in (slurm / "asked").read_text()
    answer(slurm, "sinfo", "drain node3")
    with pytest.raises(UserError, match="partition gpu: has no idle node"):
        from_partition("gpu")
    with pytest.raises(UserError, match="is no name of one"):
        from_partition("-x; reboot")


def test_what_slurm_says_against_it_is_told(slurm: Path, monkeypatch: pytest.MonkeyPatch):
    answer(slurm, "sinfo", "", code=1)
    with pytest.raises(SystemFaultError, match="sinfo: exit code 1"):
        from_partition()
    monkeypatch.setenv("PATH", str(slurm / "nothing"))
    with pytest.raises(SystemFaultError, match="is not installed here"):
        from_allocation("17")


HOSTS = tuple(Host(name=f"n{number}", slots=8) for number in range(1, 6))


def test_a_cut_names_who_is_left_over():
    parts = cut(HOSTS, 2)
    assert [names(group) for group in parts.groups] == [["n1", "n2"], ["n3", "n4"]]
    assert names(parts.left_over) == ["n5"]
    with pytest.raises(UserError, match="1 to 5 nodes"):
        cut(HOSTS, 6)


def test_groups_become_hostfiles_in_a_new_folder(tmp_path: Path):
    folder = tmp_path / "groups of mine"
    first, second = write_groups(cut(HOSTS, 2), folder)
    assert (first.name, second.name) == ("hosts-2-0001.txt", "hosts-2-0002.txt")
    assert parse_hostfile(second.read_text()) == HOSTS[2:4]
    with pytest.raises(UserError, match=r"holds hosts-2-000\d.txt; name a new folder"):
        write_groups(cut(HOSTS, 1), folder)
