"""The SSH launcher on hosts with a real sshd: what starts, what is refused, what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines import JobEnd, ssh
from paceline.machines.node.script import random_ports
from paceline.machines.ssh import run as ssh_run
from paceline.machines.ssh.checks import HostRequirements, check_hosts
from tests.clusters.bed import Bed
from tests.clusters.ssh_jobs import (
    RANK,
    SLEEP,
    follow,
    follow_until,
    log_of,
    make_job,
    ranks_on,
    running,
    settings,
    start,
)
from tests.waiting import wait_until

LATE_DATE = """#!/bin/sh
exec python3 -c 'import time; print(time.time() - 90)'
"""


def test_ranks_run_on_every_host_and_secrets_show_nowhere(ssh_hosts: Bed, tmp_path: Path) -> None:
    hosts = ssh_hosts.names[:3]
    held = RANK.replace(SLEEP, "while not os.path.exists('go'):\n    time.sleep(0.05)")
    assert held != RANK
    job = make_job(
        ssh_hosts, hosts, files={"rank.py": held}, env={"MY_TOKEN": "s3 $cr'et", "OPEN": "a; b"}
    )
    run = start(job, tmp_path)
    follow_until(run, running(run, tmp_path))
    lines = [line for name in hosts for line in ssh_hosts.hosts[name].processes().values()]
    local_commands = [
        Path(f"/proc/{h.session.process.pid}/cmdline").read_text()
        for h in run.hosts
        if h.session.process
    ]
    (tmp_path / "go").touch()
    assert follow([run]) == [0]
    for rank, name in enumerate(hosts):
        assert log_of(tmp_path, name).startswith(f"{name} {rank} ")
        assert log_of(tmp_path, name).strip().endswith("s3 $cr'et")
    assert any("rank.py" in line for line in lines)
    assert not [line for line in [*lines, *local_commands] if "s3 $cr" in line]
    assert not [p for p in tmp_path.iterdir() if p.is_file() and "s3 $cr" in p.read_text()]
    assert run.verdict() is None
    assert not any(ranks_on(ssh_hosts, name) for name in hosts)
    assert not run.sockets.exists()


def test_a_job_in_a_folder_with_a_hostile_name_runs_there(ssh_hosts: Bed, tmp_path: Path) -> None:
    folder = tmp_path / "a b; touch $(id) 'x' \"y\"\n&z"
    run = start(make_job(ssh_hosts, ssh_hosts.names[:2], 0), folder)
    assert follow([run]) == [0]
    assert log_of(folder, "node-002").startswith("node-002 1 ")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name]


def test_every_host_at_fault_is_named_before_anything_starts(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    scratch, covered = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    covered.mkdir()
    late, full, blind, out, dead, frozen = (ssh_hosts.hosts[name] for name in ssh_hosts.names[1:7])
    late.cover(Path("/usr/bin/date"), LATE_DATE)
    full.fill_disk(scratch)
    blind.fill_disk(covered, 10**9)
    ssh_hosts.sshd.lock_out(out)
    dead.crash()
    frozen.freeze()
    began = time.monotonic()
    job = make_job(ssh_hosts, [*ssh_hosts.names, "nobody"], env={"TMPDIR": str(scratch)})
    with pytest.raises(SystemFaultError) as caught:
        start(job, covered)
    message = str(caught.value)
    for part in (
        "7 of 9 hosts",
        "s behind (at most 1 s), node-003 has 0 B",
        "node-002 its clock is ",
        f"free in {scratch}",
        f"node-004 does not see {covered}",
        "node-005 refuses to log in without a password",
        "node-[006-007] does not answer",
        "nobody its name does not resolve",
        "ssh-copy-id",
    ):
        assert part in message
    assert time.monotonic() - began < settings(ssh_hosts).connect_timeout_s + 10
    assert not ranks_on(ssh_hosts, "node-001")
    assert not ranks_on(ssh_hosts, "node-008")
    assert not list((covered / "logs").glob("rank-*"))


def test_an_unknown_host_key_is_refused_with_the_way_to_accept_it(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    known_hosts = tmp_path / "known"
    known_hosts.write_text("")
    config.write_text(f"UserKnownHostsFile {known_hosts}\n{ssh_hosts.ssh_config.read_text()}")
    limits = settings(ssh_hosts).model_copy(update={"config": str(config)})
    (check,) = check_hosts(["node-001"], HostRequirements(sys.executable), limits)
    assert check.fault == "its host key is unknown"
    assert "fingerprint" in (check.remedy or "")
    assert known_hosts.read_text() == ""


def test_neighbouring_jobs_meet_at_different_ports_and_a_taken_one_is_left_alone(
    ssh_hosts: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = random_ports()[0]
    monkeypatch.setattr(ssh, "random_ports", lambda: [taken, *random_ports()])
    listen = f"s = socket.create_server(('', {taken})); print('up', flush=True); time.sleep(600)"
    listener = ssh_hosts.hosts["node-001"].argv(
        [sys.executable, "-c", f"import socket, time; {listen}"]
    )
    with subprocess.Popen(listener, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        first = start(make_job(ssh_hosts, ssh_hosts.names[:2], 1), tmp_path / "first")
        second = start(make_job(ssh_hosts, ssh_hosts.names[:2], 1), tmp_path / "second")
        assert follow([first, second]) == [0, 0]
        assert ssh_hosts.hosts["node-001"].run("pgrep", "-f", str(taken)).returncode == 0
        holder.kill()
    ports = [log_of(tmp_path / name, "node-002").split()[2] for name in ("first", "second")]
    assert len({*ports, str(taken)}) == 3


def test_ranks_that_cannot_be_started_say_why(ssh_hosts: Bed, tmp_path: Path) -> None:
    job = make_job(ssh_hosts, ssh_hosts.names[:1])
    ssh.prepare(job, tmp_path)
    (tmp_path / "agent.py").write_text("raise SystemExit('no agent today')")
    run = ssh.submit(job, tmp_path)
    assert follow([run]) == [1]
    assert run.verdict() == JobEnd(
        "failed", "node-001: ended with code 1: no agent today", ("node-001",)
    )


def test_a_time_limit_ends_ranks_that_hang_and_nothing_that_is_not_the_jobs(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    stranger = ssh_hosts.hosts["node-001"].argv(
        [sys.executable, "-c", "import time; time.sleep(600)", "rank.py"]
    )
    with subprocess.Popen(stranger) as other:
        run = start(make_job(ssh_hosts, ssh_hosts.names[:2], timeout_s=0.1), tmp_path)
        follow_until(run, running(run, tmp_path))
        ssh_hosts.hosts["node-002"].call("pkill", "-STOP", "-f", "rank.py")
        wait_until(lambda: run.timed_out, "the time limit")
        run.stop()
        assert len(ranks_on(ssh_hosts, "node-001")) == 1
        assert other.poll() is None
        other.kill()
    assert ranks_on(ssh_hosts, "node-002") == []


def test_a_connection_that_hangs_is_gone_round_by_a_second_one(
    ssh_hosts: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_run, "CONFIRM_S", 1.0)
    run = start(make_job(ssh_hosts, ssh_hosts.names[:2]), tmp_path)
    follow_until(run, running(run, tmp_path))
    follow_until(run, lambda: all(host.group for host in run.hosts))
    for host in run.hosts:
        assert host.session.process
        os.kill(host.session.process.pid, signal.SIGSTOP)
    left: list[str] = []
    close = ssh_run.SshRun.close

    def see_and_close(run: ssh_run.SshRun) -> None:
        left.extend(line for name in ssh_hosts.names[:2] for line in ranks_on(ssh_hosts, name))
        close(run)

    monkeypatch.setattr(ssh_run.SshRun, "close", see_and_close)
    run.stop()
    assert left == []


Ended = tuple[JobEnd | None, list[str], list[str]]
"""The verdict, the ranks left on the healthy host, and those left on the other once it is back."""


@pytest.fixture(scope="module")
def lost(ssh_hosts: Bed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Three jobs on two hosts each; the second host of each is lost in another way."""
    folder, names = tmp_path_factory.mktemp("lost"), ssh_hosts.names
    pairs = {"crashed": names[:2], "unplugged": names[2:4], "frozen": names[4:6]}
    runs = {why: start(make_job(ssh_hosts, pair), folder / why) for why, pair in pairs.items()}
    for why, run in runs.items():
        follow_until(run, running(run, folder / why))
    bad_hosts = {why: ssh_hosts.hosts[pair[1]] for why, pair in pairs.items()}
    bad_hosts["crashed"].crash()
    bad_hosts["unplugged"].unplug()
    bad_hosts["frozen"].freeze()
    assert follow(list(runs.values())) == [255, 255, 255]
    bad_hosts["unplugged"].plug()
    bad_hosts["frozen"].thaw()
    wait_until(
        lambda: not any(ranks_on(ssh_hosts, h.name) for h in bad_hosts.values()), "their end", 90
    )
    ssh_hosts.boot(bad_hosts["crashed"].name)
    return {
        why: (run.verdict(), ranks_on(ssh_hosts, pairs[why][0]), ranks_on(ssh_hosts, pairs[why][1]))
        for why, run in runs.items()
    }


