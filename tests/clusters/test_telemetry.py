"""Every node's power and energy are in the run folder, and no sampler outlives its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.telemetry import Telemetry, energy_between, read_telemetry
from paceline.machines.node.agent import SAMPLER, SYSTEM_ROOT
from tests.clusters import slurm_jobs, ssh_jobs
from tests.clusters.bed import Bed
from tests.machines.node.test_sampler import make_root
from tests.waiting import wait_until

UNTIL_TOLD = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.fixture
def bed(slurm_cluster: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    """Nodes of both launchers."""
    for name, value in slurm_cluster.settings.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster


def by_host(folder: Path) -> dict[str, Telemetry]:
    """What there is so far, by host."""
    texts = [path.read_text() for path in sorted((folder / "telemetry").glob("*.jsonl"))]
    read = [read_telemetry(text.splitlines()) for text in texts]
    return {reading.start.host: reading for reading in read if reading is not None}


def sampling(folder: Path, hosts: Sequence[str]) -> Callable[[], bool]:
    """Whether all hosts have been looked at twice."""

    def done() -> bool:
        telemetry = by_host(folder)
        return all(host in telemetry and len(telemetry[host].samples) > 1 for host in hosts)

    return done


def samplers(bed: Bed) -> list[str]:
    """Command lines of all samplers on the bed."""
    hosts = [host for host in bed.hosts.values() if host.up]
    return [line for host in hosts for line in host.leftovers().values() if SAMPLER in line]


def test_hosts_over_ssh_are_added_and_a_dark_one_is_named(bed: Bed, tmp_path: Path) -> None:
    root, hosts, folder = make_root(tmp_path / "host"), bed.names[:3], tmp_path / "run"
    domain = root / "sys/class/powercap/intel-rapl:0"
    bed.hosts[hosts[2]].cover(domain / "name", "psys")
    job = ssh_jobs.make_job(
        bed, hosts, files={"rank.py": UNTIL_TOLD}, sampled=True, env={SYSTEM_ROOT: str(root)}
    )
    run = ssh_jobs.start(job, folder)
    ssh_jobs.follow_until(run, sampling(folder, hosts[:2]))
    ssh_jobs.follow_until(run, lambda: len(by_host(folder)) == 3)
    assert len(samplers(bed)) == 2, "nothing is left to sample on the third"

    (domain / "energy_uj").write_text("17000000")
    seen = lambda host: by_host(folder)[host].samples[-1].cpu_energy_j == 7  # noqa: E731
    ssh_jobs.follow_until(run, lambda: all(map(seen, hosts[:2])))
    (folder / "go").touch()
    assert ssh_jobs.follow([run]) == [0]

    readings = [by_host(folder)[host] for host in hosts]
    samples = [reading.samples for reading in readings[:2]]
    spans = [(of_host[0].time_unix, of_host[-1].time_unix) for of_host in samples]
    window = max(first for first, _ in spans), min(last for _, last in spans)
    assert energy_between(readings[:2], *window).parts_j == {"cpu": pytest.approx(14)}
    energy = energy_between(readings, *window)
    assert energy.energy_j is None
    assert f"cpu: {hosts[2]}: the kernel has no energy counters" in str(energy.reason)
    assert not samplers(bed)


@pytest.mark.parametrize("how", ["stop", "kill", "crash"])
def test_no_sampler_is_left_on_a_host(bed: Bed, tmp_path: Path, how: str) -> None:
    """Ctrl-C or a time limit; an agent that is killed outright; a host that dies."""
    root, hosts = make_root(tmp_path / "host"), bed.names[:2]
    job = ssh_jobs.make_job(bed, hosts, sampled=True, env={SYSTEM_ROOT: str(root)})
    run = ssh_jobs.start(job, tmp_path / "run")
    ssh_jobs.follow_until(run, sampling(tmp_path / "run", hosts))
    assert len(samplers(bed)) == 2
    if how == "stop":
        run.stop()
    elif how == "kill":
        bed.hosts[hosts[0]].call("pkill", "-KILL", "-f", "agent.py")
        assert ssh_jobs.follow([run]) == [137]
    else:
        bed.hosts[hosts[1]].crash()
        ssh_jobs.follow([run])
    wait_until(lambda: not samplers(bed), "the end of the samplers", 60)
    if how == "crash":
        bed.boot(hosts[1])


@pytest.mark.parametrize("cancelled", [False, True])
def test_nodes_of_a_slurm_job_are_sampled_until_it_ends(
    bed: Bed, tmp_path: Path, cancelled: bool
) -> None:
    root, folder = make_root(tmp_path / "host"), tmp_path / "run"
    job = slurm_jobs.make_job(program=UNTIL_TOLD, env={SYSTEM_ROOT: str(root)})
    run = slurm_jobs.start(replace(job, sampled=True), folder)
    wait_until(
        lambda: run.poll() is None and len(by_host(folder)) == 2, "the start of the samplers", 90
    )
    hosts = [*by_host(folder)]
    wait_until(sampling(folder, hosts), "samples of both nodes", 60)
    assert set(hosts) <= set(bed.names) and len(samplers(bed)) == 2
    if cancelled:
        run.stop()
    else:
        (folder / "go").touch()
        assert slurm_jobs.wait(run) == 0
    wait_until(lambda: not samplers(bed), "the end of the samplers", 60)
    assert sorted(path.name[:6] for path in (folder / "telemetry").iterdir()) == [
        "00000-",
        "00001-",
    ]
