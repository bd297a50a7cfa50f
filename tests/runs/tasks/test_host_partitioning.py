"""How runs share hosts, an allocation, Slurm's queue, or one machine; and what they cannot."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.core.hosts import Host, expand
from paceline.files.recipe import load_recipe
from paceline.machines.placement import HostPlacement, Request, with_slurm_nodes
from paceline.machines.probe import inventory
from paceline.machines.slurm import client
from paceline.runs.plan import make_plan
from paceline.runs.tasks import host_partitioning
from paceline.runs.tasks.host_partitioning import Partitioning, partition_hosts, slots_for
from paceline.runs.tasks.slot import MAX_SLOTS
from tests.example import make_spec
from tests.machines.slurm.fake_slurm import put

GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80e9}


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def shared(
    where: HostPlacement | None = None,
    nodes: int | None = None,
    at_once: int | None = None,
    machine: dict[str, Any] | None = None,
) -> Partitioning:
    request = Request(
        "tiny-gpt", device="auto" if machine else "cpu", where=where or HostPlacement()
    )
    everything = inventory.inventory()
    return partition_hosts(
        request, load_recipe("tiny-gpt"), {**everything, **(machine or {})}, nodes, at_once
    )


def on(text: str) -> HostPlacement:
    return HostPlacement(hosts=tuple(Host(name=name) for name in expand(text)))


def hosts_of(partitioning: Partitioning) -> list[tuple[str, ...]]:
    return [slot.hosts for slot in partitioning.slots]


def test_without_a_wish_everything_is_one_slot():
    partitioning = shared(on("n[1-4]"))
    assert hosts_of(partitioning) == [()] and partitioning.request.where == on("n[1-4]")
    assert not partitioning.notices


def test_hosts_are_shared_out_in_neighbours_and_the_idle_ones_are_told():
    partitioning = shared(on("n[1-5]"), nodes=2)
    assert hosts_of(partitioning) == [("n1", "n2"), ("n3", "n4")]
    assert [host.name for host in partitioning.request.where.hosts] == ["n1", "n2"]
    assert partitioning.request.where.nodes == 2 and "idle: n5" in partitioning.notices


@pytest.mark.parametrize(
    ("nodes", "at_once", "parts"),
    [
        (1, 2, [("n1",), ("n2",)]),
        (None, 2, [("n1", "n2"), ("n3", "n4")]),
        (4, None, [("n1", "n2", "n3", "n4")]),
    ],
)
def test_no_more_slots_than_asked_for_and_even_ones_without_a_size(
    nodes: int | None, at_once: int | None, parts: list[tuple[str, ...]]
):
    assert hosts_of(shared(on("n[1-4]"), nodes, at_once)) == parts


def test_more_nodes_than_there_are_is_refused():
    with pytest.raises(UserError, match="there are 2 hosts"):
        shared(on("n[1-2]"), nodes=3)
    with pytest.raises(UserError, match="only this machine is available"):
        shared(nodes=2)


def test_an_allocation_is_shared_by_its_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job_ids: list[str] = []

    def nodes_of(job: str) -> tuple[Host, ...]:
        job_ids.append(job)
        return tuple(Host(name=f"n{k}") for k in range(1, 5))

    monkeypatch.setattr(client, "allocation_hosts", nodes_of)
    partitioning = shared(nodes=2)
    assert hosts_of(partitioning) == [("n1", "n2"), ("n3", "n4")] and job_ids == ["7"]
    assert (
        partitioning.request.where.launcher == "slurm"
        and partitioning.request.where.allocation == "7"
    )


def test_a_slurm_that_answers_is_a_queue_and_one_that_does_not_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put(tmp_path, monkeypatch, sbatch="true", scontrol="echo 'Slurmctld(primary) at head is UP'")
    partitioning = shared(nodes=2)
    assert partitioning.queued and len(partitioning.slots) == MAX_SLOTS
    assert partitioning.request.where.nodes == 2
    put(tmp_path, monkeypatch, scontrol="echo 'Slurmctld(primary) at head is DOWN'; exit 1")
    with pytest.raises(UserError, match="only this machine is available"):
        shared(nodes=2)
    assert with_slurm_nodes(Request("tiny-gpt")).where.launcher is None


def test_cores_and_memory_of_one_machine_are_shared_evenly():
    cores = len(host_partitioning.whole_cores(os.sched_getaffinity(0)))
    if cores < 2:
        pytest.skip("there is one core")
    partitioning = shared(at_once=2)
    first, second = (slot.cores for slot in partitioning.slots)
    assert len(first) == len(second) == cores // 2 and not {*first} & {*second}
    assert partitioning.inventory["cpu"]["usable_cores"] == cores // 2
    assert partitioning.inventory["memory_bytes"] == inventory.inventory()["memory_bytes"] / 2
    assert "slow each other down" in partitioning.notices[0]
    plan = make_plan(replace(partitioning.request, devices=1), partitioning.inventory)
    assert plan.spec.cluster.threads_per_device == cores // 2
    with pytest.raises(UserError, match=f"has {cores} cores"):
        shared(at_once=cores + 1)


def test_gpus_of_one_machine_are_shared_by_their_visible_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    packages = {"torch": "2.13.0"}
    partitioning = shared(at_once=2, machine={"gpus": [GPU] * 4, "packages": packages})
    assert [slot.devices for slot in partitioning.slots] == [("4", "5"), ("6", "7")]
    assert len(partitioning.inventory["gpus"]) == 2
    with pytest.raises(UserError, match="has 4 GPUs"):
        shared(at_once=5, machine={"gpus": [GPU] * 4, "packages": packages})


def test_further_runs_go_to_other_hosts_or_as_many_slots_as_asked_for():
    cluster = make_spec().cluster.model_copy(
        update={"launcher": "ssh", "nodes": 2, "hosts": ("a1", "a2")}
    )
    spec = make_spec(cluster=cluster)
    assert [slot.hosts for slot in slots_for(spec, HostPlacement(), None)] == [("a1", "a2")]
    four = slots_for(spec, on("b[1-4]"), 2)
    assert [slot.hosts for slot in four] == [("b1", "b2"), ("b3", "b4")]
    with pytest.raises(UserError, match="needs 2 nodes; there is 1 host"):
        slots_for(spec, on("b1"), None)


def test_further_runs_on_one_machine_keep_their_share_of_it():
    spec = make_spec()
    assert [slot.cores for slot in slots_for(spec, HostPlacement(), None)] == [()]
    threads = spec.cluster.model_copy(update={"threads_per_device": 999})
    if len(os.sched_getaffinity(0)) > 1:
        with pytest.raises(UserError, match="but earlier runs had 999"):
            slots_for(make_spec(cluster=threads), HostPlacement(), 2)
