"""The Ray launcher without Ray: what it requests, and what its driver decides."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster, RaySettings
from paceline.core.job import Job
from paceline.files import temporary_locks
from paceline.machines import ray
from paceline.machines.placement import HostPlacement, with_placement
from paceline.machines.ray import driver_program as driver
from paceline.machines.ray.run import REMEDIES, NodeState, RayRun, request_for, start_driver

CLUSTER = Cluster(name="c", device="H100-SXM", devices_per_node=8, nodes=2, launcher="ray")


def node(address: str, hostname: str, **resources: float) -> dict[str, Any]:
    """A node as Ray lists it."""
    return {
        "NodeID": f"id-{address}",
        "Alive": True,
        "NodeManagerAddress": address,
        "NodeManagerHostname": hostname,
        "Resources": resources,
    }


class FakeRay:
    """A Ray that only lists nodes."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.list = [*nodes, {**node("10.0.0.9", "gone"), "Alive": False}]

    def nodes(self) -> list[dict[str, Any]]:
        return self.list


def bundles(fake: FakeRay, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """The bundles for `CLUSTER` with changes, or the message of a refusal."""
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(driver, "say", lambda **message: messages.append(message))
    request = request_for(CLUSTER.model_copy(update=changes))
    try:
        return driver.Driver(fake, request).bundles(driver.alive_nodes(fake))
    except SystemExit:
        assert messages[0]["kind"] in REMEDIES
        return messages[0]["text"]


GPUS = {"CPU": 64.0, "GPU": 8.0}


def test_a_node_is_named_by_its_host_name_if_no_other_has_it() -> None:
    fake = FakeRay(node("10.0.0.10", "a"), node("10.0.0.2", "vm"), node("10.0.0.3", "vm"))
    names = [about["name"] for about in driver.alive_nodes(fake)]
    assert names == []  # nodes without resources are not usable
    for about in fake.list:
        about["Resources"] = {"CPU": 1.0}
    names = [about["name"] for about in driver.alive_nodes(fake)]
    assert names == ["10.0.0.2", "10.0.0.3", "a"]


def test_a_bundle_has_the_devices_and_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = {**GPUS, "accelerator_type:H100": 1.0}
    fake = FakeRay(*(node(f"10.0.0.{n}", f"n{n}", **h100) for n in (1, 2, 3)))
    expected = {"CPU": 8, "GPU": 8, "accelerator_type:H100": 0.001}
    assert bundles(fake, monkeypatch) == [expected, expected]
    pinned = bundles(fake, monkeypatch, hosts=("n3", "10.0.0.1"))
    assert pinned == [{**expected, "node:10.0.0.3": 0.001}, {**expected, "node:10.0.0.1": 0.001}]
    settings = RaySettings(resources={"CPU": 0, "rack1": 1})
    assert bundles(fake, monkeypatch, ray=settings).startswith("2 nodes with 8 GPU and 1 rack1")


def test_another_type_of_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = {**GPUS, "accelerator_type:A100": 1.0}
    fake = FakeRay(node("10.0.0.1", "a", **a100), node("10.0.0.2", "b", **a100))
    assert bundles(fake, monkeypatch) == "no node has the device H100-SXM; its GPUs are A100"
    assert len(bundles(fake, monkeypatch, device="A100-SXM-80G")) == 2


@pytest.mark.parametrize(
    ("device", "types", "taken"),
    [
        ("RTX-4090", ("GeForce-RTX-3090",), None),
        ("RTX-4090", ("GeForce-RTX-3090", "GeForce-RTX-4090"), "GeForce-RTX-4090"),
        ("A100-SXM-40G", ("A100-80G",), None),
        ("A100-SXM-40G", ("A100-40GB", "A100-80GB"), "A100-40GB"),
        ("A100-SXM-80G", ("A100-40G", "A100-80G", "A100"), "A100-80G"),
        ("A100-SXM-80G", ("A100-40G", "A100"), "A100"),
        ("MI300X", ("AMD-Instinct-MI300X-OAM", "AMD-Instinct-MI250X"), "AMD-Instinct-MI300X-OAM"),
        ("TPU-v5p", ("TPU-V4",), None),
    ],
)
def test_the_type_of_a_gpu_has_its_model_and_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, types: tuple[str, ...], taken: str | None
) -> None:
    nodes = [
        node(f"10.0.0.{at}", f"n{at}", **{**GPUS, f"accelerator_type:{name}": 1.0})
        for at, name in enumerate(types)
    ]
    result = bundles(FakeRay(*nodes), monkeypatch, device=device, nodes=1)
    if taken is None:
        assert result == f"no node has the device {device}; its GPUs are {', '.join(types)}"
    else:
        assert [name for name in result[0] if name.startswith("acc")] == [
            f"accelerator_type:{taken}"
        ]


