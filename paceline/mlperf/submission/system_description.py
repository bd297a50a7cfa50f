"""Write a system description from a machine's inventory; unknown fields are marked as open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError, UserError, unknown_name
from paceline.core.hardware import Cluster
from paceline.core.units import GIB, MIB
from paceline.files import catalog
from paceline.files.temporary import temporary_folder
from paceline.machines.probe.host import host_parts
from paceline.machines.probe.inventory import inventory
from paceline.mlperf.check.findings import CheckedFile
from paceline.mlperf.check.official_checker import PACKAGE, checker_rulesets, checker_version
from paceline.mlperf.rules import DEFAULT_RULESET
from paceline.mlperf.submission.description_check import (
    FIELDS,
    SOFTWARE,
    Description,
    check_description,
    open_fields,
    open_value,
    with_settings,
)

NONE = "none"
SOFTWARE_PACKAGES = ("cudnn", "cublas", "nccl", "cuda-runtime")
"""CUDA library packages, whose names contain the CUDA version."""

Inventory = Mapping[str, Any]
Fields = dict[str, str | dict[str, str]]


def machine_description(
    machine: Inventory, parts: Inventory, cluster: Cluster | None, is_node: bool
) -> Fields:
    """Return every field, from the machine's inventory, the host's parts and the cluster.

    If this machine is not a node of the cluster (`is_node`), its hardware is not used.
    """
    values: dict[str, str | None] = {"hw_notes": "", "sw_notes": "", **_cluster_fields(cluster)}
    if is_node:
        values |= {
            **_processors(machine, parts),
            **_host(parts),
            **_accelerators(machine, parts, cluster),
        }
        values["operating_system"] = machine.get("distribution")
    elif cluster:
        values |= _cluster_accelerators(cluster)
    values["framework"] = _framework(machine) if is_node else None
    fields: Fields = {}
    for name in FIELDS:
        value = values.get(name)
        fields[name] = open_value(name) if value is None else value
    fields[SOFTWARE] = _software(machine) if is_node else {}
    return fields


def _cluster_fields(cluster: Cluster | None) -> dict[str, str | None]:
    if cluster is None:
        return {"number_of_nodes": "1", "host_networking_topology": NONE}
    topology = NONE if cluster.nodes == 1 else None
    return {
        "number_of_nodes": str(cluster.nodes),
        "system_name": cluster.name,
        "host_networking_topology": topology,
    }


def _processors(machine: Inventory, parts: Inventory) -> dict[str, str | None]:
    sockets, cores, threads = parts["sockets"], parts["cores"], parts["threads"]
    clock = parts["clock_mhz"]
    mhz, kind = (clock["base"], "base") if clock["base"] else (clock["max"], "highest")
    return {
        "host_processors_per_node": _count(sockets),
        "host_processor_model_name": machine["cpu"]["model"],
        "host_processor_core_count": _count(cores // sockets) if cores and sockets else None,
        "host_processor_vcpu_count": _count(threads),
        "host_processor_frequency": f"{mhz / 1000:g} GHz {kind}" if mhz else None,
        "host_processor_caches": _caches(parts["caches"]),
        "host_processor_interconnect": f"{NONE}: one processor" if sockets == 1 else None,
    }


def _host(parts: Inventory) -> dict[str, str | None]:
    disks: Sequence[Inventory] = parts["disks"]
    memory = parts["memory_bytes"]
    return {
        "host_memory_capacity": f"{memory / GIB:.0f} GiB" if memory else None,
        "host_storage_type": " + ".join(dict.fromkeys(disk["kind"] for disk in disks)) or None,
        "host_storage_capacity": _group(
            f"{disk['bytes'] / 1e9:,.0f} GB {disk['kind']}" for disk in disks
        ),
        "host_networking": _group(map(_adapter, parts["adapters"])),
    }


def _accelerators(
    machine: Inventory, parts: Inventory, cluster: Cluster | None
) -> dict[str, str | None]:
    """Return the fields of the GPUs that the driver lists; 0 accelerators on a CPU-only machine."""
    gpus: Sequence[Inventory] = machine["gpus"]
    if not gpus and parts["amd_accelerators"]:
        return {"accelerators_per_node": str(parts["amd_accelerators"])}
    if not gpus:
        names = [name for name in FIELDS if name.startswith("accelerator_")]
        return {
            **dict.fromkeys(names, ""),
            "accelerators_per_node": "0",
            "accelerator_model_name": f"{NONE}: CPU only",
        }
    first = gpus[0]
    count = cluster.devices_per_node if cluster else len(gpus)
    memory, clock = first["memory_bytes"], first["max_sm_clock_mhz"]
    return {
        "accelerators_per_node": str(count),
        "accelerator_model_name": first["name"],
        "accelerator_memory_capacity": f"{memory / MIB:.0f} MiB" if memory else None,
        "accelerator_frequency": f"{clock} MHz highest" if clock else None,
        "accelerator_host_interconnect": first.get("pcie"),
        "accelerator_interconnect": first.get("nvlink") or (NONE if count == 1 else None),
    }


def _cluster_accelerators(cluster: Cluster) -> dict[str, str | None]:
    memory = cluster.device_memory_bytes
    return {
        "accelerators_per_node": str(cluster.devices_per_node),
        "accelerator_model_name": cluster.device_label or cluster.device,
        "accelerator_memory_capacity": f"{memory / MIB:.0f} MiB" if memory else None,
    }


def _framework(machine: Inventory) -> str | None:
    """Return the framework's version; the release of NVIDIA's containers says more than torch's."""
    release = machine["environment"].get("NVIDIA_PYTORCH_VERSION")
    torch = machine["packages"].get("torch")
    if release:
        return f"PyTorch NVIDIA Release {release}"
    return f"PyTorch {torch}" if torch else None


