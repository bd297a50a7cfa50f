"""Only the devices that CUDA_VISIBLE_DEVICES leaves are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.machines.placement import Request, find_device
from paceline.machines.probe.gpus import gpus, visible_devices
from paceline.machines.probe.inventory import inventory
from paceline.runs.plan import make_plan

FOUND = [{"uuid": uuid} for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb33", None)]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),  # its order is the programs' order
        ("GPU-bb", [2]),
        ("GPU-aa22,0", [1, 0]),
        ("GPU-aa", []),  # names two
        ("GPU-", []),
        ("0,9,1", [0]),  # what follows an entry that names nothing is hidden
        ("-1", []),
        ("NoDevFiles", []),
        ("1,MIG-GPU-aa11/0/0", [1]),
        ("1,1", []),
        ("1,GPU-aa22", []),
    ],
)
def test_the_visible_devices_are_those_that_cuda_would_show(setting: str | None, left: list[int]):
    assert visible_devices(FOUND, setting) == [FOUND[i] for i in left]


SLICES = [{"uuid": uuid} for uuid in ("MIG-0a1b", "MIG-0a2c", "MIG-GPU-aa11/1/0")]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("MIG-0a1b", [0]),
        ("MIG-0a2c,MIG-0a1b", [1]),  # a program sees one slice, the first
        ("MIG-0a1b,0", [0]),
        ("MIG-GPU-aa11/1/0", [2]),  # older drivers
        ("MIG-0a", []),  # names two
        ("MIG-ffff", []),
    ],
)
def test_a_slice_that_is_named_first_is_all_that_is_seen(setting: str, left: list[int]):
    assert visible_devices(FOUND, setting, SLICES) == [SLICES[i] for i in left]


def test_a_machine_without_devices_shows_none():
    assert visible_devices([], "0") == [] and visible_devices([], None) == []


def answer_as_a_driver(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Let NVML give these answers to queries of one device, and refuse all others."""

    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in (n for n in dir(pynvml) if n.startswith("nvmlDeviceGet")):
        monkeypatch.setattr(pynvml, name, refuse)
    system = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlSystemGetDriverVersion": b"560.35.03",
        "nvmlSystemGetCudaDriverVersion": 12060,
    }
    for name, value in {**system, **answers}.items():
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_device_is_recorded_with_what_sets_its_speed(monkeypatch: pytest.MonkeyPatch):
    answer_as_a_driver(
        monkeypatch,
        nvmlDeviceGetName=b"NVIDIA H100",
        nvmlDeviceGetEnforcedPowerLimit=650_000,
        nvmlDeviceGetMaxClockInfo=1980,
        nvmlDeviceGetEccMode=[1, 0],
        nvmlDeviceGetMigMode=[0, 0],
        nvmlDeviceGetPersistenceMode=1,
        nvmlDeviceGetMaxPcieLinkGeneration=5,
        nvmlDeviceGetMaxPcieLinkWidth=16,
        nvmlDeviceGetNvLinkState=1,
    )
    (gpu,) = gpus()
    assert (gpu["driver"], gpu["cuda_driver"], gpu["power_limit_w"]) == ("560.35.03", "12.6", 650)
    assert (gpu["ecc"], gpu["mig"], gpu["persistence"]) == ("on", "off", "on")
    assert (gpu["pcie"], gpu["nvlink"]) == (
        "PCIe Gen 5 x16",
        f"{pynvml.NVML_NVLINK_MAX_LINKS} NVLink links",
    )


def test_what_a_device_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch):
    answer_as_a_driver(monkeypatch)
    (gpu,) = gpus()
    known_fields = {name for name, value in gpu.items() if value is not None}
    assert known_fields == {"driver", "cuda_driver"}


def test_a_device_that_is_cut_in_slices_is_not_taken_for_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
):
    whole = SimpleNamespace(total=80 * 2**30)
    answer_as_a_driver(
        monkeypatch,
        nvmlDeviceGetName="NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMemoryInfo=whole,
        nvmlDeviceGetMigMode=[1, 1],
    )
    (gpu,) = gpus()
    assert (gpu["name"], gpu["memory_bytes"]) == ("NVIDIA H100 80GB HBM3 MIG", None)
    assert find_device(gpu["name"]) is None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda _: [0, 1])  # after the next reset
    (gpu,) = gpus()
    assert (gpu["name"], gpu["memory_bytes"]) == ("NVIDIA H100 80GB HBM3", 80 * 2**30)


def test_a_slice_has_a_name_and_memory_of_its_own_and_no_peak(
    monkeypatch: pytest.MonkeyPatch,
):
    answers = {  # of the device (0) and of its slices, as NVML gives them
        "nvmlDeviceGetName": {0: "NVIDIA A100-SXM4-40GB", 7: "NVIDIA A100-SXM4-40GB MIG 3g.20gb"},
        "nvmlDeviceGetUUID": {0: "GPU-aa", 7: "MIG-b7", 8: "MIG-b8"},
        "nvmlDeviceGetMemoryInfo": {7: SimpleNamespace(total=19968 * 2**20)},
        "nvmlDeviceGetMigMode": {0: [1, 1]},
        "nvmlDeviceGetMaxMigDeviceCount": {0: 7},
        "nvmlDeviceGetEnforcedPowerLimit": {0: 400_000},
    }
    answer_as_a_driver(monkeypatch)

    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    for name, by_handle in answers.items():
        monkeypatch.setattr(pynvml, name, lambda h, by=by_handle: by[h] if h in by else refuse())
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", lambda _, i: 7 + i if i < 1 else refuse()
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b7")
    (gpu,) = gpus()
    assert (gpu["name"], gpu["memory_bytes"]) == (
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        19968 * 2**20,
    )
    assert gpu["power_limit_w"] is None and find_device(gpu["name"]) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa")
    (gpu,) = gpus()
    assert gpu["name"] == "NVIDIA A100-SXM4-40GB MIG"


def test_a_run_on_a_slice_takes_the_slice_and_says_why_it_has_no_mfu():
    machine = {
        **inventory(),
        "gpus": [{"name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "memory_bytes": 20e9}],
        "packages": {"torch": "2.13.0"},
    }
    plan = make_plan(Request("tiny-llama"), machine)
    cluster = plan.spec.cluster
    assert (cluster.device, cluster.devices_per_node, cluster.device_memory_bytes) == (
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        1,
        20e9,
    )
    assert any("slice of a device" in note and "no MFU" in note for note in plan.notices)


def test_a_device_that_is_lost_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch):
    answer_as_a_driver(monkeypatch, nvmlDeviceGetCount=3, nvmlDeviceGetName="NVIDIA H200")

    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [gpu["name"] for gpu in gpus()] == ["NVIDIA H200"] * 2
