"""Hardware of this host: processors, caches, clock, disks, network adapters; None where unknown.

All files are read below `root`, so that the files of another machine can be used as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path("/")
SECTOR_BYTES = 512
"""Unit of disk sizes in the kernel, whatever the disk's own sector size is."""
VIRTUAL_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d+")
ADAPTERS = {
    "0x15b3": "Mellanox/NVIDIA",
    "0x8086": "Intel",
    "0x14e4": "Broadcom",
    "0x1d0f": "Amazon",
    "0x1af4": "virtio",
    "0x1ae0": "Google",
}
"""Adapter vendors by PCI vendor id."""


def host_parts(root: Path = ROOT) -> dict[str, Any]:
    """Return the host's hardware as reported by the kernel."""
    return {
        **processors(root),
        "memory_bytes": memory_bytes(root),
        "caches": caches(root),
        "clock_mhz": clock_mhz(root),
        "disks": disks(root),
        "adapters": [*infiniband(root), *ethernet(root)],
        "amd_accelerators": len(
            list((root / "sys/class/kfd/kfd/topology/nodes").glob("*/mem_banks/0"))
        ),
    }


def processors(root: Path = ROOT) -> dict[str, int | None]:
    """Return sockets, cores and hardware threads of the host, whatever this process may use."""
    core_ids = [
        (_read(cpu / "topology/physical_package_id"), _read(cpu / "topology/core_id"))
        for cpu in _cpus(root)
    ]
    known_ids = [place for place in core_ids if None not in place]
    return {
        "sockets": len({package for package, _ in known_ids}) or None,
        "cores": len(set(known_ids)) or None,
        "threads": len(core_ids) or None,
    }


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return all memory that the kernel manages, whatever the limit of this process."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return int(total[1]) * 1024 if total else None


def caches(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the host's caches by level and kind: bytes of one cache, and their number."""
    one_each = {
        (level, kind, size, _read(cache / "shared_cpu_list"))
        for cpu in _cpus(root)
        for cache in (cpu / "cache").glob("index[0-9]*")
        if (level := _read(cache / "level"))
        and (kind := _read(cache / "type"))
        and (size := _kernel_bytes(_read(cache / "size")))
    }
    counts = Counter((level, kind, size) for level, kind, size, _ in one_each)
    return [
        {"level": int(level), "kind": kind, "bytes": size, "count": n}
        for (level, kind, size), n in sorted(counts.items())
    ]


def clock_mhz(root: Path = ROOT) -> dict[str, float | None]:
    """Return the processor's base and maximum clock in MHz.

    The source is the kernel, and for the base clock else the processor's name. None where unknown.
    """
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    base = _number(_read(frequency / "base_frequency"))  # kHz, like all values of cpufreq
    highest = _number(_read(frequency / "cpuinfo_max_freq"))
    name_match = re.search(r"model name.*@\s*([\d.]+)\s*GHz", _read(root / "proc/cpuinfo") or "")
    return {
        "base": base / 1000 if base else float(name_match[1]) * 1000 if name_match else None,
        "max": highest / 1000 if highest else None,
    }


def disks(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the host's physical disks with kind and bytes, without devices made of others."""
    return [
        {
            "name": disk.name,
            "kind": kind,
            "bytes": sectors * SECTOR_BYTES,
            "model": _read(disk / "device/model"),
        }
        for disk in sorted((root / "sys/block").glob("*"))
        if not VIRTUAL_DISKS.fullmatch(disk.name)
        and (sectors := int(_number(_read(disk / "size")) or 0))
        and (kind := _disk_kind(disk))
    ]


def infiniband(root: Path = ROOT) -> Iterator[dict[str, Any]]:
    """Yield every active port of InfiniBand adapters and of RDMA over Ethernet (RoCE) adapters."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate") or "")
        if "ACTIVE" not in (_read(port / "state") or ""):
            continue
        device = port.parents[1]
        yield {
            "name": device.name,
            "kind": _read(port / "link_layer"),
            "gbit_per_s": float(rate[1]) if rate else None,
            "vendor": _vendor(device),
        }


def ethernet(root: Path = ROOT) -> Iterator[dict[str, Any]]:
    """Yield every physical network interface that is up and not listed by `infiniband`."""
    rdma = {folder.name for folder in (root / "sys/class/infiniband").glob("*/device/net/*")}
    for interface in sorted((root / "sys/class/net").glob("*")):
        real = (interface / "device").exists() and interface.name not in rdma
        if not real or _read(interface / "operstate") != "up":
            continue
        speed = _number(_read(interface / "speed"))  # Mbit/s, -1 if the driver does not know it
        yield {
            "name": interface.name,
            "kind": "Ethernet",
            "gbit_per_s": speed / 1000 if speed and speed > 0 else None,
            "vendor": _vendor(interface),
        }


def _cpus(root: Path) -> list[Path]:
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    return [path for path in folders if path.name[3:].isdecimal()]


def _disk_kind(disk: Path) -> str:
    rotational = _read(disk / "queue/rotational")
    if disk.name.startswith("nvme"):
        return "NVMe SSD"
    if disk.name.startswith(("vd", "xvd")):
        return "virtual disk"
    return {"0": "SSD", "1": "hard disk"}.get(rotational or "", "disk")


def _vendor(device: Path) -> str | None:
    number = _read(device / "device/vendor")
    return ADAPTERS.get(number, number) if number else None


def _kernel_bytes(text: str | None) -> int | None:
    """Return a size such as `48K` in bytes."""
    match = re.fullmatch(r"(\d+)([KMG])", text or "")
    return int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]] if match else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
