"""Host names, ranges and hostfiles: what is read, and what is refused before a shell sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import (
    Host,
    check_name,
    compress,
    expand,
    first_repeated,
    hostfile_text,
    parse_hostfile,
)

names = st.lists(
    st.builds("{}{}".format, st.sampled_from(["node-", "gpu", "a1b"]), st.integers(0, 120)),
    min_size=1,
    max_size=30,
    unique=True,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-1", ["node-1"]),
        ("node[001-003]", ["node001", "node002", "node003"]),
        ("node[8-10,3]x,gpu-a", ["node8x", "node9x", "node10x", "node3x", "gpu-a"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.0.1, 10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
        ("fe80::1", ["fe80::1"]),
        ("::1,[::1],FD00:0::5", ["::1", "::1", "fd00::5"]),
        ("fd00::[1-2]", ["fd00::1", "fd00::2"]),
    ],
)
def test_ranges_stand_for_hosts_in_their_order(text: str, hosts: list[str]):
    assert expand(text) == hosts


@given(names)
def test_a_compressed_list_stands_for_the_same_hosts(hosts: list[str]):
    assert expand(compress(hosts)) == hosts


def test_serial_numbers_longer_than_a_range_may_write_are_read_again():
    hosts = [f"gpu{20240100120 + n}" for n in range(3)]
    assert compress(hosts) == "gpu20[240100120-240100122]" and expand(compress(hosts)) == hosts


def test_neighbours_become_a_range():
    assert (
        compress([f"node-{n:03}" for n in (1, 2, 3, 7)] + ["login"])
        == "node-[001-003],node-007,login"
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-oProxyCommand=x",
        "a;b",
        "$(id)",
        "a b",
        "a\nb",
        "`id`",
        "../x",
        "a/b",
        "a'b",
        "a|b",
        "node-1:8",
        "é",
        "fd00::1%eth0",
        "[fd00::1",
        "fd00::12345",
        "a:b:c",
        "[node-1]",
    ],
)
def test_what_a_shell_or_ssh_could_read_otherwise_is_no_host_name(name: str):
    with pytest.raises(UserError, match="is not a host name"):
        check_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "n[3-1]",
        "n[a]",
        "n[]",
        "n[1",
        "n[0-999999]",
        "n[1-999][1-999]",
        "n[0-99999999]x[1-9]",
        "[1]" * 3000,
        "n[1-2]" + "[1-2]" * 40,
        f"n[1-{'9' * 5000}]",
        ",".join(["n[1-99999]"] * 3),
    ],
)
def test_a_range_that_is_none_or_too_large_is_refused(text: str):
    with pytest.raises(UserError):
        expand(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-1 slots=8\nnode-2 slots=8\n", [("node-1", 8), ("node-2", 8)]),
        ("# two nodes\nnode-1\nnode-2  # the other\n", [("node-1", None), ("node-2", None)]),
        ("node-1\tslots=8\nnode-2 \t slots=8\n", [("node-1", 8), ("node-2", 8)]),
        ("node-1:4\nnode-2 slots=4 max_slots=8", [("node-1", 4), ("node-2", 4)]),
        ("node-[1-2] slots=2", [("node-1", 2), ("node-2", 2)]),
        ("fe80::1", [("fe80::1", None)]),
        ("::1\nfd00::5 slots=8\n[fd00::6]:4\n", [("::1", None), ("fd00::5", 8), ("fd00::6", 4)]),
        ("[fd00::7] slots=2", [("fd00::7", 2)]),
    ],
)
def test_hostfiles_of_deepspeed_mpi_and_the_plain_kind(
    text: str, hosts: list[tuple[str, int | None]]
):
    assert [(host.name, host.slots) for host in parse_hostfile(text)] == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n\nb\n", "hosts:2: is blank"),
        ("a\nb\na\n", "hosts:3: a was named in line 1 before"),
        ("node[1-3]\nnode2", "hosts:2: node2 was named in line 1"),
        ("Node-1\nnode-1", "hosts:2: node-1 was named in line 1"),
        ("fd00::5\n[FD00:0:0::5]:8", "hosts:2: fd00::5 was named in line 1"),
        ("node[1,1]", "hosts:1: node1 was named in line 1"),
        ("a slots=0", "hosts:1: has no slots"),
        ("a slots=" + "9" * 5000, "hosts:1: 'slots=9"),
        ("a:" + "9" * 5000, "is not a host name"),
        ("a:8 slots=4", "hosts:1: sets its slots twice"),
        ("a slots=8 slots=4", "hosts:1: sets its slots twice"),
        ("a gpus=8", "hosts:1: 'gpus=8' is unknown"),
        ("a;rm -rf /", "hosts:1"),
        ("", "hosts: names no host"),
        (" \n\n", "hosts: names no host"),
        ("# nobody", "names no host"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str):
    with pytest.raises(UserError) as caught:
        parse_hostfile(text, "hosts")
    assert message in str(caught.value)


@pytest.mark.parametrize(("hosts", "twice"), [(["a", "b", "A"], "A"), (["a", "ab"], None)])
def test_a_host_is_one_whatever_the_case_of_its_letters(hosts: list[str], twice: str | None):
    assert first_repeated(hosts) == twice


def test_a_clusters_hosts_are_different_ones():
    with pytest.raises(ValueError, match="B is listed twice"):
        Cluster(name="c", device="cpu", devices_per_node=1, nodes=3, hosts=("a", "b", "B"))


def test_a_hostfile_that_was_written_is_read_again():
    hosts = (Host(name="a", slots=8), Host(name="b"))
    assert parse_hostfile(hostfile_text(hosts)) == hosts
