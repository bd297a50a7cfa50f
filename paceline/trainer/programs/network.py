"""Measure the network between many devices, as one rank of the measurement.

Run as python -m paceline.trainer.programs.network settings.json, once per device.

Writes JSON lines to network/rank-NNNNN.jsonl: `facts`, `collective` (operation, bytes, seconds of
one among all ranks, wrong elements), `pair` (this node with another: seconds of a small message one
way, bytes/s of large ones from this node to the other), `fault` for a part that failed, and `end`.
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
"""Number of blocks of consecutive calls; a time is the median of the blocks."""
MAX_CALLS_PER_BLOCK = 200
SMALL_BYTES = 8
PINGS = 50
"""Number of round trips, of which the median counts."""
MESSAGES = 8
"""Number of consecutive large messages, after one that is not timed."""


def main(path: str) -> int:
    """Run every part; a failed part is reported, and the next one starts."""
    rank = int(os.environ.get("RANK", "0"))
    settings = read_json(path)
    redirect_output("logs", rank)
    NetworkMeasurement(settings, rank, EventLog("network", rank)).run()
    return 0


class NetworkMeasurement(HostProgram):
    """Network measurements of one rank.

    Settings are {device, seconds, operations, sizes, rounds, message_bytes}. `sizes` are in bytes.
    `rounds` list pairs of nodes that measure at the same time.
    """

    def run(self) -> None:
        """Join, and measure collectives and pairs."""
        self.write("facts", schema=SCHEMA, host=os.environ.get("PACELINE_HOST") or platform.node())
        self.part("join", self.join)
        if self.joined:
            self.part("collectives", self.collectives)
            self.part("pairs", lambda: self.pairs(self.settings["rounds"], self.pair))
        self.write("end")

    def collectives(self) -> None:
        """Measure every operation with every size, in the same order on all ranks."""
        operations, sizes = self.settings["operations"], self.settings["sizes"]
        seconds = self.settings["seconds"] / max(1, len(operations) * len(sizes))
        for operation in operations:
            for size in sizes:
                payload = Payload(self, operation, size)
                times_s = self.time_calls(payload.run, seconds)
                wrong = payload.wrong()
                self.write(
                    "collective",
                    operation=operation,
                    bytes=payload.bytes,
                    ranks=self.size,
                    times_s=times_s,
                    wrong=wrong,
                )

    def time_calls(self, work: Callable[[], None], seconds: float) -> list[float]:
        """Return the seconds per call in each of BLOCKS blocks of consecutive calls."""
        import torch
        from torch import distributed as dist

        self.block(work, 1)  # the first connects the ranks, which may take seconds
        one_s = max(self.block(work, 1), 1e-6)
        count = torch.tensor([seconds / BLOCKS / one_s], device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)  # all ranks need the same number of calls
        times = min(MAX_CALLS_PER_BLOCK, max(1, int(count.item())))
        blocks: list[float] = []
        for _ in range(BLOCKS):
            self.barrier()
            blocks.append(self.block(work, times) / times)
        return blocks

    def block(self, work: Callable[[], None], times: int) -> float:
        """Return the seconds of `times` calls, until the result of the last is available."""
        self.settle()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.settle()
        return time.perf_counter() - start

    def settle(self) -> None:
        """Wait until the device has completed its work."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def pair(self, partner: int) -> None:
        """Send a small message and back, then large ones in both directions."""
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
        """Return the seconds of a round trip; the other rank returns the message."""
        from torch import distributed as dist

        steps = (dist.send, dist.recv) if first else (dist.recv, dist.send)
        start = time.perf_counter()
        for step in steps:
            step(small, other, group=group)
        self.settle()
        return time.perf_counter() - start

    def stream(self, large: Tensor, small: Tensor, other: int, group: Any, sends: bool) -> float:
        """Return the bytes/s sent until the last message was confirmed, 0 for the receiver."""
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
    """Data of one operation; `bytes` is the larger of both sides, as in nccl-tests."""

    def __init__(self, rank: HostProgram, operation: str, size_bytes: int) -> None:
        """Allocate the data, rounded up to equal parts for all ranks; every rank sends ones."""
        import torch

        self.rank, self.operation = rank, operation
        part = max(1, -(-size_bytes // (4 * rank.size)))
        whole = part * rank.size
        self.bytes = 4 * whole
        self.send_buffer = torch.ones(
            part if operation == "all_gather" else whole, device=rank.device
        )
        self.recv_buffer = torch.zeros(
            part if operation == "reduce_scatter" else whole, device=rank.device
        )

    def run(self) -> None:
        """Run the operation once; sums grow without bound, which `wrong` resets."""
        from torch import distributed as dist

        from paceline.trainer.parallel import collectives

        size, rank = self.rank.size, self.rank.rank
        match self.operation:
            case "all_reduce":
                dist.all_reduce(self.send_buffer)
            case "all_gather":
                collectives.all_gather_into(self.recv_buffer, self.send_buffer, None)
            case "reduce_scatter":
                collectives.reduce_scatter_into(self.recv_buffer, self.send_buffer, None)
            case "all_to_all":
                collectives.all_to_all_into(self.recv_buffer, self.send_buffer, None)
            case "broadcast":
                dist.broadcast(self.send_buffer, 0)
            case "reduce":
                dist.reduce(self.send_buffer, 0)
            case "send_recv":
                ring = tuple(range(size))
                for work in collectives.send_recv_ring(
                    self.recv_buffer, self.send_buffer, ring, rank, None
                ):
                    work.wait()
            case _:
                raise ValueError(f"unknown operation {self.operation}")

    def wrong(self) -> int:
        """Return the number of wrong elements after one more call; every rank sends ones."""
        self.send_buffer.fill_(1.0)
        self.recv_buffer.zero_()
        self.run()
        sums = self.operation in ("all_reduce", "reduce_scatter", "reduce")
        if self.operation == "reduce" and self.rank.rank != 0:
            return 0
        result = (
            self.send_buffer
            if self.operation in ("all_reduce", "broadcast", "reduce")
            else self.recv_buffer
        )
        return int((result != (float(self.rank.size) if sums else 1.0)).sum().item())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: network settings.json")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # a normal exit may wait for peers that never answer
