"""Bind one rank to cores, then exec its program. Runs next to the program, without the package.

    python bind.py cpu|cuda|FILE PROGRAM [ARGUMENT ...]

`cpu` divides the usable cores evenly. `cuda` gives each rank cores near its GPU. FILE holds a JSON
list of {"cores": "0-3,8", "nic": NAME or null}, with one entry per local rank. Threads that PyTorch
starts later stay on these cores. The binding is reported in PACELINE_BOUND. NCCL chooses among a
host's adapters itself and must see the same ones in all ranks of a host. It therefore gets the
adapters of the whole file, and none without a file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
ASK_LIMIT_S = 20.0
GPU = re.compile(r"(GPU-[0-9a-f-]+), ([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
"""Pattern of a GPU in the output of nvidia-smi: its UUID, and its PCI address split into domain and
remainder."""
Core = tuple[int, ...]
"""Hardware threads of one core."""


def main(mode: str, program: list[str]) -> None:
    """Bind this process, record the binding in its environment, and exec the program."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if mode in ("cpu", "cuda"):
        binding = bind_by_itself(mode, local, ranks)
    else:
        binding = bind_by_file(Path(mode), local)
    set_threads(binding)
    os.environ["PACELINE_BOUND"] = json.dumps(binding)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *program])


def bind_by_itself(kind: str, local: int, ranks: int) -> dict[str, Any]:
    """Bind to the best cores and return the binding with the nearest InfiniBand device.

    If binding is impossible, the result states why.
    """
    if kind == "cuda":
        # CUDA's default order is fastest first. nvidia-smi counts by PCI bus, so a rank's device
        # would differ between the two.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not hasattr(os, "sched_setaffinity"):
        return {"by": None, "why": "this operating system cannot bind processes", "threads": 1}
    usable = os.sched_getaffinity(0)
    cores = whole_cores(usable)
    devices = gpu_addresses(ranks) if kind == "cuda" else []
    near = [device_cores(address, cores) for address in devices]
    share = share_of_device(local, near) if near else even_shares(cores, ranks)[local]
    nic = nearest_nic(devices[local]) if near else None
    binding = {"threads": len(share), "nic": nic, "host_cores": cpu_text(usable)}
    try:
        os.sched_setaffinity(0, {thread for core in share for thread in core})
    except OSError as error:
        return {**binding, "by": None, "why": f"setting the CPU affinity failed: {error.strerror}"}
    return {**binding, "by": "cuda" if near else "cpu"}


def bind_by_file(path: Path, local: int) -> dict[str, Any]:
    """Bind as the file specifies; exits the program if that is not possible."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    if local >= len(entries):
        sys.exit(
            f"bind: the file has cores for {len(entries)} local ranks, and this is rank {local}"
        )
    share = cpu_set(entries[local]["cores"])
    usable = os.sched_getaffinity(0)
    missing = share - usable
    if missing:
        sys.exit(
            f"bind: cores {cpu_text(missing)} of local rank {local} cannot be used on this host"
        )
    os.sched_setaffinity(0, share)
    nic = entries[local].get("nic")
    nics = dict.fromkeys(entry["nic"] for entry in entries if entry.get("nic"))
    if nics:
        os.environ["NCCL_IB_HCA"] = f"={','.join(nics)}"
    cores = len(whole_cores(share))
    return {"by": "file", "nic": nic, "threads": cores, "host_cores": cpu_text(usable)}


def set_threads(binding: dict[str, Any]) -> None:
    """Set one OpenMP thread per core, unless the user has set a number."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, binding["threads"])))


def whole_cores(usable: Iterable[int]) -> list[Core]:
    """Return usable hardware threads grouped by core, ordered by NUMA node."""
    usable = set(usable)
    node_of: dict[int, int] = {}
    for folder in (SYSFS / "devices/system/node").glob("node[0-9]*"):
        number = int(folder.name[4:])
        node_of |= dict.fromkeys(cpu_set(read(folder / "cpulist")), number)
    cores: dict[Core, int] = {}
    for thread in sorted(usable):
        topology = SYSFS / f"devices/system/cpu/cpu{thread}/topology"
        siblings = cpu_set(read(topology / "thread_siblings_list")) or {thread}
        cores.setdefault(tuple(sorted(siblings & usable)), node_of.get(thread, 0))
    return sorted(cores, key=lambda core: (cores[core], core))


def even_shares(cores: list[Core], ranks: int) -> list[list[Core]]:
    """Return the same number of neighbouring cores for each rank; remaining cores stay free.

    With fewer cores than ranks, hardware threads are distributed instead. With fewer threads than
    ranks, several ranks share one thread.
    """
    if len(cores) < ranks:
        threads = [(thread,) for core in cores for thread in core]
        if len(threads) < ranks:
            return [[threads[rank % len(threads)]] for rank in range(ranks)]
        cores = threads
    size = len(cores) // ranks
    return [cores[rank * size : (rank + 1) * size] for rank in range(ranks)]


def share_of_device(local: int, near: list[list[Core]]) -> list[Core]:
    """Return this rank's share of the cores near its device.

    Ranks of other devices may be near the same cores, which are then divided among them.
    """
    together = [rank for rank, cores in enumerate(near) if cores == near[local]]
    return even_shares(near[local], len(together))[together.index(local)]


def gpu_addresses(ranks: int) -> list[str]:
    """Return the PCI addresses of the ranks' GPUs, in order; empty if they are unknown."""
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = [match.groups() for line in result.stdout.splitlines() if (match := GPU.fullmatch(line))]
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        gpus = visible_gpus(gpus, visible_devices)
    # nvidia-smi writes the PCI domain with eight digits, the kernel with as many as needed, at
    # least four.
    addresses = [f"{int(domain, 16):04x}:{bus.lower()}" for _, domain, bus in gpus]
    return addresses[:ranks] if len(gpus) >= ranks else []


def visible_gpus(gpus: Sequence[tuple[str, ...]], visible_devices: str) -> list[tuple[str, ...]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists.

    As in CUDA, an entry that matches no device ends the list.
    """
    selection: list[tuple[str, ...]] = []
    for entry in map(str.strip, visible_devices.split(",")):
        if entry.isdecimal():
            matches = gpus[int(entry) : int(entry) + 1]
        else:
            matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu[0].startswith(entry)]
        if len(matches) != 1:
            break
        selection += matches
    return selection


def device_cores(address: str, cores: list[Core]) -> list[Core]:
    """Return the usable cores near a PCI device; all cores if the system does not report it."""
    near = cpu_set(read(SYSFS / "bus/pci/devices" / address / "local_cpulist"))
    return [core for core in cores if near.issuperset(core)] or cores


def nearest_nic(address: str) -> str | None:
    """Return the active InfiniBand device nearest to a PCI device, or None.

    It is on the same NUMA node and shares the longest part of the device's path.
    """
    device = (SYSFS / "bus/pci/devices" / address).resolve()
    best: tuple[int, str] | None = None
    for folder in sorted((SYSFS / "class/infiniband").glob("*")):
        place = (folder / "device").resolve()
        states = [read(port / "state") for port in folder.glob("ports/*")]
        same = read(place / "numa_node") == read(device / "numa_node")
        if not same or not any("ACTIVE" in state for state in states):
            continue
        shared = sum(a == b for a, b in zip(place.parts, device.parts, strict=False))
        if best is None or shared > best[0]:
            best = (shared, folder.name)
    return best[1] if best else None


def cpu_set(text: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def cpu_text(numbers: Iterable[int]) -> str:
    """Return numbers as a list such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def read(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
