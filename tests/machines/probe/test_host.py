"""The parts of a host are read from the kernel's own files, of this machine or of another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.machines.probe.host import disks, host_parts


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two processors of two cores with two threads each, an NVMe disk, one InfiniBand port."""
    files = {
        "proc/meminfo": "MemTotal:       2097152 kB\nMemFree: 1 kB",
        "proc/cpuinfo": "model name\t: Fast CPU @ 2.40GHz",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3800000",
        "sys/devices/system/cpu/cpufreq/boost": "1",
    }
    for cpu in range(8):
        core, package = cpu % 4, cpu % 4 // 2
        place = f"sys/devices/system/cpu/cpu{cpu}"
        files |= {
            f"{place}/topology/physical_package_id": str(package),
            f"{place}/topology/core_id": str(core % 2),
            f"{place}/cache/index0/level": "1",
            f"{place}/cache/index0/type": "Data",
            f"{place}/cache/index0/size": "48K",
            f"{place}/cache/index0/shared_cpu_list": f"{core},{core + 4}",
            f"{place}/cache/index3/level": "3",
            f"{place}/cache/index3/type": "Unified",
            f"{place}/cache/index3/size": "32M",
            f"{place}/cache/index3/shared_cpu_list": "0-1,4-5" if package == 0 else "2-3,6-7",
        }
    files |= {
        "sys/block/nvme0n1/size": "7500000000",
        "sys/block/nvme0n1/device/model": "PM9A3",
        "sys/block/loop0/size": "100",
        "sys/block/sda/size": "0",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "sys/class/infiniband/mlx5_0/device/vendor": "0x15b3",
        "sys/class/infiniband/mlx5_0/device/net/ib0/mtu": "2044",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "sys/class/net/ib0/operstate": "up",
        "sys/class/net/ib0/device/vendor": "0x15b3",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "25000",
        "sys/class/net/eth0/device/vendor": "0x8086",
        "sys/class/net/lo/operstate": "unknown",
    }
    return put(tmp_path, files)


def test_processors_and_caches_are_counted_once(node: Path):
    parts = host_parts(node)

    assert (parts["sockets"], parts["cores"], parts["threads"]) == (2, 4, 8)
    assert parts["caches"] == [
        {"level": 1, "kind": "Data", "bytes": 48 * 1024, "count": 4},
        {"level": 3, "kind": "Unified", "bytes": 32 * 2**20, "count": 2},
    ]
    assert parts["clock_mhz"] == {"base": 2400.0, "max": 3800.0}
    assert parts["memory_bytes"] == 2**31


def test_disks_and_adapters_are_the_real_ones(node: Path):
    parts = host_parts(node)

    assert parts["disks"] == [
        {"name": "nvme0n1", "kind": "NVMe SSD", "bytes": 3_840_000_000_000, "model": "PM9A3"}
    ]
    assert [(a["name"], a["kind"], a["gbit_per_s"], a["vendor"]) for a in parts["adapters"]] == [
        ("mlx5_0", "InfiniBand", 400.0, "Mellanox/NVIDIA"),
        ("eth0", "Ethernet", 25.0, "Intel"),
    ]


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [
        ("sda", "1", "hard disk"),
        ("sdb", "0", "SSD"),
        ("vda", "1", "virtual disk"),
        ("x", "", "disk"),
    ],
)
def test_the_kind_of_a_disk(tmp_path: Path, name: str, rotational: str, kind: str):
    place = f"sys/block/{name}"
    put(tmp_path, {f"{place}/size": "2048", f"{place}/queue/rotational": rotational})

    assert [disk["kind"] for disk in disks(tmp_path)] == [kind]


def test_a_host_that_tells_nothing_is_unknown(tmp_path: Path):
    parts = host_parts(tmp_path)

    assert parts["sockets"] is None and parts["memory_bytes"] is None
    assert parts["caches"] == parts["disks"] == parts["adapters"] == []


def test_this_machine_has_processors_and_memory():
    parts = host_parts()

    assert parts["threads"] == len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*")))
    assert parts["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
