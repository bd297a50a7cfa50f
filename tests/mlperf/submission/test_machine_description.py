"""A description is filled from what a machine says; the rest is marked, never guessed."""

from __future__ import annotations

from typing import Any

from paceline.core.hardware import Cluster
from paceline.mlperf.submission.description_check import FIELDS, UNKNOWN
from paceline.mlperf.submission.system_description import machine_description

GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 85520809984,
    "max_sm_clock_mhz": 1980,
    "driver": "570.1",
    "cuda_driver": "12.8",
    "pcie": "PCIe Gen 5 x16",
    "nvlink": "18 NVLink links",
}
MACHINE: dict[str, Any] = {
    "cpu": {"model": "Fast CPU"},
    "gpus": [],
    "distribution": "Ubuntu 24.04",
    "environment": {},
    "packages": {"torch": "2.13.0", "nvidia-nccl-cu12": "2.28.9", "nvidia-cublas": "13.1"},
    "python": "3.12.3",
    "kernel": "6.8",
}
PARTS: dict[str, Any] = {
    "sockets": 2,
    "cores": 96,
    "threads": 192,
    "memory_bytes": 2**41,
    "caches": [
        {"level": 1, "kind": "Data", "bytes": 49152, "count": 96},
        {"level": 3, "kind": "Unified", "bytes": 2**25, "count": 2},
    ],
    "clock_mhz": {"base": None, "max": 3800.0},
    "disks": [
        {"name": f"nvme{n}n1", "kind": "NVMe SSD", "bytes": 3.84e12, "model": None} for n in (0, 1)
    ],
    "adapters": [
        {
            "name": f"mlx5_{n}",
            "kind": "InfiniBand",
            "gbit_per_s": 400.0,
            "vendor": "Mellanox/NVIDIA",
        }
        for n in range(8)
    ],
    "amd_accelerators": 0,
}
CLUSTER = Cluster(name="east", device="H100-SXM", nodes=4, devices_per_node=8)


def test_a_node_with_gpus_is_described_part_by_part():
    fields = machine_description({**MACHINE, "gpus": [GPU] * 8}, PARTS, CLUSTER, True)

    assert fields["number_of_nodes"] == "4" and fields["system_name"] == "east"
    assert fields["host_processor_core_count"] == "48"
    assert fields["host_processor_caches"] == "L1d 96 x 48 KiB; L3 2 x 32,768 KiB"
    assert fields["host_processor_frequency"] == "3.8 GHz highest"
    assert fields["host_storage_capacity"] == "2x 3,840 GB NVMe SSD"
    assert fields["host_networking"] == "8x Mellanox/NVIDIA InfiniBand, 400 Gb/s"
    assert fields["accelerator_memory_capacity"] == "81559 MiB"
    assert fields["accelerator_host_interconnect"] == "PCIe Gen 5 x16"
    assert fields["other_software_stack"] == {
        "cublas_version": "13.1",
        "nccl_version": "2.28.9",
        "cuda_driver_version": "12.8",
        "nvidia_kernel_driver": "570.1",
        "python_version": "3.12.3",
        "kernel_version": "6.8",
    }


def test_what_nobody_tells_is_marked_and_every_field_is_there():
    fields = machine_description({**MACHINE, "gpus": [GPU]}, PARTS, CLUSTER, True)
    marks = {name for name, value in fields.items() if str(value).startswith(UNKNOWN)}

    assert set(fields) == set(FIELDS)
    assert marks == {
        "submitter",
        "division",
        "status",
        "host_processor_interconnect",
        "host_networking_topology",
        "host_memory_configuration",
        "accelerator_on-chip_memories",
        "accelerator_memory_configuration",
        "accelerator_interconnect_topology",
        "cooling",
    }


def test_a_machine_that_computes_on_its_processors_says_so():
    fields = machine_description(MACHINE, PARTS, None, True)

    assert fields["accelerators_per_node"] == "0" and fields["accelerator_frequency"] == ""
    assert fields["accelerator_model_name"] == "none: CPU only"


def test_accelerators_that_cannot_be_asked_are_not_denied():
    fields = machine_description(MACHINE, {**PARTS, "amd_accelerators": 8}, None, True)

    assert fields["accelerators_per_node"] == "8"
    assert str(fields["accelerator_model_name"]).startswith(UNKNOWN)


def test_a_login_node_says_nothing_of_the_clusters_hardware():
    fields = machine_description(MACHINE, PARTS, CLUSTER, False)

    assert str(fields["host_processor_model_name"]).startswith(UNKNOWN)
    assert fields["accelerator_model_name"] == "H100-SXM" and fields["accelerators_per_node"] == "8"
    assert fields["other_software_stack"] == {}


def test_a_container_with_a_release_of_its_own_names_it():
    machine = {**MACHINE, "environment": {"NVIDIA_PYTORCH_VERSION": "25.09"}}

    assert (
        machine_description(machine, PARTS, None, True)["framework"]
        == "PyTorch NVIDIA Release 25.09"
    )
