"""Create the profiler of a rank."""

from __future__ import annotations

from contextlib import nullcontext

from paceline.trainer.config import MESH_AXES, ProfileConfig
from paceline.trainer.measure.profiler import PauseWatchdog, Profiler, UnprofiledRank
from paceline.trainer.parallel.mesh import Mesh, World


def make_profiler(
    config: ProfileConfig | None,
    world: World,
    mesh: Mesh,
    pause_watchdog: PauseWatchdog = nullcontext,
) -> Profiler:
    """Return this rank's profiler; ranks that are not profiled only wait for the others.

    Writing a profile may take long, so the watchdog does not count time inside `pause_watchdog`.
    """
    if config is None or config.tool == "nccl":
        return Profiler()
    if config.tool == "nsys" and world.device.type == "cpu":
        return Profiler()
    if world.rank not in config.ranks:
        return UnprofiledRank(config, world, pause_watchdog)
    if config.tool == "torch":
        from paceline.trainer.measure.torch_profiler import TorchProfiler  # takes 0.1 s

        return TorchProfiler(config, world, group_axes(mesh), pause_watchdog)
    if config.tool == "nsys":
        from paceline.trainer.measure.torch_profiler import NsysProfiler

        return NsysProfiler(config, world, group_axes(mesh), pause_watchdog)
    from paceline.trainer.measure.memory_profiler import MemoryProfiler

    return MemoryProfiler(config, world, pause_watchdog)


def group_axes(mesh: Mesh) -> dict[str, str]:
    """Return the mesh axis of every process group by the group's name.

    Groups that shard optimizer states count as `dp`.
    """
    axes = {name: getattr(mesh, name) for name in reversed(MESH_AXES)}
    states = [mesh.data, mesh.replicate, mesh.shard]
    groups: dict[str, str] = {}
    for name, axis in [*axes.items(), *(("dp", axis) for axis in states)]:
        if axis.group is not None:
            groups.setdefault(axis.group.group_name, name)
    return groups
