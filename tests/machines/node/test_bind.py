"""Ranks get whole cores near their device, according to the kernel's description of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.machines.node import bind

Machine = Path
GPUS = ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:e3:00.0"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two NUMA nodes of four cores with two threads each, two GPUs and one NIC on every node.

    Threads are numbered as on most servers: 0-7 are first threads, 8-15 the second ones.
    """
    for thread in range(16):
        write(
            tmp_path / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list",
            f"{thread % 8},{thread % 8 + 8}",
        )
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cores)
        nic = tmp_path / f"devices/pci{node}/switch0/nic"
        write(nic / "numa_node", str(node))
        port = tmp_path / f"class/infiniband/mlx5_{node}"
        write(port / "ports/1/state", "4: ACTIVE")
        (port / "device").symlink_to(nic)
        for number in (2 * node, 2 * node + 1):
            place = tmp_path / f"devices/pci{node}/switch{number % 2}/gpu"
            write(place / "numa_node", str(node))
            write(place / "local_cpulist", cores)
            (tmp_path / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
            (tmp_path / "bus/pci/devices" / GPUS[number]).symlink_to(place)
    monkeypatch.setattr(bind, "SYSFS", tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def threads(share: list[bind.Core]) -> str:
    return bind.cpu_text(thread for core in share for thread in core)


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (1, ["0-15"]),
        (2, ["0-3,8-11", "4-7,12-15"]),
        (4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (3, ["0-1,8-9", "2-3,10-11", "4-5,12-13"]),
        (8, [f"{n},{n + 8}" for n in range(8)]),
        (
            16,
            ["0", "8", "1", "9", "2", "10", "3", "11", "4", "12", "5", "13", "6", "14", "7", "15"],
        ),
    ],
)
def test_ranks_share_whole_cores_evenly_and_stay_on_a_numa_node(
    machine: Machine, ranks: int, shares: list[str]
):
    cores = bind.whole_cores(range(16))
    assert [threads(share) for share in bind.even_shares(cores, ranks)] == shares


def test_only_usable_cores_are_shared(machine: Machine):
    cores = bind.whole_cores({2, 3, 6, 14})
    assert cores == [(2,), (3,), (6, 14)]
    assert [threads(share) for share in bind.even_shares(cores, 4)] == ["2", "3", "6", "14"]


def test_more_ranks_than_threads_use_threads_twice(machine: Machine):
    shares = bind.even_shares(bind.whole_cores({0, 1}), 3)
    assert [threads(share) for share in shares] == ["0", "1", "0"]


def test_a_machine_that_tells_nothing_still_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bind, "SYSFS", tmp_path)
    assert bind.whole_cores({3, 1}) == [(1,), (3,)]
    assert bind.device_cores("0000:00:00.0", [(1,)]) == [(1,)]
    assert bind.nearest_nic("0000:00:00.0") is None


