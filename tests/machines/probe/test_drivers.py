"""Drivers' own packages are read as they are documented: NVML's, and amdsmi's of ROCm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.machines.probe.telemetry_program import (
    AmdDevices,
    Counters,
    NvidiaSmiDevices,
    NvmlDevices,
    devices,
    sample,
    start_line,
)

AMDSMI = """
from enum import IntEnum


class AmdSmiClkType(IntEnum):
    GFX = 1
    MEM = 2


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiLibraryException(Exception):
    pass


def amdsmi_init(flag=1):
    pass


def amdsmi_get_processor_handles():
    return ["mi300x", "mi250x"]


def amdsmi_get_power_info(handle):
    if handle == "mi250x":
        return {"current_socket_power": "N/A", "average_socket_power": 410, "power_limit": 560}
    return {"current_socket_power": 749, "average_socket_power": "N/A", "power_limit": 750}


def amdsmi_get_energy_count(handle):
    name = "power" if handle == "mi250x" else "energy_accumulator"
    return {name: 2_000_000_000, "counter_resolution": 15.3, "timestamp": 1}


def amdsmi_get_clock_info(handle, kind):
    return {"clk": {1: 2100, 2: 900}[kind], "min_clk": 132, "max_clk": 2100}


def amdsmi_get_temp_metric(handle, sensor, metric):
    return {"mi300x": 71, "mi250x": 65000}[handle]


def amdsmi_get_violation_status(handle):
    if handle == "mi250x":
        raise AmdSmiLibraryException("AMDSMI_STATUS_NOT_SUPPORTED")
    return {"active_ppt_pwr": True, "active_socket_thrm": False, "active_vr_thrm": False,
            "active_hbm_thrm": "N/A", "active_prochot_thrm": False, "per_ppt_pwr": 12}


def amdsmi_get_gpu_total_ecc_count(handle):
    return {"correctable_count": 3, "uncorrectable_count": 1, "deferred_count": 0}
"""
"""A module in the place of ROCm's: its names and dictionaries as ROCm/amdsmi documents them."""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where ROCm would have left its package."""
    (tmp_path / "amdsmi").mkdir()
    (tmp_path / "amdsmi/__init__.py").write_text(AMDSMI)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    yield str(tmp_path)
    sys.modules.pop("amdsmi", None)


def test_amd_devices_tell_power_energy_clocks_heat_throttling_and_errors(amd: str):
    first, second = AmdDevices(amd).read()
    assert first == {
        "index": 0,
        "power_w": 749.0,
        "energy_j": pytest.approx(2e9 * 15.3 / 1e6),
        "sm_clock_mhz": 2100.0,
        "memory_clock_mhz": 900.0,
        "temperature_c": 71.0,
        "throttle": ["power cap"],
        "ecc_uncorrected": 1.0,
    }
    assert second["power_w"] == 410.0 and second["temperature_c"] == 65.0
    assert second["energy_j"] == first["energy_j"]  # by the field's older name
    assert "throttle" not in second  # a device before MI300 does not tell


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("amdsmi_get_violation_status", "throttle"),
        ("amdsmi_get_gpu_total_ecc_count", "ecc_uncorrected"),
        ("amdsmi_get_energy_count", "energy_j"),
        ("AmdSmiTemperatureType", "temperature_c"),
        ("AmdSmiClkType", "sm_clock_mhz"),
    ],
)
def test_an_older_amdsmi_without_a_name_tells_the_rest(
    amd: str, monkeypatch: pytest.MonkeyPatch, name: str, lost: str
):
    driver = AmdDevices(amd)
    monkeypatch.delattr(sys.modules["amdsmi"], name)
    (row, _) = driver.read()
    assert row["power_w"] == 749.0 and lost not in row


class NotSupportedError(Exception):
    """As pynvml raises its own."""


def nvml(**answers: Any) -> ModuleType:
    """A driver in the place of NVIDIA's, behind the names of the real package."""

    def asked(name: str) -> Any:
        def answer(*_: Any) -> Any:
            if name not in answers:
                raise NotSupportedError(name)
            return answers[name]

        return answer

    names = [name for name in dir(pynvml) if name.startswith("nvml")]
    constants = {n: getattr(pynvml, n) for n in dir(pynvml) if n.startswith("NVML_")}
    return SimpleNamespace(**constants, **{name: asked(name) for name in names})  # type: ignore[return-value]


def test_nvml_tells_the_energy_counter_and_what_holds_clocks_down(monkeypatch: pytest.MonkeyPatch):
    bits = (
        pynvml.nvmlClocksThrottleReasonSwPowerCap
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonGpuIdle
    )
    driver = nvml(
        nvmlInit=None,
        nvmlDeviceGetCount=1,
        nvmlDeviceGetHandleByIndex="h",
        nvmlDeviceGetPowerUsage=699_500,
        nvmlDeviceGetTotalEnergyConsumption=12_345_678,
        nvmlDeviceGetClockInfo=1755,
        nvmlDeviceGetTemperature=64,
        nvmlDeviceGetCurrentClocksThrottleReasons=bits,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    (row,) = NvmlDevices().read()
    assert (row["power_w"], row["energy_j"]) == (pytest.approx(699.5), pytest.approx(12345.678))
    assert row["throttle"] == ["power cap", "thermal"]
    assert "ecc_uncorrected" not in row  # a device without ECC does not know it

    chosen = devices()
    assert chosen is not None and chosen.source == "NVML power"
    counters = Counters(Path("/absent"))
    start = start_line(1.0, counters, chosen)
    assert start["sources"] == {"gpu": "NVML energy counter"}
    assert sample(Path("/absent"), counters, chosen, start)["gpus"] == [row]

    for name in ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTotalEccErrors"):
        monkeypatch.delattr(driver, name)
    (older,) = NvmlDevices().read()  # of a package that lacks the names
    assert older == {name: value for name, value in row.items() if name != "throttle"}


def test_the_driver_that_tells_its_power_is_chosen(
    amd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())  # its driver does not answer
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, amd])
    chosen = devices()
    assert chosen is not None and chosen.counter == "amdsmi energy counter"
    assert NvidiaSmiDevices().read() == []
