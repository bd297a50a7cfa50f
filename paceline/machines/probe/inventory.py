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
from paceline.core.secrets import REDACTED, SECRET_NAME, redact
from paceline.machines.probe.container import container, core_quota, group_memory_limit_bytes
from paceline.machines.probe.gpus import gpus

BUSY_SAMPLE_S = 0.2
"""The load average still remembers what has ended; a look at the cores does not."""

SCHEMA = 2
"""Of the inventory. Two of one schema hold the same items; 2 added much of what changes speed."""

PACKAGES = (
    "torch",
    "numpy",
    "torchao",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "nemo-toolkit",
    "transformer-engine",
    "flash-attn",
    "triton",
    "mkl",
)
PACKAGE_PREFIX = "nvidia-"
"""CUDA, cuBLAS, cuDNN and NCCL come as packages whose names change with the CUDA version."""
NO_CUDA_PACKAGE = "nvidia-ml-py"

ENVIRONMENT_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "KMP_",
    "TORCH_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "CUBLAS_",
    "CUDNN_",
    "NVTE_",
    "UCX_",
    "FI_",
    "MALLOC_",
)
ENVIRONMENT_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_JOB_PARTITION",
        "SLURM_NNODES",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_ON_NODE",
        "SLURM_GPUS_ON_NODE",
        "SLURM_MEM_PER_NODE",
        "NVIDIA_BUILD_ID",
        "NVIDIA_PYTORCH_VERSION",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
    }
)
"""Only what can change the speed or says which job it was: any other variable may hold a secret."""
_FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"


def inventory() -> dict[str, Any]:
    """Host, CPU, memory, devices, versions and the environment that matters, secrets redacted."""
    return {
        "schema": SCHEMA,
        "host": platform.node(),
        "os": platform.platform(),
        "distribution": _distribution(),
        "kernel": platform.release(),
        "container": container(),
        "cpu": cpu(),
        "memory_bytes": memory_limit_bytes(),
        "swap_bytes": psutil.swap_memory().total,
        "transparent_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_1min": os.getloadavg()[0],
        "cpu_busy_fraction": psutil.cpu_percent(BUSY_SAMPLE_S) / 100,
        "gpus": gpus(),
        "python": platform.python_version(),
        "packages": _packages(),
        "environment": _environment(),
    }


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, what sets its clock, and instructions for bf16."""
    flags = _cpu_info("flags") or _cpu_info("Features") or ""
    return {
        "model": _cpu_info("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "usable_cores": usable_cores(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "native_bf16": any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16")),
        "microcode": _cpu_info("microcode"),
        "governor": _read(f"{_FREQUENCY}/scaling_governor"),
        "frequency_driver": _read(f"{_FREQUENCY}/scaling_driver"),
        "max_clock_khz": _read(f"{_FREQUENCY}/scaling_max_freq"),
        "boost": _boost(),
        "hyperthreads": _read("/sys/devices/system/cpu/smt/active"),
        "mitigations": _mitigations(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
    }


def usable_cores() -> int:
    """Cores by affinity and by the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = core_quota()
    return max(1, min(cores or 1, int(quota) if quota is not None else cores or 1))


def memory_limit_bytes() -> int:
    """Host memory, or the control group's limit when that is smaller."""
    total, limit = psutil.virtual_memory().total, group_memory_limit_bytes()
    return total if limit is None else min(total, limit)


def local_cluster(
    machine: dict[str, Any], device: str, device_memory_bytes: float | None, count: int | None
) -> Cluster:
    """This machine as a Cluster of `count` devices (None: every GPU, or two CPU processes).

    On a CPU the cores are shared out evenly and so is the memory.
    """
    if device != "cpu":
        return Cluster(
            name=machine["host"],
            device=device,
            device_label=machine["gpus"][0]["name"] if machine["gpus"] else None,
            devices_per_node=count or len(machine["gpus"]) or 1,
            device_memory_bytes=device_memory_bytes,
        )
    cores = machine["cpu"]["usable_cores"]
    ranks = count or min(2, cores)
    return Cluster(
        name=machine["host"],
        device="cpu",
        device_label=machine["cpu"]["model"],
        devices_per_node=ranks,
        device_memory_bytes=machine["memory_bytes"] / ranks,
        threads_per_device=max(1, cores // ranks),
    )


def _packages() -> dict[str, str]:
    """Versions of what computes, without those that are not installed."""
    versions = {"python": sys.version.split()[0]}
    for package in metadata.distributions():
        name = (package.name or "").lower().replace("_", "-")
        cuda = name.startswith(PACKAGE_PREFIX) and name != NO_CUDA_PACKAGE
        if cuda or name in PACKAGES:
            versions.setdefault(name, package.version)  # the first on the path is the one imported
    return versions


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _boost() -> str | None:
    """`on` or `off`, None where the kernel does not say."""
    boost = _read("/sys/devices/system/cpu/cpufreq/boost")
    off = _read("/sys/devices/system/cpu/intel_pstate/no_turbo")
    if boost is None and off is None:
        return None
    return "on" if boost == "1" or off == "0" else "off"


def _mitigations() -> dict[str, str]:
    """How the kernel works around each known fault of the CPU, which can cost speed."""
    files = sorted(Path("/sys/devices/system/cpu/vulnerabilities").glob("*"))
    texts = {file.name: _read(str(file)) for file in files}
    return {name: text for name, text in texts.items() if text and text != "Not affected"}


def _chosen(path: str) -> str | None:
    """The word in brackets: `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", _read(path) or "")
    return match[1] if match else None


def _environment() -> dict[str, str]:
    return {
        name: REDACTED if SECRET_NAME.search(name) else redact(value, os.environ)
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
