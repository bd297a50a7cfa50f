"""Base class of short programs on hosts: a rank, its output, and the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paceline.trainer.measure.event_log import EventLog


class HostProgram:
    """One rank of a program; torch is imported when a device is opened."""

    def __init__(self, settings: dict[str, Any], rank: int, events: EventLog) -> None:
        """Set up the rank.

        `settings` has `device`, cpu or cuda. The place among the other ranks comes from the
        launcher's environment variables.
        """
        self.settings, self.rank, self.events = settings, rank, events
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.node = rank // self.ranks_per_node
        self.joined = False

    def write(self, event: str, **values: Any) -> None:
        """Write one event line with this rank, its node and its local rank."""
        self.events.write(event, rank=self.rank, node=self.node, local_rank=self.local, **values)

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Run one part; a failure becomes a `fault` line."""
        try:
            work()
        except Exception as error:  # one failed part must not end the others
            self.write("fault", part=name, reason=" ".join(str(error).split())[:300])

    def open_device(self) -> None:
        """Open the device to measure."""
        import torch

        self.device = torch.device(self.settings["device"], *([self.local] * (self.kind == "cuda")))

    def join(self) -> None:
        """Join the other ranks."""
        self.open_device()
        if self.size > 1:
            from paceline.trainer.parallel.mesh import join_world

            # Bound to its device, NCCL would create every group by splitting the world's
            # communicator, and a node that hangs would block the pairs of all others.
            join_world(self.kind, bind=False)
            self.barrier()
        self.joined = self.size > 1

    @property
    def kind(self) -> str:
        """Device type, cpu or cuda."""
        return self.settings["device"]

    def barrier(self) -> None:
        """Wait for all ranks."""
        from torch import distributed as dist

        dist.barrier(device_ids=[self.local] if self.kind == "cuda" else None)

    def pairs(self, rounds: list[list[list[int]]], measure: Callable[[int], None]) -> None:
        """Measure with another node, round by round; a failed pair does not stop the others.

        All devices of a node measure at once, each with the device of the same local rank.
        """
        for pairs in rounds:
            partner = self.partner(pairs)
            if partner is None:
                self.group([self.rank])
            else:
                self.part(f"pair with node {partner}", lambda partner=partner: measure(partner))
            self.barrier()

    def partner(self, pairs: list[list[int]]) -> int | None:
        """Return the other node of this node's pair, None if it has none."""
        return next((b if a == self.node else a for a, b in pairs if self.node in (a, b)), None)

    def group(self, ranks: list[int]) -> Any:
        """Create a group of some ranks without waiting for the other ranks.

        PyTorch names a group after the number of groups that a rank has created, and ranks find
        each other by this name. A rank that skips a round must therefore create a group of its own.
        """
        from torch import distributed as dist

        return dist.new_group(ranks, use_local_synchronization=True)
