"""The rates of this processor where it is not calibrated."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Peak
from paceline.core.run import RunSpec
from paceline.estimate.model.machine import Machine, machine
from paceline.machines.probe.collective import probe_collective
from paceline.machines.probe.memory import probe_memory
from paceline.runs.plan import reachable_rate

PROBE_S = 0.1
"""For each payload of a probe."""
ALONE_BYTES_PER_S = 1e9
"""Stands for the links of a single rank, which exchanges nothing."""


def probed_machine(spec: RunSpec, local: dict[str, Any]) -> Machine | None:
    """A processor that is not calibrated, as the time model takes it; None where that fails.

    Its rates are measured: matrix products and copies on all cores, of which a rank has its share,
    and an all-reduce among the ranks. That takes a few seconds.
    """
    cluster = spec.cluster
    if cluster.device != "cpu" or not cluster.runs_here:
        return None
    try:
        return _measured(spec, local, machine("cpu", devices_per_node=cluster.devices_per_node))
    except SystemFaultError:
        return None


def _measured(spec: RunSpec, local: dict[str, Any], nominal: Machine) -> Machine | None:
    ranks, cores = spec.world_size, local["cpu"]["usable_cores"]
    products = reachable_rate(spec, local)
    best = products.best(spec.training.dtype) if products else None
    if best is None:
        return None
    python = spec.cluster.python or sys.executable
    copies = probe_memory(python, "cpu", cores, PROBE_S).rows[-1]
    peak = Peak(flops_per_s=best.flops_per_s / ranks, source="measured here")
    device = nominal.device.model_copy(
        update={
            "peaks": {spec.training.dtype: peak, "bf16": peak, "fp32": peak},
            "memory_bytes": spec.cluster.device_memory_bytes,
            "memory_bytes_per_s": copies.bytes_per_s / ranks,
        }
    )
    link = ALONE_BYTES_PER_S
    if ranks > 1:
        threads = spec.cluster.threads_per_device
        link = probe_collective(python, "cpu", ranks, threads, PROBE_S).rows[-1].bus_bytes_per_s
    return replace(
        nominal,
        device=device,
        generation="cpu",
        domain=ranks,
        devices_per_node=ranks,
        intra_bytes_per_s=link,
        inter_bytes_per_s=link,
        notes=(
            "this processor is not calibrated; its rates were measured just now, in a few seconds",
        ),
    )
