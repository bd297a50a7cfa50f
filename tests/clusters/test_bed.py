"""The bed is what it says: hosts of their own, and faults that do what their names promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.bed import Bed, BedError, Plan
from tests.clusters.bed.needs import need
from tests.clusters.bed.process import Process
from tests.clusters.bed.site import BEDS
from tests.waiting import wait_until


def test_repair_undoes_every_fault_and_ends_what_was_left(ssh_hosts: Bed, tmp_path: Path) -> None:
    hosts = list(ssh_hosts.hosts.values())
    left = subprocess.Popen(hosts[5].argv(["sleep", "1000"]))
    hosts[0].crash()
    hosts[1].unplug()
    hosts[2].freeze()
    hosts[3].fill_disk(tmp_path)
    ssh_hosts.sshd.lock_out(hosts[4])
    ssh_hosts.repair()
    assert left.wait(timeout=10)
    assert [ssh_hosts.ssh(host.name, "true").returncode for host in hosts] == [0] * len(hosts)
    assert not hosts[3].covered()
    assert [host.leftovers() for host in hosts] == [{}] * len(hosts)


def test_a_bed_ends_with_the_process_that_it_is_tied_to() -> None:
    need(Plan(hosts=2))
    program = (
        "import sys, time; from tests.clusters.bed import Bed, Plan\n"
        "bed = Bed.up(sys.argv[1], Plan(hosts=2), tied=True)\n"
        "bed.hosts['node-001'].freeze()\n"
        "print(bed.site.anchor.pid, bed.hosts['node-002'].first.pid, flush=True); time.sleep(100)"
    )
    name = f"doomed-{os.getpid()}"
    argv = [sys.executable, "-c", program, name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        anchor, ordinary = map(int, parent.stdout.readline().split())
        with pytest.raises(BedError, match="is up already"):
            Bed.up(name, Plan(hosts=1))
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not Process.of(ordinary), "the end of a host")
    # A frozen process cannot end; the next bed that starts clears up after the dead one.
    Bed.up(f"{name}-after", Plan(hosts=1, ssh=False), tied=True).down()
    assert not Process.of(anchor)
    assert not (BEDS / name).exists()


def test_beds_can_be_had_by_hand() -> None:
    need(Plan(hosts=2))
    name = f"by-hand-{os.getpid()}"

    def do(verb: str, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.clusters.bed", verb, "--name", name, *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    settings = do("up", "--hosts", "2").stdout
    try:
        config = re.findall("BED_SSH_CONFIG=(.*)", settings)[0]
        answer = subprocess.check_output(["ssh", "-F", config, "node-002", "hostname"])
        assert answer == b"node-002\n"
        assert do("fault", "crash", "node-002").returncode == 0
        assert "node-002 is not running" in do("exec", "node-002", "hostname").stderr
        assert "there are node-001" in do("fault", "crash", "node-9").stderr
        assert do("repair").returncode == 0
        assert Bed.find(name).ssh("node-002", "true").returncode == 0
    finally:
        assert do("down").returncode == 0
    assert not (BEDS / name).exists()
