"""A rank of a short program on hosts: its place, its lines, and the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from paceline.trainer.measure.event_log import EventLog


class HostProgram:
    """One rank, its place, and where it writes; torch is loaded when a device is opened."""

    def __init__(self, settings: dict[str, Any], rank: int, events: EventLog) -> None:
        """`settings` has `device`, cpu or cuda; the launcher's variables say the place."""
        self.settings, self.rank, self.events = settings, rank, events
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.node = rank // self.ranks_per_node
        self.joined = False

    def write(self, event: str, **values: Any) -> None:
        """One line, with this rank's place."""
        self.events.write(event, rank=self.rank, node=self.node, local_rank=self.local, **values)

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do one part; a failure becomes a line."""
        try:
            work()
        except Exception as error:  # the program's edge: one part must not end the others
            self.write("fault", part=name, reason=" ".join(str(error).split())[:300])

    def open_device(self) -> None:
        """What is measured on."""
        import torch

        self.device = torch.device(self.settings["device"], *([self.local] * (self.kind == "cuda")))

    def join(self) -> None:
        """Meet the other ranks."""
        self.open_device()
        if self.size > 1:
            from paceline.trainer.parallel.mesh import join_world

            # Bound to its device, NCCL would make every group by splitting the world's
            # communicator: a node that falls silent would hold up the pairs of all others.
            join_world(self.kind, bind=False)
            self.barrier()
        self.joined = self.size > 1

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.settings["device"]

    def barrier(self) -> None:
        """Wait for all ranks."""
        from torch import distributed as dist

        dist.barrier(device_ids=[self.local] if self.kind == "cuda" else None)

    def pairs(self, rounds: list[list[list[int]]], measure: Callable[[int], None]) -> None:
        """Measure with another node, round by round; a pair that fails stops no other.

        All devices of a node do so at once, each with the one of its number.
        """
        for pairs in rounds:
            partner = self.partner(pairs)
            if partner is None:
                self.group([self.rank])
            else:
                self.part(f"pair with node {partner}", lambda partner=partner: measure(partner))
            self.barrier()

    def partner(self, pairs: list[list[int]]) -> int | None:
        """The other node of this one's pair, None where it has none."""
        return next((b if a == self.node else a for a, b in pairs if self.node in (a, b)), None)

    def group(self, ranks: list[int]) -> Any:
        """A group of some ranks, which nobody else waits for.

        PyTorch names it after how many groups a rank has had, and ranks find each other by the
        name. So a rank that sits out a round makes one of its own.
        """
        from torch import distributed as dist

        return dist.new_group(ranks, use_local_synchronization=True)
