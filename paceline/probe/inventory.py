"""What this machine is: recorded with every run, because a figure without it cannot be compared."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from paceline.core.hardware import Cluster

PACKAGES = ("torch", "numpy", "torchao", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_",
                        "SLURM_", "UCX_", "PACELINE_")  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def inventory() -> dict[str, Any]:
    """Host, CPU, memory, accelerators, versions and the environment that matters, secrets redacted."""
    return {
        "host": platform.node(),
        "os": platform.platform(),
        "kernel": platform.release(),
        "cpu": cpu(),
        "memory_bytes": memory_limit_bytes(),
        "swap_bytes": psutil.swap_memory().total,
        "load_average_1min": os.getloadavg()[0],
        "gpus": gpus(),
        "python": platform.python_version(),
        "packages": _packages(),
        "environment": _environment(),
    }


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, clock, governor, and instructions for bf16."""
    flags = _cpu_info("flags") or _cpu_info("Features") or ""
    return {
        "model": _cpu_info("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "usable_cores": usable_cores(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "native_bf16": any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16")),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
    }


def usable_cores() -> int:
    """Cores by affinity and by the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = (_read("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores or 1, max(1, int(quota[0]) // int(quota[1])))
    return cores or 1


def memory_limit_bytes() -> int:
    """Host memory, or the control group's limit when that is smaller."""
    total = psutil.virtual_memory().total
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit and limit.isdigit() else total


def gpus() -> list[dict[str, Any]]:
    """NVIDIA devices by NVML: name, memory, power limit, driver; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(handle, driver) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def local_cluster(
    found: dict[str, Any], device: str, device_memory_bytes: float | None, count: int | None
) -> Cluster:
    """This machine as a Cluster of `count` devices (None: every GPU, or two CPU processes).

    On a CPU the cores are shared out evenly and so is the memory.
    """
    if device != "cpu":
        return Cluster(
            name=found["host"],
            device=device,
            device_label=found["gpus"][0]["name"] if found["gpus"] else None,
            devices_per_node=count or len(found["gpus"]) or 1,
            device_memory_bytes=device_memory_bytes,
        )
    cores = found["cpu"]["usable_cores"]
    ranks = count or min(2, cores)
    return Cluster(
        name=found["host"],
        device="cpu",
        device_label=found["cpu"]["model"],
        devices_per_node=ranks,
        device_memory_bytes=found["memory_bytes"] / ranks,
        threads_per_device=max(1, cores // ranks),
    )


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot (0 if unknown)."""
    match = re.search(r"^oom_kill (\d+)$", _read("/proc/vmstat") or "", re.MULTILINE)
    return int(match.group(1)) if match else 0


def _gpu(handle: Any, driver: Any) -> dict[str, Any]:
    import pynvml

    def ask(query: Any, *arguments: Any) -> Any:
        try:
            return query(handle, *arguments)
        except pynvml.NVMLError:
            return None

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    power_mw = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    return {
        "name": _text(ask(pynvml.nvmlDeviceGetName)),
        "uuid": _text(ask(pynvml.nvmlDeviceGetUUID)),
        "memory_bytes": memory.total if memory else None,
        "power_limit_w": power_mw / 1000 if power_mw else None,
        "max_sm_clock_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        "driver": _text(driver),
    }


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _packages() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _environment() -> dict[str, str]:
    return {
        name: "(redacted)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES)
    }


def _cpu_info(field: str) -> str | None:
    match = re.search(rf"^{field}\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return match.group(1).strip() if match else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
