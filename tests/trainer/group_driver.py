"""How many sockets a rank has before and after the checkpoint group's first exchanges: FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch import distributed as dist

from paceline.trainer.checkpoint import LAZY_GLOO, make_group
from paceline.trainer.parallel.mesh import World, join_world


def sockets() -> int:
    """Open sockets of this process."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return sum(os.path.islink(link) and "socket" in os.readlink(link) for link in links)  # noqa: PTH114, PTH115


def counts(world: World) -> list[int]:
    """Before the group is made, after it, and after what a save exchanges."""
    found = [sockets()]
    group = make_group()
    assert LAZY_GLOO not in os.environ, "the training's own groups connect as ever"
    found.append(sockets())
    first, whole = world.rank == 0, list(range(world.size))
    plans: list[object] = [None] * world.size
    dist.gather_object(world.rank, plans if first else None, group=group)
    assert plans == whole or not first
    mine: list[object] = [None]
    dist.scatter_object_list(mine, whole if first else None, group=group)
    assert mine == [world.rank]
    return [*found, sockets()]


if __name__ == "__main__":
    here = join_world("cpu")
    figures = counts(here)
    (Path(sys.argv[1]) / f"{here.rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)
