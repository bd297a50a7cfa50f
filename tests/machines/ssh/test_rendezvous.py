"""Where ranks meet: an address all hosts find alike, and a free port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.node import host_facts
from paceline.machines.ssh import gloo_interface, rendezvous_address
from paceline.machines.ssh.checks import HostCheck
from tests.machines.ssh.fake_ssh import make_job


def hosts(*peers: str | None, **first: object) -> list[HostCheck]:
    """The first host, and others that find `peers` for its name."""
    head = HostCheck.model_validate({"host": "a", "server_address": "10.0.0.9", **first})
    return [head, *(HostCheck(host=f"b{i}", peer_address=peer) for i, peer in enumerate(peers))]


@pytest.mark.parametrize(
    ("checks", "address"),
    [
        (hosts("10.0.0.1", address="10.1.0.1"), "10.1.0.1"),
        (hosts(), "127.0.0.1"),
        (hosts("10.0.0.1", "10.0.0.1"), "10.0.0.1"),
        (hosts("10.0.0.1", "10.0.0.2"), "10.0.0.9"),
        (hosts("127.0.1.1", "127.0.1.1"), "10.0.0.9"),
        (hosts(None, None), "10.0.0.9"),
        (hosts("fe80::1%eth0"), "fe80::1%eth0"),
    ],
)
def test_the_address_is_one_that_all_hosts_reach(checks: list[HostCheck], address: str):
    assert rendezvous_address(checks) == address


def test_no_common_address_is_a_fault_that_asks_for_the_interface():
    with pytest.raises(SystemFaultError, match="--interface"):
        rendezvous_address(hosts(None, server_address=None))
    with pytest.raises(SystemFaultError, match="--interface"):
        rendezvous_address(hosts(None, server_address="127.0.0.1"))


def test_gloo_is_kept_off_a_loopback_address_unless_the_job_says_more():
    trap = HostCheck(host="a", own_address="127.0.1.1", reached_on="eth3")
    job = make_job(["a", "b"])
    assert gloo_interface(trap, job) == {"GLOO_SOCKET_IFNAME": "eth3"}
    assert gloo_interface(trap, make_job(["a"])) == {}
    assert gloo_interface(trap.model_copy(update={"own_address": "10.0.0.1"}), job) == {}
    assert gloo_interface(trap, make_job(["a", "b"], env={"GLOO_SOCKET_IFNAME": "ib0"})) == {}


def test_a_taken_port_is_passed_over_and_a_foreign_address_is_told():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        first, second = (s.getsockname()[1] for s in (taken, other))
        other.close()
        assert host_facts.free_port("127.0.0.1", str(first), str(second)) == {"port": second}
    answer = host_facts.free_port("192.0.2.1", "20000")
    assert answer["port"] is None
    assert "assign" in answer["why"]


def test_a_host_tells_its_facts_as_one_line_of_json(tmp_path: Path):
    (tmp_path / "nonce").write_text("content")
    program = Path(host_facts.__file__).read_text()
    words = ["facts", str(tmp_path), "nonce=content", "lo", "localhost", "127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert (facts["folder"], facts["address"], facts["reached_on"]) == ("shared", "127.0.0.1", "lo")
    assert facts["free_bytes"] > 0
    assert facts["torch"] is None or facts["torch"][0].isdigit()


def test_torch_is_seen_in_the_first_folder_of_pythonpath(tmp_path: Path):
    (tmp_path / "torch-9.8.7.dist-info").mkdir()
    program = Path(host_facts.__file__).read_text() + "\nprint(torch_version())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-c", program, "facts", str(tmp_path), "no=", "lo", "localhost", "::1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "9.8.7"


@pytest.mark.parametrize(
    ("nonce", "state"),
    [("nonce=content", "shared"), ("nonce=other", "another"), ("no=content", "missing")],
)
def test_a_folder_is_shared_only_when_its_nonce_is_read(tmp_path: Path, nonce: str, state: str):
    (tmp_path / "nonce").write_text("content")
    assert host_facts.folder_state(str(tmp_path), nonce) == state