def test_the_driver_finds_ray_in_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise RuntimeError('ray of PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "driver.log"
    process = start_driver({**request_for(CLUSTER), "driver_python": None}, log)
    process.process.wait(60)
    process.close()
    assert "ray of PYTHONPATH" in log.read_text()


def test_a_host_that_ray_does_not_have_is_refused_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(node("10.0.0.1", "a", **GPUS), node("10.0.0.2", "b", CPU=4))
    text = bundles(fake, monkeypatch, hosts=("a", "c"))
    assert text == "c is not one of its nodes: a, b"
    assert bundles(fake, monkeypatch, hosts=("a", "b")) == "b lacks 8 CPU and 8 GPU"


class OutOfMemoryError(Exception):
    """Named as Ray's."""


class ActorDiedError(Exception):
    """Named as Ray's."""


@pytest.mark.parametrize(
    ("error", "is_alive", "reason"),
    [
        (OutOfMemoryError("Task was killed due to the node running low on memory"), True, "memory"),
        (ActorDiedError("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: x"), True, "mem"),
        (ActorDiedError("The actor died\nThe node has been marked dead"), False, "lost the node"),
        (ActorDiedError("The actor died.\nWorker exit detail: killed"), True, "detail: killed"),
    ],
)
def test_a_lost_worker_is_explained(error: Exception, is_alive: bool, reason: str) -> None:
    nodes = [node("10.0.0.1", "a", CPU=1)] if is_alive else []
    run = driver.Driver(FakeRay(*nodes), {})
    run.nodes = [{"id": "id-10.0.0.1", "name": "a"}]
    loss = run.loss(0, error)
    assert reason in loss["lost"] and loss.get("oom", False) == ("memory" in loss["lost"])


def test_a_copied_folder_sends_what_was_appended_and_what_was_replaced(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "logs").mkdir(parents=True)
    (there / "logs" / "rank.log").write_text("one\n")
    (there / "checkpoints").mkdir()
    (there / "checkpoints" / "weights").write_text("large")
    actor, run = driver.Node(), driver.Driver(None, {"folder": str(here)})
    actor.folder, actor.copy = str(there), True

    def copy() -> None:
        for change in actor.poll()[1]:
            run.write(*change)

    copy()
    with (there / "logs" / "rank.log").open("a") as file:
        file.write("two\n")
    (there / "new").write_text("newer and longer")
    copy()
    assert (here / "logs" / "rank.log").read_text() == "one\ntwo\n"
    (there / "draft").write_text("short")
    (there / "draft").replace(there / "new")
    copy()
    assert (here / "new").read_text() == "short" and not (here / "checkpoints").exists()
    assert actor.poll() == (None, [])


WORKER = """
import sys, time
from paceline.machines.ray.driver_program import Node
files, locks = (open(path, "rb").read() for path in sys.argv[1:])
node = Node()
node.start("", files, [], {}, "agent.log", "mark", locks.decode())
print(node.folder, node.process.wait(), flush=True)
sys.stdin.read()
node.remove()
"""
"""Worker of Ray that has started an agent and ends its job when its input ends."""


def test_the_next_job_of_a_node_removes_the_copy_of_a_killed_worker(tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    (tmp_path / "node.sh").write_text("touch done")
    archive = tmp_path / "run.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tmp_path / "node.sh", "node.sh")
    command = [sys.executable, "-c", WORKER, str(archive), temporary_locks.__file__]

    def start() -> tuple[subprocess.Popen[str], Path]:
        worker = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(place)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        folder, code = worker.stdout.readline().split()
        assert code == "0" and Path(folder, "done").exists()
        return worker, Path(folder)

    killed, left = start()
    working, in_use = start()
    killed.kill()
    killed.communicate()
    time.sleep(2 * temporary_locks.MIN_AGE_S)
    last, folder = start()
    assert not left.exists() and set(place.iterdir()) == {in_use, folder}
    for worker in (working, last):
        worker.communicate()
    assert not list(place.iterdir())


def test_a_dry_run_shows_what_each_node_starts() -> None:
    job = Job("run", "python3.11", ("trainer",), nodes=2, devices_per_node=8, cluster=CLUSTER)
    text = ray.render(job)
    assert "exec python3.11 agent.py 2" in text
    assert '#   nodes: 2 (chosen by Ray), each with {"CPU": 8, "GPU": 8}' in text
    with_environment = CLUSTER.model_copy(update={"ray": RaySettings(runtime_env={"pip": ["x"]})})
    job = Job("run", "/controller/python", ("trainer",), nodes=2, cluster=with_environment)
    assert "exec python3 agent.py 2" in ray.render(job)


def test_variables_of_the_runtime_environment_are_refused() -> None:
    with pytest.raises(ValueError, match="set variables with `env`"):
        RaySettings(runtime_env={"env_vars": {"TOKEN": "x"}})


def test_an_address_chooses_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cpu = Cluster(name="c", device="cpu", devices_per_node=1)
    cluster = with_placement(cpu, HostPlacement(nodes=3, ray_address="10.0.0.2:6379"))
    assert (cluster.launcher, cluster.nodes) == ("ray", 3)
    assert request_for(cluster)["address"] == "10.0.0.2:6379"
    cluster = with_placement(cpu, HostPlacement(nodes=3, launcher="ray"))
    assert request_for(cluster)["address"] == "10.0.0.1:6379"


def test_the_verdict_names_the_lost_nodes_and_an_oom_kill(tmp_path: Path) -> None:
    lost = NodeState("n2", "10.0.0.2", lost_reason="Ray lost the node", failed_s=1.0)
    nodes = [NodeState("n1", "10.0.0.1", code=1, failed_s=2.0), lost]
    job = Job("run", "python3", ("trainer",), nodes=2, cluster=CLUSTER)
    run = RayRun(None, job, tmp_path, "x=y", nodes)  # type: ignore[arg-type]
    verdict = run.verdict()
    assert verdict and (verdict.status, verdict.hosts) == ("failed", ("n2",))
    lost.is_oom = True
    verdict = run.verdict()
    assert verdict and verdict.status == "oom"
    lost.lost_reason, lost.failed_s = None, 3.0
    nodes[0].output = "bash: python9: command not found\n"
    verdict = run.verdict()
    assert verdict and verdict.reason.endswith(
        "ended with code 1: bash: python9: command not found"
    )


def test_a_driver_without_ray_names_the_extra(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    cluster = CLUSTER.model_copy(update={"ray": RaySettings(python=str(python))})
    with pytest.raises(SystemFaultError, match=r"No module named 'ray'; .*paceline\[ray\]"):
        ray.available_hosts(cluster)
