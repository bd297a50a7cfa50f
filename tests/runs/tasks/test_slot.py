"""A plan moved to a slot runs there, is bound there, and stays the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.hardware import Cluster
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from paceline.runs.plan import Plan, make_plan
from paceline.runs.tasks.slot import JobSlot, on_hosts, plan_on
from tests.example import make_spec


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    return make_plan(Request("tiny-gpt", devices=2, device="cpu"))


def test_on_other_hosts_it_is_the_same_run_that_no_other_node_replaces():
    cluster = Cluster(name="c", device="cpu", devices_per_node=1, nodes=2, launcher="slurm")
    spec = make_spec(cluster=cluster)
    moved = on_hosts(spec, ("a", "b"))
    assert moved.cluster.hosts == ("a", "b") and moved.cluster.slurm.retries == 0
    assert moved.key == spec.key


def test_a_slot_without_anything_changes_nothing(plan: Plan):
    assert plan_on(plan, JobSlot(3)) == plan


def test_ranks_are_bound_to_the_cores_of_their_slot(plan: Plan):
    job = plan_on(plan, JobSlot(1, cores=((0,), (1, 5), (2,), (3,)))).job
    assert job.program[:2] == ("bind.py", "bind.json") and job.program[2:] == plan.job.program
    assert [entry["cores"] for entry in json.loads(job.files["bind.json"])] == ["0-1,5", "2-3"]


def test_ranks_see_the_gpus_of_their_slot_alone(plan: Plan):
    moved = plan_on(plan, JobSlot(2, devices=("4", "5")))
    assert moved.job.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "export CUDA_VISIBLE_DEVICES=4,5\n" in moved.script
    assert moved.spec == plan.spec


def test_a_slot_is_named_by_its_hosts(tmp_path: Path):
    assert JobSlot(1, ("n1", "n2", "n3")).name == "n[1-3]" and JobSlot(4).name == "part 4"
