"""The bed is what it says: hosts of their own, and faults that do what their names promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.bed import Bed, BedError, Plan
from tests.clusters.bed.needs import need
from tests.clusters.bed.process import Process
from tests.clusters.bed.site import BEDS
from tests.waiting import wait_until

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(one)
print(dist.get_world_size(), int(one))
"""


def test_each_host_has_a_name_an_address_and_processes_of_its_own(ssh_hosts: Bed) -> None:
    names = [ssh_hosts.ssh(name, "hostname").stdout.strip() for name in ssh_hosts.names]
    assert names == [f"node-{i:03}" for i in range(1, 9)]
    first = ssh_hosts.hosts["node-001"]
    assert first.address in first.call("ip", "-br", "address", "show", "eth0")
    assert first.call("cat", "/proc/1/cmdline") == "sleep\0infinity\0"
    assert first.call("getent", "hosts", "node-008").split()[0] == ssh_hosts.addresses[7]


def test_names_that_nobody_knows_are_refused_at_once(ssh_hosts: Bed) -> None:
    began = time.monotonic()
    assert ssh_hosts.hosts["node-001"].run("getent", "hosts", "nobody.example").returncode
    assert time.monotonic() - began < 4  # a question of a name server has 5


def test_hosts_train_together(ssh_hosts: Bed) -> None:
    ranks: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(list(ssh_hosts.hosts.values())[:2]):
        settings = [f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=node-001", "MASTER_PORT=29500"]
        argv = host.argv(["env", *settings, "OMP_NUM_THREADS=1", sys.executable, "-c", SUM])
        ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["2 3\n", "2 3\n"]


def test_a_stranger_and_an_unknown_host_are_refused(ssh_hosts: Bed) -> None:
    ssh_hosts.sshd.lock_out(ssh_hosts.hosts["node-002"])
    assert "Permission denied" in ssh_hosts.ssh("node-002", "true").stderr
    ssh_hosts.sshd.let_in(ssh_hosts.hosts["node-002"])
    assert ssh_hosts.ssh("node-002", "true").returncode == 0
    by_address = ssh_hosts.ssh("127.0.0.9", "true", timeout=10)
    assert by_address.returncode == 255


def test_a_crashed_host_is_silent_and_boots_again(ssh_hosts: Bed) -> None:
    host = ssh_hosts.hosts["node-003"]
    sleeper = subprocess.Popen(host.argv(["sleep", "1000"]))
    host.crash()
    assert sleeper.wait(timeout=10)
    assert not host.up
    assert not host.processes()
    lost = ssh_hosts.ssh("-oConnectTimeout=1", "node-003", "true")
    assert "timed out" in lost.stderr or "No route" in lost.stderr
    ssh_hosts.boot("node-003")
    assert ssh_hosts.ssh("node-003", "hostname").stdout == "node-003\n"


def test_a_cut_link_leaves_the_processes_running(ssh_hosts: Bed) -> None:
    host = ssh_hosts.hosts["node-004"]
    host.unplug()
    assert ssh_hosts.ssh("-oConnectTimeout=1", "node-004", "true").returncode == 255
    assert host.call("hostname") == "node-004\n"
    host.plug()
    assert ssh_hosts.ssh("node-004", "true").returncode == 0


def test_a_frozen_host_takes_connections_and_answers_nothing(ssh_hosts: Bed) -> None:
    host = ssh_hosts.hosts["node-005"]
    host.freeze()
    frozen = ssh_hosts.ssh("-oConnectTimeout=1", "node-005", "true")
    assert "banner exchange" in frozen.stderr
    host.thaw()
    assert ssh_hosts.ssh("node-005", "true").returncode == 0


def test_a_full_disk_is_full_on_one_host_alone(ssh_hosts: Bed, tmp_path: Path) -> None:
    host, other = ssh_hosts.hosts["node-006"], ssh_hosts.hosts["node-007"]
    write = ("sh", "-c", f"seq 2000 > {tmp_path}/numbers")
    host.fill_disk(tmp_path)
    assert "No space left" in host.run(*write).stderr
    assert other.run(*write).returncode == 0
    host.uncover(tmp_path)
    assert host.run(*write).returncode == 0


def test_a_limited_host_gets_its_share_of_the_processor(ssh_hosts: Bed) -> None:
    host = ssh_hosts.hosts["node-007"]
    spin = "import time\nwhile time.monotonic() < {end}: pass\nprint(time.process_time())"
    assert not host.groups.times_throttled
    host.limit(0.2)
    program = spin.format(end=time.monotonic() + 1)
    assert float(host.call(sys.executable, "-S", "-c", program)) < 0.4
    assert host.groups.times_throttled


def test_one_host_can_see_another_program(ssh_hosts: Bed) -> None:
    host = ssh_hosts.hosts["node-008"]
    host.cover(Path("/usr/bin/date"), "#!/bin/sh\necho yesterday\n")
    assert host.call("date") == "yesterday\n"
    assert "yesterday" not in ssh_hosts.hosts["node-007"].call("date")


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


def test_slurm_runs_jobs_on_its_nodes_and_accounts_for_them(slurm_cluster: Bed) -> None:
    slurm = slurm_cluster.slurm
    assert sorted(slurm.ask("srun", "-N4", "hostname").split()) == slurm_cluster.names
    out = slurm_cluster.shared / "job.txt"
    wrap = ["--wrap", "srun hostname; echo $CUDA_VISIBLE_DEVICES"]
    slurm.ask("sbatch", "--wait", "-N2", "--gres=gpu:2", f"--output={out}", *wrap)
    assert sorted(out.read_text().split()) == ["0,1", "node-001", "node-002"]
    wait_until(lambda: "COMPLETED" in slurm.ask("sacct", "-nXP", "-o", "State"), "a row of sacct")


def test_slurm_takes_the_options_of_containers_where_it_has_the_plugin(
    slurm_cluster: Bed, slurm_without_accounting: Bed
) -> None:
    command = ("srun", "--container-image=nvcr.io#nvidia/nemo:24.09", "printenv")
    image = slurm_cluster.slurm.ask(*command, "BED_CONTAINER_IMAGE")
    assert image == "nvcr.io#nvidia/nemo:24.09\n"
    assert slurm_without_accounting.slurm.ask(*command, "PATH") == ""


def test_slurm_loses_and_finds_a_node(slurm_cluster: Bed) -> None:
    slurm, host = slurm_cluster.slurm, slurm_cluster.hosts["node-004"]
    slurm.drain(host, "memory")
    assert slurm.state(host) == "drained"
    assert "memory" in slurm.ask("sinfo", "-h", "-R", "-o", "%E")
    slurm.stop(host)
    assert not any("slurmd" in line for line in host.processes().values())
    slurm_cluster.repair()
    assert slurm.ask("srun", "-w", host.name, "hostname") == "node-004\n"


def test_slurm_without_accounting_knows_no_finished_job(slurm_without_accounting: Bed) -> None:
    slurm = slurm_without_accounting.slurm
    assert slurm.ask("srun", "-N2", "hostname")
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["sacct"], env=slurm_without_accounting.env, check=True, capture_output=True)


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
