"""Faults in a node's own data that make it unfit, regardless of the other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.units import GIB, percent, pluralize, si

MIN_FREE_FRACTION = 0.02
MIN_FREE_BYTES = GIB
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    61: "internal error",
    62: "internal error",
    63: "row remapping",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU fell off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timed out",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""NVIDIA's Xid numbers that indicate hardware errors; 13, 31, 43 and 45 are mostly errors of
programs."""
THROTTLES = {
    "hw_thermal_slowdown": "is slowed down by the hardware because of heat",
    "hw_power_brake_slowdown": "is slowed down by the power supply's brake signal",
    "hw_slowdown": "is slowed down by the hardware",
}


def faults(facts: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the faults of a node, one sentence each; `gpus` is their state under load."""
    return [
        *(fault for number, gpu in enumerate(gpus) for fault in _gpu_faults(number, gpu)),
        *_xid_faults(facts.get("xids") or []),
        *_disk_faults(facts),
    ]


def remarks(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return observations that deserve attention but do not exclude the node."""
    hot = [n for n, gpu in enumerate(gpus) if gpu.get("sw_thermal_slowdown") == "Active"]
    return [f"GPU {number} lowers its clock because of heat" for number in hot]


def _gpu_faults(number: int, gpu: Mapping[str, Any]) -> list[str]:
    sentences: list[str] = []
    errors = gpu.get("ecc_uncorrected")
    if errors and errors.isdecimal() and int(errors):
        sentences.append(
            f"GPU {number} has {pluralize(int(errors), 'uncorrected memory error')} since its "
            "driver started"
        )
    if gpu.get("rows_failed") in ("Yes", "1"):
        sentences.append(f"GPU {number} could not remap a failed row of memory")
    if gpu.get("rows_pending") in ("Yes", "1"):
        sentences.append(f"GPU {number} needs a reset to remap a row of memory")
    active = [text for name, text in THROTTLES.items() if gpu.get(name) == "Active"]
    return sentences + [f"GPU {number} {text}" for text in active[:1]]


def _xid_faults(xids: Sequence[Mapping[str, Any]]) -> list[str]:
    hardware_events = [event for event in xids if event["xid"] in HARDWARE_XIDS]
    kinds = dict.fromkeys((event["xid"], event["address"]) for event in hardware_events)
    return [
        f"the kernel's log has Xid {xid} ({HARDWARE_XIDS[xid]}) of GPU {address}"
        for xid, address in kinds
    ]


def _disk_faults(facts: Mapping[str, Any]) -> list[str]:
    free, size = facts.get("folder_free_bytes"), facts.get("folder_bytes")
    sentences: list[str] = []
    if free is not None and size and (free < MIN_FREE_BYTES or free / size < MIN_FREE_FRACTION):
        sentences.append(f"{si(free, 'B')} ({percent(free / size)}) are free in the run folder")
    temporary = facts.get("temporary_free_bytes")
    if temporary is not None and temporary < MIN_FREE_BYTES:
        sentences.append(f"{si(temporary, 'B')} are free in its temporary folder")
    return sentences
