"""The inventory says what the machine is, and no secret leaves it."""

from __future__ import annotations

import json

import pytest

from paceline.machines.probe.inventory import inventory, local_cluster, usable_cores


def test_the_inventory_is_plain_json_with_the_machine_in_it():
    machine = json.loads(json.dumps(inventory()))
    assert machine["host"] and machine["cpu"]["model"] and machine["memory_bytes"] > 2**28
    assert machine["packages"]["python"]


@pytest.mark.parametrize(
    "name", ["TORCH_HF_TOKEN", "NCCL_API_KEY", "PACELINE_PASSWORD", "CUDA_AUTH"]
)
def test_secrets_are_redacted(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "hunter2")
    assert "hunter2" not in json.dumps(inventory())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JWT", "hunter2"),
        ("PACELINE_DB", "postgresql://me:hunter2@host/db"),
        ("TORCH_STORE", "https://me:a/b@hunter2@host/x"),
        ("NCCL_STORE", "see http://hunter2@host"),
        ("UCX_COOKIE", "hunter2"),
        ("SLURM_ANYTHING_NEW", "hunter2"),
    ],
)
def test_secrets_under_other_names_stay_out(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    assert "hunter2" not in json.dumps(inventory())


def test_an_address_without_a_user_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_A", "tcp://me:pw@host:29500/x")
    monkeypatch.setenv("TORCH_B", "tcp://host:29500/x")
    environment = inventory()["environment"]
    assert environment["TORCH_A"] == "tcp://(redacted)@host:29500/x"
    assert environment["TORCH_B"] == "tcp://host:29500/x"


def test_the_environment_that_changes_speed_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("EDITOR", "vi")
    environment = inventory()["environment"]
    assert environment["SLURM_JOB_ID"] == "7"
    assert environment["NCCL_IB_HCA"] == "mlx5_1" and "EDITOR" not in environment


def test_what_changes_speed_is_recorded():
    machine = inventory()
    assert {"kernel", "distribution", "container", "transparent_hugepages"} <= machine.keys()
    cpu = machine["cpu"]
    assert {"microcode", "governor", "boost", "hyperthreads", "mitigations"} <= cpu.keys()
    assert {"numpy", "torch"} <= machine["packages"].keys()


def test_no_package_is_recorded_that_computes_nothing():
    names = inventory()["packages"].keys()
    assert not names & {"nvidia-ml-py", "pytest", "rich"}


def test_mitigations_that_cost_nothing_are_left_out():
    assert "Not affected" not in inventory()["cpu"]["mitigations"].values()


def test_cpu_ranks_share_cores_and_memory():
    machine = inventory()
    cluster = local_cluster(machine, "cpu", None, 2)
    assert cluster.device_memory_bytes == machine["memory_bytes"] / 2
    assert cluster.threads_per_device == max(1, usable_cores() // 2)


def test_gpus_of_the_machine_become_devices():
    machine = {**inventory(), "gpus": [{"name": "NVIDIA H200", "memory_bytes": 1}] * 8}
    cluster = local_cluster(machine, "H200-SXM", 1.5e11, None)
    assert (cluster.world_size, cluster.device_label) == (8, "NVIDIA H200")
