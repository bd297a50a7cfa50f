"""What a node says of itself: versions, cores, memory, disk, GPUs; standard library only."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.trainer.measure.machine import core_text, cpu_name

ASK_LIMIT_S = 15.0
MOST_XIDS = 20
GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "pci.bus_id")
REMAPPED_ROWS = {"remapped_rows.pending": "rows_pending", "remapped_rows.failure": "rows_failed"}
"""Drivers differ in which of two questions they answer this to."""
HEALTH_FIELDS = (
    {"ecc.errors.uncorrected.volatile.total": "ecc_uncorrected"},
    REMAPPED_ROWS,
    {"temperature.gpu": "temperature_c"},
    *(
        {
            f"{group}.hw_slowdown": "hw_slowdown",
            f"{group}.hw_thermal_slowdown": "hw_thermal_slowdown",
            f"{group}.hw_power_brake_slowdown": "hw_power_brake_slowdown",
            f"{group}.sw_thermal_slowdown": "sw_thermal_slowdown",
        }
        for group in ("clocks_throttle_reasons", "clocks_event_reasons")
    ),
)
"""Asked in turn: a driver that lacks one field answers nothing to a question with it."""
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def node_facts(folder: str = ".") -> dict[str, Any]:
    """Everything that decides speed or health, None for what is unknown; takes below a second."""
    cores = usable_cores()
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "nccl": _version("nvidia-nccl-cu12") or _version("nvidia-nccl-cu13"),
        "cpu": cpu_name(),
        "cores": cores,
        "num_cores": num_cores(cores),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "load": os.getloadavg()[0],
        "folder_free_bytes": _free(folder),
        "folder_bytes": _size(folder),
        "temporary_free_bytes": _free(os.environ.get("TMPDIR") or "/tmp"),
        "gpus": gpus(),
        "xids": xids(),
    }


def usable_cores() -> str:
    """Hardware threads that a rank may use here, `0-3,8`, whatever this one was bound to."""
    cores = json.loads(os.environ.get("PACELINE_BOUND", "{}")).get("host_cores")
    if cores is not None:
        return cores
    if hasattr(os, "sched_getaffinity"):
        return core_text(os.sched_getaffinity(0))
    return core_text(range(os.cpu_count() or 1))


def num_cores(text: str) -> int:
    """How many numbers a list such as `0-3,8` has."""
    ends = [part.partition("-") for part in text.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def gpus() -> list[dict[str, Any]]:
    """The GPUs with what their driver says of their health; empty without a driver."""
    named = _smi(GPU_FIELDS)
    devices: list[dict[str, Any]] = [
        dict(zip(("name", "uuid", "driver", "memory", "address"), row, strict=True))
        for row in named
    ]
    for fields in HEALTH_FIELDS if devices else ():
        if set(fields.values()) <= set(devices[0]):
            continue
        for gpu, values in zip(devices, _smi(tuple(fields)), strict=False):
            gpu.update(zip(fields.values(), map(_known, values), strict=True))
    if devices and "rows_pending" not in devices[0]:
        for gpu, values in zip(devices, _smi(tuple(REMAPPED_ROWS), "remapped-rows"), strict=False):
            gpu.update(zip(REMAPPED_ROWS.values(), map(_known, values), strict=True))
    return devices


def xids() -> list[dict[str, Any]] | None:
    """The driver's last error reports in the kernel's log; None where it cannot be read."""
    text = _output(["dmesg"])
    if text is None:
        return None
    errors = [{"address": m[1], "xid": int(m[2])} for m in XID.finditer(text)]
    return errors[-MOST_XIDS:]


def _smi(fields: tuple[str, ...], about: str = "gpu") -> list[list[str]]:
    text = _output(["nvidia-smi", f"--query-{about}={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (text or "").splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _known(text: str) -> str | None:
    """What nvidia-smi told, None for N/A, [N/A], [Not Supported] and [Unknown Error]."""
    said = text.strip()
    return None if said.startswith("[") or said == "N/A" else said


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=ASK_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory(name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
