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

SMALL_BYTES = 128 << 10
"""Payload whose time is mostly latency."""
MAX_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}
"""Maximum of the large payload, whose time is mostly transfer, by type of device."""
GROWTH = 8
"""Ratio of successive payloads. The second one is always measured."""
MAX_PAYLOAD_S = 0.1
"""Maximum time of all calls with a further payload in seconds, predicted from the one before."""
WARM_UP_CALLS, TIMED_CALLS = 2, 5
COUNTERS = ("counters/port_xmit_data", "hw_counters/tx_bytes")
"""Counters of a port: of InfiniBand and RoCE in words of 4 bytes, and of EFA in bytes."""
SIOCGIFADDR = 0x8915
"""Linux ioctl for the IPv4 address of an interface, at byte 20 of its answer."""


def probe_fabric(world: World) -> dict[str, Any] | None:
    """Return times and interfaces of all-reduces of all ranks; None for a single rank.

    Every rank must call it. The bytes of an interface are those of the whole host, so only the
    first rank of each host reports them.
    """
    if world.size == 1:
        return None
    small, _ = _timed_calls(world, SMALL_BYTES)
    num_bytes = GROWTH * SMALL_BYTES
    large, interfaces = _timed_calls(world, num_bytes)
    while num_bytes < MAX_BYTES[world.device.type] and _allows_more(world, large["time_s"]):
        num_bytes *= GROWTH
        large, interfaces = _timed_calls(world, num_bytes)
    return {**large, "calls": TIMED_CALLS, "small": small, "interfaces": interfaces}


def _allows_more(world: World, time_s: float) -> bool:
    """Return whether the next payload is quick enough; all ranks get the same answer."""
    slowest_s = torch.tensor(time_s, device=world.device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    calls = WARM_UP_CALLS + TIMED_CALLS
    return calls * GROWTH * slowest_s.item() <= MAX_PAYLOAD_S


def _timed_calls(world: World, num_bytes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the time of a call with its spread, and what each interface sent meanwhile."""
    payload = torch.zeros(num_bytes // 4, device=world.device)
    for _ in range(WARM_UP_CALLS):
        _all_reduce(payload)
    first = world.local_rank == 0
    before = sent_bytes() if first else {}
    times = [_all_reduce(payload) for _ in range(TIMED_CALLS)]
    after = sent_bytes() if first else {}
    del payload
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    interfaces = [
        {"name": name, "kind": kind, "address": address, "sent_bytes": count - before[name][2]}
        for name, (kind, address, count) in after.items()
        if name in before
    ]
    time_s = statistics.median(times)
    mad_s = statistics.median(abs(each - time_s) for each in times)
    return {"bytes": num_bytes, "time_s": time_s, "spread": 1.4826 * mad_s / time_s}, interfaces


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
