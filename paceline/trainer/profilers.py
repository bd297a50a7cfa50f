"""Which profiler a rank runs under, by the tool that the input names."""

from __future__ import annotations

from contextlib import nullcontext

from paceline.trainer.config import MESH_AXES
from paceline.trainer.measure.profiler import Bystander, Paused, Profiler
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.side_outputs import ProfileConfig


def make_profiler(
    config: ProfileConfig | None, world: World, mesh: Mesh, paused: Paused = nullcontext
) -> Profiler:
    """This rank's profiler; one that only waits for the others on ranks that are not asked for.

    What it writes may take any time: `paused` is what the watchdog counts none in.
    """
    if config is None or config.tool == "nccl":
        return Profiler()
    if config.tool == "nsys" and world.device.type == "cpu":
        return Profiler()
    if world.rank not in config.ranks:
        return Bystander(config, world, paused)
    if config.tool == "torch":
        from paceline.trainer.measure.torch_profiler import TorchProfiler  # takes 0.1 s

        return TorchProfiler(config, world, group_axes(mesh), paused)
    if config.tool == "nsys":
        from paceline.trainer.measure.torch_profiler import NsysProfiler

        return NsysProfiler(config, world, group_axes(mesh), paused)
    from paceline.trainer.measure.memory_profiler import MemoryProfiler

    return MemoryProfiler(config, world, paused)


def group_axes(mesh: Mesh) -> dict[str, str]:
    """The axis of every process group by its name; the ranks that share states are `dp`."""
    axes = {name: getattr(mesh, name) for name in reversed(MESH_AXES)}
    states = [mesh.data, mesh.replicate, mesh.shard]
    named = [*axes.items(), *(("dp", axis) for axis in states)]
    groups: dict[str, str] = {}
    for name, axis in named:
        if axis.group is not None:
            groups.setdefault(axis.group.group_name, name)
    return groups
