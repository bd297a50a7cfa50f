"""One rank's part in the measurement of what joins many devices.

Run as python -m paceline.trainer.programs.network question.json, once per device.

Writes JSON lines to network/rank-NNNNN.jsonl: `facts`, `collective` (operation, bytes, seconds of
one among all ranks, wrong elements), `pair` (this node with another: seconds of a small message one
way, bytes/s of large ones from here to there), `fault` for a part that failed, and `end`.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.trainer.config import read_json
from paceline.trainer.measure.event_log import EventLog, redirect_output
from paceline.trainer.programs.host_program import HostProgram

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
BLOCKS = 7
"""A time is the median of so many blocks of calls in a row."""
MOST_IN_A_ROW = 200
SMALL_BYTES = 8
PINGS = 50
"""Messages there and back, of which the median counts."""
MESSAGES = 8
"""Large messages in a row, after one that is not timed."""


def main(path: str) -> int:
    """Do every part; what fails is told, and the next part begins."""
    rank = int(os.environ.get("RANK", "0"))
    settings = read_json(path)
    redirect_output("logs", rank)
    NetworkMeasurement(settings, rank, EventLog("network", rank)).run()
    return 0


class NetworkMeasurement(HostProgram):
    """One rank's measurements.

    Settings are {device, seconds, operations, sizes, rounds, message_bytes}: `sizes` in bytes,
    `rounds` of pairs of nodes that measure at the same time.
    """

    def run(self) -> None:
        """Join, collectives, pairs, end."""
        self.write("facts", schema=SCHEMA, host=platform.node())
        self.part("join", self.join)
        if self.joined:
            self.part("collectives", self.collectives)
            self.part("pairs", lambda: self.pairs(self.settings["rounds"], self.pair))
        self.write("end")

    def collectives(self) -> None:
        """Every operation with every size; all ranks do the same in the same order."""
        operations, sizes = self.settings["operations"], self.settings["sizes"]
        seconds = self.settings["seconds"] / max(1, len(operations) * len(sizes))
        for operation in operations:
            for size in sizes:
                payload = Payload(self, operation, size)
                times_s = self.timed(payload.run, seconds)
                wrong = payload.wrong()
                self.write(
                    "collective",
                    operation=operation,
                    bytes=payload.bytes,
                    ranks=self.size,
                    times_s=times_s,
                    wrong=wrong,
                )

    def timed(self, work: Callable[[], None], seconds: float) -> list[float]:
        """Seconds of one call in each of BLOCKS blocks of calls in a row."""
        import torch
        from torch import distributed as dist

        self.block(work, 1)  # the first connects the ranks, which may take seconds
        one_s = max(self.block(work, 1), 1e-6)
        count = torch.tensor([seconds / BLOCKS / one_s], device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)  # all must agree on how often
        times = min(MOST_IN_A_ROW, max(1, int(count.item())))
        blocks: list[float] = []
        for _ in range(BLOCKS):
            self.barrier()
            blocks.append(self.block(work, times) / times)
        return blocks

    def block(self, work: Callable[[], None], times: int) -> float:
        """Seconds of `times` calls, to the moment at which the last one's result is there."""
        self.settle()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.settle()
        return time.perf_counter() - start

    def settle(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def pair(self, partner: int) -> None:
        """A small message there and back, then large ones from the lower node and to it."""
        import torch

        other = partner * self.ranks_per_node + self.local
        group = self.group(sorted((self.rank, other)))
        small = torch.zeros(SMALL_BYTES // 4, device=self.device)
        first = self.rank < other
        pings_s = sorted(self.ping(small, other, group, first) for _ in range(PINGS + 1))
        large = torch.zeros(self.settings["message_bytes"] // 4, device=self.device)
        rates = [self.stream(large, small, other, group, first == turn) for turn in (True, False)]
        self.write(
            "pair",
            partner=partner,
            latency_s=pings_s[PINGS // 2] / 2,
            bytes_per_s=max(rates),
            message_bytes=large.numel() * 4,
            n=MESSAGES,
        )

    def ping(self, small: Tensor, other: int, group: Any, first: bool) -> float:
        """Seconds until a message has come back; the other rank sends what it has received."""
        from torch import distributed as dist

        steps = (dist.send, dist.recv) if first else (dist.recv, dist.send)
        start = time.perf_counter()
        for step in steps:
            step(small, other, group=group)
        self.settle()
        return time.perf_counter() - start

    def stream(self, large: Tensor, small: Tensor, other: int, group: Any, sends: bool) -> float:
        """Bytes/s that were sent from here until the last was confirmed, 0 for the receiver."""
        from torch import distributed as dist

        start = 0.0
        for number in range(MESSAGES + 1):
            if number == 1:
                self.settle()
                start = time.perf_counter()
            (dist.send if sends else dist.recv)(large, other, group=group)
        (dist.recv if sends else dist.send)(small, other, group=group)
        self.settle()
        taken_s = time.perf_counter() - start
        return MESSAGES * large.numel() * 4 / taken_s if sends else 0.0


class Payload:
    """What one operation works on: `bytes` as nccl-tests counts them, the larger of both sides."""

    def __init__(self, rank: HostProgram, operation: str, size_bytes: int) -> None:
        """Rounded up to an equal part for each rank; every rank gives ones."""
        import torch

        self.rank, self.operation = rank, operation
        part = max(1, -(-size_bytes // (4 * rank.size)))
        whole = part * rank.size
        self.bytes = 4 * whole
        self.given = torch.ones(part if operation == "all_gather" else whole, device=rank.device)
        self.taken = torch.zeros(
            part if operation == "reduce_scatter" else whole, device=rank.device
        )

    def run(self) -> None:
        """Do it once; sums grow without end, which costs no time and is put right for `wrong`."""
        from torch import distributed as dist

        from paceline.trainer.parallel import collectives

        size, rank = self.rank.size, self.rank.rank
        match self.operation:
            case "all_reduce":
                dist.all_reduce(self.given)
            case "all_gather":
                collectives.all_gather_into(self.taken, self.given, None)
            case "reduce_scatter":
                collectives.reduce_scatter_into(self.taken, self.given, None)
            case "all_to_all":
                collectives.all_to_all_into(self.taken, self.given, None)
            case "broadcast":
                dist.broadcast(self.given, 0)
            case "reduce":
                dist.reduce(self.given, 0)
            case "send_recv":
                ring = tuple(range(size))
                for work in collectives.send_recv_ring(self.taken, self.given, ring, rank, None):
                    work.wait()
            case _:
                raise ValueError(f"unknown operation {self.operation}")

    def wrong(self) -> int:
        """Elements that are not what they should be after one more call; every rank gives ones."""
        self.given.fill_(1.0)
        self.taken.zero_()
        self.run()
        sums = self.operation in ("all_reduce", "reduce_scatter", "reduce")
        if self.operation == "reduce" and self.rank.rank != 0:
            return 0
        there = (
            self.given if self.operation in ("all_reduce", "broadcast", "reduce") else self.taken
        )
        return int((there != (float(self.rank.size) if sums else 1.0)).sum().item())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: trainer question.json")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # a normal exit may wait for peers that never answer
