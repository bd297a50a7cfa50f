"""Inventory of this machine, recorded with every run so that its figures can be compared."""

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
from paceline.core.secrets import REDACTED, has_secret_name, redact
from paceline.machines.probe.container import container, core_quota, group_memory_limit_bytes
from paceline.machines.probe.gpus import gpus

BUSY_SAMPLE_S = 0.2
"""Time in seconds over which CPU use is sampled. Unlike the load average, a sample does not include
processes that have ended."""

SCHEMA = 2
"""Version of the inventory. Two inventories of one version hold the same items; version 2 added
many items that affect speed."""

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
"""Prefix of the packages of CUDA, cuBLAS, cuDNN and NCCL. Their names change with the CUDA version,
so they cannot be listed."""
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
"""Recorded variables: only those that can affect speed or identify the job, because any other
variable may hold a secret."""
_FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"


def inventory() -> dict[str, Any]:
    """Return host, CPU, memory, devices, versions and environment, with secrets redacted."""
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
        "transparent_hugepages": _active_option("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_1min": os.getloadavg()[0],
        "cpu_busy_fraction": psutil.cpu_percent(BUSY_SAMPLE_S) / 100,
        "gpus": gpus(),
        "python": platform.python_version(),
        "packages": _packages(),
        "environment": _environment(),
    }


def cpu() -> dict[str, Any]:
    """Return CPU model, usable cores, clock settings and support for bf16 instructions."""
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
    """Return the cores allowed by affinity and by the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = core_quota()
    return max(1, min(cores or 1, int(quota) if quota is not None else cores or 1))


def memory_limit_bytes() -> int:
    """Return the host's memory, or the control group's limit if that is smaller."""
    total, limit = psutil.virtual_memory().total, group_memory_limit_bytes()
    return total if limit is None else min(total, limit)


def local_cluster(
    machine: dict[str, Any], device: str, device_memory_bytes: float | None, count: int | None
) -> Cluster:
    """Return this machine as a Cluster of `count` devices.

    With None it has every GPU, or up to two CPU processes. On a CPU, cores and memory are divided
    evenly.
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
    """Return the versions of installed packages that affect computation."""
    versions = {"python": sys.version.split()[0]}
    for package in metadata.distributions():
        name = (package.name or "").lower().replace("_", "-")
        cuda = name.startswith(PACKAGE_PREFIX) and name != NO_CUDA_PACKAGE
        if cuda or name in PACKAGES:
            versions.setdefault(name, package.version)  # the first one on the path is imported
    return versions


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _boost() -> str | None:
    """Return `on` or `off`, or None if the kernel does not report it."""
    boost = _read("/sys/devices/system/cpu/cpufreq/boost")
    off = _read("/sys/devices/system/cpu/intel_pstate/no_turbo")
    if boost is None and off is None:
        return None
    return "on" if boost == "1" or off == "0" else "off"


def _mitigations() -> dict[str, str]:
    """Return the kernel's mitigation of each CPU vulnerability, which can reduce speed."""
    files = sorted(Path("/sys/devices/system/cpu/vulnerabilities").glob("*"))
    texts = {file.name: _read(str(file)) for file in files}
    return {name: text for name, text in texts.items() if text and text != "Not affected"}


def _active_option(path: str) -> str | None:
    """Return the word in brackets, as in `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", _read(path) or "")
    return match[1] if match else None


def _environment() -> dict[str, str]:
    return {
        name: REDACTED if has_secret_name(name, value) else redact(value, os.environ)
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