def _software(machine: Inventory) -> dict[str, str]:
    packages: Mapping[str, str] = machine["packages"]
    versions = {
        f"{part.replace('-', '_')}_version": version
        for part in SOFTWARE_PACKAGES
        for name, version in packages.items()
        if name.startswith(f"nvidia-{part}")
    }
    for gpu in machine["gpus"][:1]:
        cuda, driver = gpu.get("cuda_driver"), gpu.get("driver")
        versions |= {"cuda_driver_version": cuda} if cuda else {}
        versions |= {"nvidia_kernel_driver": driver} if driver else {}
    return {**versions, "python_version": machine["python"], "kernel_version": machine["kernel"]}


def _caches(caches: Sequence[Inventory]) -> str | None:
    kinds = {"Data": "d", "Instruction": "i"}
    caches_text = [
        f"L{cache['level']}{kinds.get(cache['kind'], '')} {cache['count']} x "
        f"{cache['bytes'] // 1024:,} KiB"
        for cache in caches
    ]
    return "; ".join(caches_text) or None


def _adapter(adapter: Inventory) -> str:
    speed = f"{adapter['gbit_per_s']:g} Gb/s" if adapter["gbit_per_s"] else "unknown speed"
    return f"{adapter['vendor'] or ''} {adapter['kind'] or 'adapter'}, {speed}".strip()


def _group(texts: Iterable[str]) -> str | None:
    """Return the texts with counts, such as `2x a + 1x b`; None if there are none."""
    items = list(texts)
    counts = {text: items.count(text) for text in items}
    return " + ".join(f"{n}x {text}" for text, n in counts.items()) or None


def _count(number: int | None) -> str | None:
    return str(number) if number else None


def describe(
    cluster: str | None, settings: Sequence[str], out: Path | None, ruleset: str | None = None
) -> Description:
    """Describe this machine, or a cluster of such machines, and run the official checker on it.

    With `out` the description is written there. Raises UserError for a file that exists, and for an
    unknown cluster, setting or ruleset.
    """
    ruleset_name = _ruleset(ruleset)
    if out is not None and out.exists():
        raise UserError(
            str(out),
            "already exists",
            remedy="choose another --output, or edit the file and check it with "
            "`paceline mlperf check FILE`",
        )
    machine, nodes = inventory(), catalog.cluster(cluster) if cluster else None
    is_node, notes = _is_node(machine, nodes)
    fields = with_settings(machine_description(machine, host_parts(), nodes, is_node), settings)
    text = json.dumps(fields, indent=4, ensure_ascii=False) + "\n"
    version, findings, checker_error = None, (), None
    if checker_rulesets():
        version = f"{PACKAGE} {checker_version()}"
        result = _check_text(text, ruleset_name)
        findings, checker_error = result.findings, result.reason
        notes = (*notes, f"official checker: {checker_error}") if checker_error else notes
    else:
        notes = (*notes, f"{PACKAGE} is not installed; the official checker did not run")
    if out is not None:
        _write(out, text)
    still_open = open_fields(fields)
    open_names = {field.field for field in still_open}
    wrong = [finding for finding in findings if finding.key not in open_names]
    return Description(
        description=fields,
        unknown=tuple(still_open),
        notes=notes,
        ruleset=ruleset_name,
        checker=version,
        findings=tuple(wrong),
        status="failed" if wrong else "incomplete" if still_open or checker_error else "complete",
        output=str(out) if out else None,
    )


def _ruleset(option: str | None) -> str:
    rulesets = checker_rulesets()
    if option is not None and rulesets and option not in rulesets:
        raise unknown_name(
            f"--ruleset {option}", "is not known to the official checker", option, rulesets
        )
    return option or DEFAULT_RULESET


def _is_node(machine: dict[str, Any], cluster: Cluster | None) -> tuple[bool, tuple[str, ...]]:
    """Return whether this machine is like the cluster's nodes, and the notes on that."""
    if cluster is None:
        return True, ()
    if cluster.device != "cpu" and not machine["gpus"]:
        return False, (
            f"this machine has no {cluster.device}, so it is not a node of {cluster.name}; run "
            "this on a node to fill in its hardware",
        )
    if cluster.nodes > 1:
        alike = f"all {cluster.nodes} nodes of {cluster.name} are assumed to equal this machine"
        return True, (alike,)
    return True, ()


def _check_text(text: str, ruleset: str) -> CheckedFile:
    with temporary_folder() as scratch:
        path = Path(scratch) / "system.json"
        path.write_text(text, encoding="utf-8")
        return check_description(path, path.name, ruleset, Path(scratch))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