def test_ranks_of_gpus_on_one_node_share_its_cores(machine: Machine):
    cores = bind.whole_cores(range(16))
    near = [bind.device_cores(address, cores) for address in GPUS]
    shares = [threads(bind.share_of_device(rank, near)) for rank in range(4)]
    assert shares == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_the_nic_is_the_active_one_on_the_gpus_own_node(machine: Machine):
    assert [bind.nearest_nic(address) for address in GPUS] == [
        "mlx5_0",
        "mlx5_0",
        "mlx5_1",
        "mlx5_1",
    ]
    write(machine / "class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    assert bind.nearest_nic(GPUS[2]) is None


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, [0, 1]),
        ("2,3", [2, 3]),
        ("GPU-d,0", [3, 0]),
        ("1", []),
        ("", []),
        ("9,0", []),
        ("0,-1,2,3", []),  # CUDA shows only what stands before -1
        ("GPU-,1,2", []),  # four GPUs begin so
        ("1,2,MIG-GPU-a/1/0,3", [1, 2]),
    ],
)
def test_gpus_are_those_that_cuda_would_take(
    visible: str | None, order: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    listed = "".join(f"GPU-{'abcd'[n]}, 0000{GPUS[n].upper()}\n" for n in range(4))
    write(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '{listed}'")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bind.gpu_addresses(2) == [GPUS[n] for n in order]


DRIVER_FAULTS = pytest.mark.parametrize(
    "message",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "No devices were found",
        "Unable to determine the device handle for GPU0000:17:00.0: Unknown Error",
        "GPU-a, [N/A]",
        "[Unknown Error], 00000000:17:00.0",
    ],
)


def test_long_domains_are_written_as_the_kernel_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    listed = "GPU-a, 00000001:00:00.0\nGPU-b, 0001CAD1:3B:00.0\n"
    write(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '{listed}'")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bind.gpu_addresses(2) == ["0001:00:00.0", "1cad1:3b:00.0"]


@DRIVER_FAULTS
def test_a_driver_that_does_not_answer_binds_to_no_gpu(
    message: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "nvidia-smi", f'#!/bin/sh\necho "{message}"; exit 15')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bind.gpu_addresses(1) == []


PROGRAM = """import json, os, sys
print(json.dumps({"cores": sorted(os.sched_getaffinity(0)), "arguments": sys.argv[1:],
                  "threads": os.environ["OMP_NUM_THREADS"],
                  "hca": os.environ.get("NCCL_IB_HCA"),
                  "order": os.environ.get("CUDA_DEVICE_ORDER"),
                  "bound": json.loads(os.environ["PACELINE_BOUND"])}))"""


def start(folder: Path, wish: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.run(
        [sys.executable, bind.__file__, wish, "program.py", "a b"],
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
        env={**kept, **environment},
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_bound_program_runs_on_its_cores_with_as_many_threads(tmp_path: Path):
    usable = sorted(os.sched_getaffinity(0))
    parts = [
        report(start(tmp_path, "cpu", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2"))
        for rank in range(2)
    ]
    assert parts[0]["arguments"] == ["a b"]
    assert all(set(part["cores"]) <= set(usable) for part in parts)
    assert parts[0]["bound"]["by"] == "cpu"
    assert all(part["threads"] == str(part["bound"]["threads"]) for part in parts)
    if len(usable) > 1:
        assert not set(parts[0]["cores"]) & set(parts[1]["cores"])


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"OMP_NUM_THREADS": "7"}, "7"), ({"OMP_NUM_THREADS": "1"}, "1")],
)
def test_a_number_of_threads_that_the_user_chose_stays(
    environment: dict[str, str], threads: str, tmp_path: Path
):
    assert report(start(tmp_path, "cpu", **environment))["threads"] == threads


def test_without_a_gpu_to_be_near_the_cores_are_shared_out(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    assert report(start(tmp_path, "cuda", PATH=str(tmp_path / "bin")))["bound"]["by"] == "cpu"


def test_gpus_are_counted_along_the_bus_as_the_driver_counts_them(tmp_path: Path):
    assert report(start(tmp_path, "cuda"))["order"] == "PCI_BUS_ID"
    assert (
        report(start(tmp_path, "cuda", CUDA_DEVICE_ORDER="FASTEST_FIRST"))["order"]
        == "FASTEST_FIRST"
    )
    assert report(start(tmp_path, "cpu"))["order"] is None


def test_all_ranks_of_a_host_tell_nccl_the_same_adapters(tmp_path: Path):
    core = str(max(os.sched_getaffinity(0)))
    nics = ("mlx5_0", "mlx5_3", "mlx5_0", None)
    (tmp_path / "bind.json").write_text(json.dumps([{"cores": core, "nic": nic} for nic in nics]))
    ranks = [report(start(tmp_path, "bind.json", LOCAL_RANK=str(rank))) for rank in range(4)]
    assert {rank["hca"] for rank in ranks} == {"=mlx5_0,mlx5_3"}
    assert [rank["bound"]["nic"] for rank in ranks] == list(nics)
    assert report(start(tmp_path, "cuda"))["hca"] is None


def test_a_file_names_the_cores_of_each_local_rank(tmp_path: Path):
    core = max(os.sched_getaffinity(0))
    entries = [{"cores": str(core), "nic": None}, {"cores": "40000", "nic": "mlx5_0"}]
    (tmp_path / "bind.json").write_text(json.dumps(entries))
    assert report(start(tmp_path, "bind.json"))["cores"] == [core]
    absent = start(tmp_path, "bind.json", LOCAL_RANK="1")
    assert absent.returncode == 1 and "cores 40000 of local rank 1 cannot be used" in absent.stderr
    further = start(tmp_path, "bind.json", LOCAL_RANK="2")
    assert further.returncode == 1 and "this is rank 2" in further.stderr
