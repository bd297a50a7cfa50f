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
from paceline.probe import cgroups
from paceline.probe.cgroups import oom_kills as oom_kills
from paceline.probe.gpus import gpus

BUSY_SAMPLE_S = 0.2
"""The load average still remembers what has ended; a look at the cores does not."""

PACKAGES = ("torch", "numpy", "torchao", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "GOMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_",
                        "TORCHINDUCTOR_", "UCX_")  # fmt: skip
ENVIRONMENT_NAMES = frozenset({
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE",
})  # fmt: skip
"""Only what can change the speed or says which job it was: any other variable may hold a secret."""
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|JWT|COOKIE", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)\S*@")
"""Up to the last @, because a password may hold any character."""


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
        "cpu_busy_fraction": psutil.cpu_percent(BUSY_SAMPLE_S) / 100,
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
    quota = cgroups.core_quota()
    return max(1, min(cores or 1, int(quota) if quota is not None else cores or 1))


def memory_limit_bytes() -> int:
    """Host memory, or the control group's limit when that is smaller."""
    total, limit = psutil.virtual_memory().total, cgroups.memory_limit_bytes()
    return total if limit is None else min(total, limit)


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
        name: "(redacted)" if _SECRET.search(name) else _URL_USER.sub("", value)
        for name, value in sorted(os.environ.items())
        if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)
    }


def _cpu_info(field: str) -> str | None:
    match = re.search(rf"^{field}\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return match.group(1).strip() if match else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
