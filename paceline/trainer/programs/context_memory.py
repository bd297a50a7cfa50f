"""Measure the memory in use before any model is created.

Run as python -m paceline.trainer.programs.context_memory '{"device": "cpu", "size": 1024}'.

Prints a JSON line per stage and rank: {"event": "context", stage, rank, bytes, pool_bytes,
device_name, torch}. On a CPU `bytes` is the resident memory. On CUDA it is the growth of the
device's used memory, and `pool_bytes` the part in PyTorch's own pool. Start it alone, or one rank
per device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from paceline.trainer.measure.machine import cpu_name, resident_now

MIB = 2**20
SMI = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
SMI_LIMIT_S = 30
Reading = tuple[int, int]
"""Bytes in use, and the part of them in PyTorch's pool."""


def main(settings: dict[str, Any]) -> None:
    """Run the stages and print a line after each."""
    if settings["device"] == "cuda":
        on_cuda(settings["size"])
    else:
        on_cpu(settings["size"])


def on_cpu(size: int) -> None:
    """Measure resident memory after the start, importing torch, a GEMM, and the process group."""
    lines = [("python", resident())]
    import torch

    lines.append(("torch", resident()))
    multiply(torch.device("cpu"), size)
    lines.append(("product", resident()))
    if join("gloo", torch.device("cpu")):
        lines.append(("group", resident()))
    for stage, bytes_now in lines:
        print_stage(stage, (bytes_now, 0), cpu_name())


def on_cuda(size: int) -> None:
    """Measure used device memory after one tensor, a GEMM, and the communicator."""
    before = used_by_device()
    import torch

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    probe = torch.ones(1, device=device)
    torch.cuda.synchronize(device)
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"  # pyright: ignore[reportAttributeAccessIssue]
    if uuid not in before:
        sys.exit(f"nvidia-smi does not list {uuid}: MIG devices are not supported")

    def read() -> Reading:
        torch.cuda.synchronize(device)
        return used_by_device()[uuid] - before[uuid], torch.cuda.memory_reserved(device)

    print_stage("context", read(), properties.name)
    multiply(device, size)
    print_stage("product", read(), properties.name)
    if join("nccl", device):
        print_stage("group", read(), properties.name)
    del probe


def multiply(device: Any, size: int) -> None:
    """Run one GEMM and its gradient, so that libraries are loaded and allocate workspaces."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.ones(size, size, device=device, dtype=dtype, requires_grad=True)
    (a @ a).sum().backward()


def join(backend: str, device: Any) -> bool:
    """Join the other ranks and all-reduce a number to create the communicator; False if alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    import torch
    from torch import distributed as dist

    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(1, device=device))
    return True


def used_by_device() -> dict[str, int]:
    """Return bytes in use on every GPU by UUID, from nvidia-smi, which needs no own context."""
    text = subprocess.run(
        SMI, capture_output=True, text=True, check=True, timeout=SMI_LIMIT_S
    ).stdout
    rows = (line.split(",") for line in text.splitlines() if "," in line)
    return {uuid.strip(): int(used) * MIB for uuid, used in rows}


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    now = resident_now()
    if now is None:
        sys.exit("this system does not report a process's resident memory")
    return now


def print_stage(stage: str, reading: Reading, device_name: str) -> None:
    """Print one stage's line with a single write, so that ranks do not mix."""
    import torch

    line: dict[str, Any] = {
        "event": "context",
        "stage": stage,
        "rank": int(os.environ.get("RANK", "0")),
        "bytes": reading[0],
        "pool_bytes": reading[1],
        "device_name": device_name,
        "torch": torch.__version__,
    }
    os.write(1, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    # A normal exit may wait for peers that never answer.
    os._exit(0)