@pytest.mark.parametrize(
    ("why", "host"),
    [("crashed", "node-002"), ("unplugged", "node-004"), ("frozen", "node-006")],
)
def test_a_host_that_is_lost_is_named_and_nothing_stays_behind(
    lost: dict[str, Ended], why: str, host: str
) -> None:
    verdict, on_healthy, on_lost = lost[why]
    assert verdict is not None
    assert (verdict.status, verdict.hosts) == ("failed", (host,))
    assert host in verdict.reason
    assert (on_healthy, on_lost) == ([], [])


def test_the_head_listens_at_its_interface_alone(ssh_hosts: Bed, tmp_path: Path) -> None:
    listens = (
        "import os, socket, time\n"
        "where = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "socket.create_server(where) if os.environ['RANK'] == '0' else None\n"
        "print(*where, os.environ['GLOO_SOCKET_IFNAME'])\n"
    )
    job = make_job(ssh_hosts, ssh_hosts.names[:2], files={"rank.py": listens})
    assert job.cluster
    cluster = job.cluster.model_copy(update={"interface": "eth0"})
    run = start(replace(job, cluster=cluster), tmp_path)
    assert follow([run]) == [0]
    address, _, interface = log_of(tmp_path, "node-002").split()
    assert (address, interface) == (ssh_hosts.addresses[0], "eth0")
    assert address not in socket.gethostbyname_ex(socket.gethostname())[2]
