"""Small traces in Kineto's form, written by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]},
    {"pg_name": "5", "pg_desc": "DATA_PARALLEL_GROUP_WITH_CP", "ranks": [0, 1]},
    {"pg_name": "7", "pg_desc": "mesh_tp", "ranks": [0, 1]},
    {"pg_name": "9", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": [0, 1]},
]


def event(category: str, name: str, begin: float, end: float, tid: int = 7, **args: Any) -> Any:
    """One event, times in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def kernel(name: str, begin: float, end: float, stream: int = 7) -> Any:
    """A kernel that computes."""
    return event("kernel", name, begin, end, stream, stream=stream)


def collective(name: str, group: str, begin: float, end: float, stream: int = 20) -> Any:
    """A kernel of NCCL by the name of its process group."""
    args = {"Process Group Name": group, "Collective name": name.lower()}
    return event("kernel", f"ncclDevKernel_{name}_Sum_bf16_RING_LL", begin, end, stream, **args)


def step(number: int, begin: float, end: float) -> list[Any]:
    """The marks of a step on the host and, a little later, on the device."""
    name = f"ProfilerStep#{number}"
    return [
        event("user_annotation", name, begin - 5, end - 5, 1),
        event("gpu_user_annotation", name, begin, end, 7),
    ]


def write(path: Path, events: Iterable[Any], rank: int = 0, **fields: Any) -> Path:
    """A whole trace, compressed if it is called so."""
    info = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": GROUPS}
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": info,
        **fields,
        "traceEvents": list(events),
        "traceName": path.name,
    }
    text = json.dumps(document, indent=2).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
