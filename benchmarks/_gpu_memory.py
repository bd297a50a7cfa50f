"""Memory that the native trainer had on one GPU, as gpu_proof.py kept it, and its estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._gpu_cases import CASES, spec_of
from paceline.estimate.calibrate.lookup import machine_for
from paceline.estimate.memory.device_memory import memory
from paceline.estimate.memory.framework import frameworks_of
from paceline.estimate.model.case import cases_of
from paceline.estimate.run_case import case_of, software_of
from paceline.machines.placement import find_device

RESULTS = Path(__file__).parent / "results"
FILES = ("gpu_proof", "gpu_proof_workloads")
KINDS = ("allocated", "reserved", "device_used")


def native_on_a_gpu() -> list[dict[str, Any]]:
    """Every native training of the stored results: bytes measured and estimated, by kind."""
    results = (json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES)
    return [
        compare_memory(row, content["device"])
        for content in results
        for row in content["rows"]
        if row["side"] == "native"
    ]


def compare_memory(row: dict[str, Any], device: str) -> dict[str, Any]:
    """One training; what the device used is as it was at the end of the watched step."""
    case = next(case for case in CASES if case.name == row["case"])
    entry = find_device(device)
    assert entry is not None, f"{device} is a device of the catalog"
    spec = spec_of(case, entry.name, row["dtype"], row["compile"])
    machine = machine_for(spec.cluster, spec.training.dtype)
    software = software_of(spec)
    x = cases_of([case_of(spec, machine, software)])
    estimate = memory(x, frameworks_of(machine.generation, software.native))
    measured = {
        "allocated": row["allocated_bytes"],
        "reserved": row["reserved_bytes"],
        "device_used": row["watched_memory"]["peak_bytes"]["device_used"],
    }
    estimated = {kind: float(getattr(estimate, kind)[0]) for kind in KINDS}
    return {
        "case": row["case"],
        "dtype": row["dtype"],
        "compile": row["compile"],
        "device": device,
        "measured_bytes": measured,
        "estimated_bytes": estimated,
        "ratio": {kind: estimated[kind] / measured[kind] for kind in KINDS},
    }


def print_gpu_table(rows: list[dict[str, Any]]) -> None:
    """The trainings as markdown."""
    print("\n| native on one H100 | allocated GiB | allocated | reserved | device used |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        ratios = " | ".join(f"{row['ratio'][kind]:.3f}" for kind in KINDS)
        gib = row["measured_bytes"]["allocated"] / 2**30
        print(f"| {row['case']}, {row['dtype']}, compile {row['compile']} | {gib:.2f} | {ratios} |")
