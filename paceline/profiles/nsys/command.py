"""The command line of `nsys profile`, for releases from 2022.4 on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.core.profiling import PROFILES_FOLDER

TRACE = "cuda,nvtx"
CPU_TRACE = "osrt,nvtx"
"""Without a GPU there is nothing but calls of the operating system's libraries."""


@dataclass(frozen=True)
class NsysSettings:
    """What is recorded beside kernels and the trainer's marks."""

    gpu_metrics: bool = False
    """Samples of the devices' counters, by the first rank of each host for all of its devices."""
    cpu: bool = False
    """Samples of the program counter on the CPU, without the calls that lead there."""


def nsys_words(device: str, output: str, settings: NsysSettings) -> list[str]:
    """The words before the program of one rank; `output` names its file.

    On a GPU the capture lasts from cudaProfilerStart to cudaProfilerStop, between which the trainer
    runs the chosen steps; on a CPU nothing tells it, so the whole program is recorded.
    """
    cuda = device == "cuda"
    words = [
        "nsys",
        "profile",
        f"--output={output}",
        "--force-overwrite=true",
        "--inherit-environment=true",
        f"--trace={TRACE if cuda else CPU_TRACE}",
        "--cpuctxsw=none",
    ]
    # With backtraces, or with switches between threads, 2022.4 never ends in a virtual machine.
    words += ["--sample=process-tree", "--backtrace=none"] if settings.cpu else ["--sample=none"]
    if cuda:
        # Without `stop` the program would be ended with the capture.
        words += [
            "--nic-metrics=true",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
        ]
    return words


def first_words(device: str, settings: NsysSettings) -> list[str]:
    """Further words for the first rank of a host: counters are the device's, not a process's."""
    return ["--gpu-metrics-device=all"] if settings.gpu_metrics and device == "cuda" else []


def output_pattern(recipe: str, dtype: str, world_size: int) -> str:
    """RECIPE-DTYPE_64g_JOB_NODE_LOCAL in the run's folder, with places that the rank fills in.

    So does NVIDIA's benchmark collection name its files.
    """
    name = re.sub(r"[^\w.-]+", "-", recipe)
    return f"{PROFILES_FOLDER}/{name}-{dtype}_{world_size}g_{{job}}_{{node}}_{{local}}"
