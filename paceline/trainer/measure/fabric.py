"""Probe of what carries collectives: a timed all-reduce of all ranks, and the interfaces it used.

The kernel counts the bytes that each network interface and each RDMA port has sent. The difference
over the probe shows the interfaces in use, whatever library sends. NVLink and shared memory have no
such counters.
"""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from paceline.trainer.parallel.mesh import World

PAYLOAD_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
WARM_UP_CALLS, TIMED_CALLS = 2, 5
COUNTERS = ("counters/port_xmit_data", "hw_counters/tx_bytes")
"""Counters of a port: of InfiniBand and RoCE in words of 4 bytes, and of EFA in bytes."""
SIOCGIFADDR = 0x8915
"""Linux ioctl for the IPv4 address of an interface, at byte 20 of its answer."""


def probe_fabric(world: World) -> dict[str, Any] | None:
    """Return time and interfaces of an all-reduce of all ranks; None for a single rank.

    Every rank must call it. The bytes of an interface are those of the whole host, so only the
    first rank of each host reports them.
    """
    if world.size == 1:
        return None
    payload = torch.zeros(PAYLOAD_BYTES[world.device.type] // 4, device=world.device)
    for _ in range(WARM_UP_CALLS):
        _all_reduce(payload)
    first = world.local_rank == 0
    before = sent_bytes() if first else {}
    times = [_all_reduce(payload) for _ in range(TIMED_CALLS)]
    after = sent_bytes() if first else {}
    num_bytes = payload.numel() * payload.element_size()
    del payload
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "bytes": num_bytes,
        "calls": TIMED_CALLS,
        "time_s": statistics.median(times),
        "interfaces": [
            {"name": name, "kind": kind, "address": address, "sent_bytes": count - before[name][2]}
            for name, (kind, address, count) in after.items()
            if name in before
        ],
    }


def _all_reduce(payload: torch.Tensor) -> float:
    """Return the seconds of one all-reduce."""
    start = time.perf_counter()
    dist.all_reduce(payload)
    if payload.device.type == "cuda":
        torch.cuda.synchronize(payload.device)
    return time.perf_counter() - start


def sent_bytes(root: Path = Path("/sys/class")) -> dict[str, tuple[str, str, int]]:
    """Return (kind, IPv4 address, bytes sent so far) of each active interface and RDMA port.

    The kind is `net`, or the link layer of the port: `InfiniBand`, `Ethernet` (RoCE), or `EFA`.
    """
    interfaces: dict[str, tuple[str, str, int]] = {}
    for folder in sorted((root / "net").glob("*")):
        count = _read(folder / "statistics/tx_bytes")
        if count.isdecimal() and _read(folder / "operstate") in ("up", "unknown"):
            interfaces[folder.name] = "net", _address(folder.name), int(count)
    for folder in sorted((root / "infiniband").glob("*/ports/*")):
        device = folder.parent.parent
        for counter in COUNTERS:
            count = _read(folder / counter)
            if count.isdecimal() and "ACTIVE" in _read(folder / "state"):
                layer = _read(folder / "link_layer")
                is_efa = (device / "device/driver").resolve().name == "efa"
                scale = 4 if counter == COUNTERS[0] else 1
                kind = "EFA" if is_efa else layer or "unknown"
                interfaces[f"{device.name}:{folder.name}"] = kind, "", int(count) * scale
                break
    return interfaces


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15])
            )
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
