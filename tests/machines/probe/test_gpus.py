"""Only the devices that CUDA_VISIBLE_DEVICES leaves are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.machines.placement import find_device
from paceline.machines.probe.gpus import gpus, visible

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
    assert visible(FOUND, setting) == [FOUND[i] for i in left]


def test_a_machine_without_devices_shows_none():
    assert visible([], "0") == [] and visible([], None) == []


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


def test_a_device_that_is_lost_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch):
    answer_as_a_driver(monkeypatch, nvmlDeviceGetCount=3, nvmlDeviceGetName="NVIDIA H200")

    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [gpu["name"] for gpu in gpus()] == ["NVIDIA H200"] * 2
