"""Sampler of power, energy, clocks and temperatures of one host during a run.

    python telemetry_program.py FILE INTERVAL_S ROOT PARENT

It writes one JSON object per line to FILE until SIGTERM, or until PARENT, the process that started
it, is gone. ROOT is the folder in which the kernel's files are looked up. Only the standard library
is required. The package of a driver, pynvml or amdsmi, is used if this interpreter has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

ASK_LIMIT_S = 10.0
GPU_FIELDS = ("index", "power.draw", "clocks.sm", "clocks.mem", "temperature.gpu")
GPU_NAMES = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c")
AMD_PACKAGE = "/opt/rocm/share/amd_smi"
"""Folder in which ROCm installs its Python package, used if the environment does not have it."""
AMD_POWERS = ("current_socket_power", "socket_power", "average_socket_power")
"""Names of the power reading: MI300 and later report the first, earlier devices the last."""
POWER, THERMAL, BRAKE, SLOWDOWN = "power cap", "thermal", "power brake", "hardware slowdown"
NVML_THROTTLES = {0x4: POWER, 0x8: SLOWDOWN, 0x20: THERMAL, 0x40: THERMAL, 0x80: BRAKE}
"""Bits of nvmlClocksThrottleReasons that count as throttling; idle, set clocks and sync boost do
not."""
AMD_THROTTLES = {
    POWER: ("active_ppt_pwr",),
    THERMAL: ("active_socket_thrm", "active_vr_thrm", "active_hbm_thrm"),
    SLOWDOWN: ("active_prochot_thrm",),
}
SUMMED_DOMAINS = re.compile(r"package|dram")
"""Energy domains of the processors that are added up. Cores are part of the package, and the
platform includes it."""


class Counters:
    """Energy of the processors since the first reading, corrected for counter wraparound."""

    def __init__(self, root: Path) -> None:
        domains = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._domains = [d for d in domains if SUMMED_DOMAINS.match(_read(d / "name") or "")]
        self._last = [self._microjoules(domain) for domain in self._domains]
        self._sum_uj = 0

    def unknown_reason(self) -> str | None:
        """Return why the processors' energy cannot be read, None if it can."""
        if not self._domains:
            return "the kernel has no energy counters (powercap)"
        if None in self._last:
            return "the energy counters (powercap) can only be read by root"
        return None

    def joules(self) -> float | None:
        """Return the joules since the start; None if a counter can no longer be read."""
        for at, domain in enumerate(self._domains):
            now, before = self._microjoules(domain), self._last[at]
            if now is None or before is None:
                return None
            # The counter wraps around to 0 after max_energy_range_uj.
            span = int(_read(domain / "max_energy_range_uj") or 0)
            self._sum_uj += now - before if now >= before else now - before + span
            self._last[at] = now
        return self._sum_uj / 1e6

    def _microjoules(self, domain: Path) -> int | None:
        text = _read(domain / "energy_uj")
        return int(text) if text and text.isdecimal() else None


class Devices(Protocol):
    """The devices of one driver: the source of their figures, and their current readings.

    A figure that a device does not report is left out: `power_w`, `energy_j` (since its driver was
    loaded), `sm_clock_mhz`, `memory_clock_mhz`, `temperature_c`, `throttle` (current causes of
    reduced clocks), `ecc_uncorrected` (errors so far).
    """

    source: str
    """Source of power readings, used if a device has no energy counter."""
    counter: str

    def read(self) -> list[dict[str, Any]]:
        """Return one row per device, with its `index`."""
        ...


