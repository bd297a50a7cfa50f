"""Traffic of a rank over each axis, counted where PyTorch's Python code calls process groups.

The log is written only if PACELINE_TRAFFIC is set to a folder; otherwise nothing is wrapped.
<folder>/rank-NNNNN.jsonl has one line per step, schema 1. Bytes are those of the whole tensor: all
ranks' data after a gather and before a scatter. Communication started by C++ is not counted: DDP
broadcasts the weights once, before the first step.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist

from paceline.trainer.measure.clock import StepClock
from paceline.trainer.parallel.mesh import Mesh, World

SCHEMA = 1
VARIABLE = "PACELINE_TRAFFIC"
Groups = dict[str, tuple[str, tuple[int, ...]]]
"""Axis and world ranks of process groups, by the group's name."""
Sizes = Callable[..., list[int]]
"""Function from the arguments after the group to the bytes of each message of a call."""


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _each(tensors: list[Tensor], *_: Any, **__: Any) -> list[int]:
    return [_bytes(tensor) for tensor in tensors]


def _first(tensor: Tensor, *_: Any, **__: Any) -> list[int]:
    return [_bytes(tensor)]


def _second(_out: Tensor, tensor: Tensor, *_: Any, **__: Any) -> list[int]:
    return [_bytes(tensor)]


# PyTorch 2.13 renamed three of them; 2.11 has only the names with an underscore or `base`.
CALLS: dict[str, tuple[str, Sizes]] = {
    "allreduce": ("all_reduce", _each),
    "broadcast": ("broadcast", _each),
    "all_gather_single": ("all_gather", _first),
    "_allgather_base": ("all_gather", _first),
    "reduce_scatter_single": ("reduce_scatter", _second),
    "_reduce_scatter_base": ("reduce_scatter", _second),
    "all_to_all_single": ("all_to_all", _second),
    "alltoall_base": ("all_to_all", _second),
    "send": ("send", _each),
    "recv": ("recv", _each),
}
"""Methods of a process group: the collective, and the function for its message sizes."""


class TrafficLog:
    """Counts of a rank's calls by axis and step."""

    def __init__(self, folder: str, steps: StepClock, world: World, groups: Groups) -> None:
        """Open the log; `groups` has the axis and the ranks of each group by its name."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.steps, self.groups = steps, groups
        self._calls: Counter[tuple[str, str, int, int]] = Counter()
        self._step = 0
        self._file = (Path(folder) / f"rank-{world.rank:05d}.jsonl").open("w", encoding="utf-8")
        self._line({
            "event": "start", "schema": SCHEMA, "rank": world.rank, "world_size": world.size,
            "backend": world.backend, "axes": dict(groups.values()),
        })  # fmt: skip

    def count(self, group: Any, collective: str, sizes: list[int]) -> None:
        """Add a call's messages to the current step."""
        if self.steps.step != self._step:
            self.flush()
            self._step = self.steps.step
        axis, _ = self.groups.get(group.group_name, ("world", ()))
        for size in sizes:
            self._calls[axis, collective, group.size(), size] += 1

    def flush(self) -> None:
        """Write the counts of the step; traffic before the first step is omitted."""
        if self._step and self._calls:
            rows = [
                {"axis": axis, "collective": name, "ranks": ranks, "bytes": size, "calls": calls}
                for (axis, name, ranks, size), calls in sorted(self._calls.items())
            ]
            self._line({"event": "traffic", "step": self._step, "messages": rows})
        self._calls.clear()

    def close(self) -> None:
        """Write the last step."""
        self.flush()
        self._file.close()

    def _line(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def group_names(mesh: Mesh) -> Groups:
    """Return the groups of a mesh; a group shared by two axes with the same ranks is `cp+dp`."""
    data = "dp" if mesh.replicate.size == 1 else "dp_shard"
    axes = {
        "cp": mesh.cp,
        data: mesh.shard,
        "dp_replicate": mesh.replicate,
        "pp": mesh.pp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "expert_data": mesh.expert_data,
    }
    names: Groups = {}
    for name, axis in axes.items():
        if axis.group is not None:
            before = names.get(axis.group.group_name)
            names[axis.group.group_name] = (f"{before[0]}+{name}" if before else name, axis.ranks)
    return names


def watch_traffic(steps: StepClock, world: World, mesh: Mesh) -> Callable[[], None] | None:
    """Count all traffic from now on, if requested; return a function that undoes it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    log = TrafficLog(folder, steps, world, group_names(mesh))
    # From `vars`, because attributes of the class would be functions that bind no instance.
    originals = {name: m for name, m in vars(dist.ProcessGroup).items() if name in CALLS}
    for name, method in originals.items():
        setattr(dist.ProcessGroup, name, _counting_method(method, log, *CALLS[name]))

    def undo() -> None:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)
        log.close()

    return undo


def _counting_method(method: Any, log: TrafficLog, collective: str, sizes: Sizes) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        log.count(group, collective, sizes(*args, **kwargs))
        return method.__get__(group)(*args, **kwargs)

    return call