class NvmlDevices:
    """NVIDIA devices, read in this process through the driver's library."""

    source, counter = "NVML power", "NVML energy counter"

    def __init__(self) -> None:
        """Initialize NVML.

        Raises an error of pynvml without a driver, or ImportError without the package.
        """
        nvml = self._nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def read(self) -> list[dict[str, Any]]:
        """Return one row per device, as described by Devices.read."""
        return [_present(index, self._figures(h)) for index, h in enumerate(self._handles)]

    def _figures(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        bits = _query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        milliwatts = _query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        millijoules = _query(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return {
            "power_w": _scaled(milliwatts, 1e-3),
            "energy_j": _scaled(millijoules, 1e-3),
            "sm_clock_mhz": _query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": _query(
                lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
            "temperature_c": _query(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "throttle": None
            if bits is None
            else sorted({word for bit, word in NVML_THROTTLES.items() if bits & bit}),
            "ecc_uncorrected": _query(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        }


class NvidiaSmiDevices:
    """NVIDIA devices, read through nvidia-smi if Python has no package for NVML."""

    source = counter = "nvidia-smi power.draw"  # nvidia-smi has no query for energy

    def read(self) -> list[dict[str, Any]]:
        """Return rows as Devices.read does; empty if nvidia-smi is missing or fails."""
        if shutil.which("nvidia-smi") is None:
            return []
        query = f"--query-gpu={','.join(GPU_FIELDS)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            return []
        lines = result.stdout.splitlines() if result.returncode == 0 else []
        rows = [line.split(", ") for line in lines]
        complete_rows = [
            row for row in rows if len(row) == len(GPU_FIELDS) and row[0].strip().isdecimal()
        ]
        return [
            _present(int(row[0]), dict(zip(GPU_NAMES, map(_number, row[1:]), strict=True)))
            for row in complete_rows
        ]


class AmdDevices:
    """AMD devices, read in this process through amdsmi, the Python package of ROCm."""

    source, counter = "amdsmi power", "amdsmi energy counter"

    def __init__(self, package: str = AMD_PACKAGE) -> None:
        """Initialize amdsmi, from ROCm's folder `package` if the environment does not have it.

        Raises an error of amdsmi without a driver, or ImportError without the package.
        """
        if importlib.util.find_spec("amdsmi") is None and Path(package).is_dir():
            sys.path.append(package)
        smi = self._smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()
        self._handles = list(smi.amdsmi_get_processor_handles())

    def read(self) -> list[dict[str, Any]]:
        """Return one row per device, as described by Devices.read."""
        return [_present(index, self._figures(h)) for index, h in enumerate(self._handles)]

    def _figures(self, handle: Any) -> dict[str, Any]:
        smi = self._smi
        power = _query(lambda: smi.amdsmi_get_power_info(handle)) or {}
        heat = _query(
            lambda: smi.amdsmi_get_temp_metric(
                handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
            )
        )
        degrees = _number(heat)
        ecc = _query(lambda: smi.amdsmi_get_gpu_total_ecc_count(handle)) or {}
        watts = [_number(power.get(name)) for name in AMD_POWERS]
        return {
            "power_w": next((watt for watt in watts if watt), None),
            "energy_j": self._energy_j(handle),
            "sm_clock_mhz": self._clock_mhz(handle, "GFX"),
            "memory_clock_mhz": self._clock_mhz(handle, "MEM"),
            # Documented in thousandths of a degree; versions differ in what they return.
            "temperature_c": _scaled(degrees, 1e-3) if degrees and degrees > 1000 else degrees,
            "throttle": self._throttle(handle),
            "ecc_uncorrected": _number(ecc.get("uncorrectable_count")),
        }

    def _clock_mhz(self, handle: Any, domain: str) -> float | None:
        smi = self._smi
        clock = _query(
            lambda: smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, domain))
        )
        return _number((clock or {}).get("clk"))

    def _energy_j(self, handle: Any) -> float | None:
        """Return joules: accumulator x resolution in microjoules.

        The accumulator was called `power` before ROCm 6.4.
        """
        reading = _query(lambda: self._smi.amdsmi_get_energy_count(handle)) or {}
        ticks = _number(reading.get("energy_accumulator", reading.get("power")))
        microjoules = _number(reading.get("counter_resolution"))
        return None if ticks is None or microjoules is None else ticks * microjoules / 1e6

    def _throttle(self, handle: Any) -> list[str] | None:
        """Return the active violations; None if the device reports none (before MI300)."""
        status = _query(lambda: self._smi.amdsmi_get_violation_status(handle)) or {}
        states = {word: [status.get(n) for n in names] for word, names in AMD_THROTTLES.items()}
        if not any(state in (True, False) for row in states.values() for state in row):
            return None
        return sorted(word for word, row in states.items() if any(s in (True, 1) for s in row))


def devices() -> Devices | None:
    """Return the first driver whose devices report their power, or None."""
    for kind in (NvmlDevices, NvidiaSmiDevices, AmdDevices):
        # Driver packages raise exceptions of their own classes, which cannot be imported here.
        with suppress(Exception):
            driver = kind()
            if any("power_w" in row for row in driver.read()):
                return driver
    return None


def _present(index: int, figures: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, **{name: v for name, v in figures.items() if v is not None}}


def _query(query: Callable[[], Any]) -> Any:
    """Return a driver's answer; None if a device or an old package does not support the query.

    Names of the package must be used inside `query`, because older packages lack some.
    """
    try:
        return query()
    except Exception:  # of a class of the driver's package, which may not be installed
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def start_line(interval_s: float, counters: Counters, driver: Devices | None) -> dict[str, Any]:
    """Return the first line of the file: sources of the figures, and reasons for missing ones."""
    sources, unknown = {}, {}
    if driver:
        has_counters = all("energy_j" in row for row in driver.read())
        sources["gpu"] = driver.counter if has_counters else driver.source
    else:
        unknown["gpu"] = "no driver reports device power (NVML, nvidia-smi, amdsmi)"
    if reason := counters.unknown_reason():
        unknown["cpu"] = reason
    else:
        sources["cpu"] = "powercap energy counters"
    return {
        "event": "telemetry",
        "schema_version": 1,
        "host": os.environ.get("PACELINE_HOST") or platform.node(),
        "interval_s": interval_s,
        "sources": sources,
        "unknown": unknown,
    }


def sample(
    root: Path, counters: Counters, driver: Devices | None, start: dict[str, Any]
) -> dict[str, Any]:
    """Return one sample of all available sources."""
    line: dict[str, Any] = {"event": "sample", "time_unix": time.time()}
    if driver:
        line["gpus"] = driver.read()
    if "cpu" in start["sources"]:
        line["cpu_energy_j"] = counters.joules()
    texts = [
        _read(p)
        for p in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    ]
    clocks = [int(clock) / 1000 for clock in texts if clock and clock.isdecimal()]
    if clocks:
        line["cpu_clock_mhz"] = sum(clocks) / len(clocks)
    if (hottest := cpu_temperature_c(root)) is not None:
        line["cpu_temperature_c"] = hottest
    return line


def cpu_temperature_c(root: Path) -> float | None:
    """Return the temperature of the hottest processor sensor, None if there is none."""
    sensors = (root / "sys/class/hwmon").glob("hwmon*")
    names = [s for s in sensors if _read(s / "name") in ("coretemp", "k10temp", "zenpower")]
    texts = [_read(path) for sensor in names for path in sensor.glob("temp*_input")]
    return max((int(t) / 1000 for t in texts if t and t.isdecimal()), default=None)


def main(path: str, interval_s: float, root: Path, parent: int) -> None:
    """Sample until SIGTERM, or until `parent` is gone."""
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    counters, driver = Counters(root), devices()
    with Path(path).open("w", encoding="utf-8", buffering=1) as out:
        start = start_line(interval_s, counters, driver)
        out.write(json.dumps(start) + "\n")
        due, last = time.monotonic(), not start["sources"]
        while not last and os.getppid() == parent:
            # Checked before the sample, so that the last sample is taken after the end of the run.
            last = stop_requested.is_set()
            out.write(json.dumps(sample(root, counters, driver, start)) + "\n")
            due = max(due + interval_s, time.monotonic())
            stop_requested.wait(max(0.0, due - time.monotonic()))


def _number(text: Any) -> float | None:
    """Return a number, also from text; None for anything else, such as "N/A"."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
