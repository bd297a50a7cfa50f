"""One rank's part in the check of many nodes.

Run as python -m paceline.trainer.programs.node_check check.json, once per device.

Writes JSON lines to check/rank-NNNNN.jsonl: `facts`, `rate` (matrix products, memory), `collective`
(inside the node), `pair` (between two nodes), `fault` for a part that failed, and `end`. The exit
code is 0 whatever is found: a node's fault must not end the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from paceline.trainer.config import read_json
from paceline.trainer.measure.event_log import EventLog, redirect_output
from paceline.trainer.programs.host_program import HostProgram
from paceline.trainer.programs.node_facts import gpus, node_facts

SCHEMA = 1
LOOK_S = 0.05


def main(path: str) -> int:
    """Do every part; what fails is told, and the next part begins."""
    settings = read_json(path)
    rank = int(os.environ.get("RANK", "0"))
    redirect_output("logs", rank)
    events = EventLog("check", rank)
    NodeCheck(settings, rank, events).run()
    return 0


class NodeCheck(HostProgram):
    """One rank's measurements.

    Settings are {device, dtype, seconds, at_once, rounds, alone_s}. `rounds` are of pairs of nodes;
    with `alone_s` no rank meets another, and what a device has not done after so many seconds is
    killed.
    """

    def run(self) -> None:
        """Facts, join, rates, collectives, health, end."""
        if self.local == 0:
            self.part("facts", lambda: self.write("facts", schema=SCHEMA, **node_facts()))
        if alone_s := self.settings.get("alone_s"):
            self.part("rates", lambda: self.guarded(alone_s))
        else:
            self.part("join", self.join)
            self.part("rates", self.rates)
        if self.joined:
            self.part("collective", self.inside)
            self.part("pairs", lambda: self.pairs(self.settings.get("rounds", []), self.pair))
        if self.local == 0:
            # After the load, because a throttled clock shows only then.
            self.part("health", lambda: self.write("health", gpus=gpus()))
        self.write("end")

    def guarded(self, limit_s: float) -> None:
        """The rates in a process of its own, so that a device that hangs it stops nobody.

        A fork, because nothing of torch is loaded yet; what it writes goes to the same file.
        """
        child = os.fork()
        if child == 0:
            try:
                self.open_device()
                self.part("gemm", self.gemm)
                self.part("memory", self.memory)
            except BaseException as error:  # nothing may leave a fork but by _exit
                self.write("fault", part="gemm", reason=" ".join(str(error).split())[:300])
            os._exit(0)
        deadline = time.monotonic() + limit_s
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)  # a driver may hold it even then: nobody waits
                raise TimeoutError(f"the device did not answer within {limit_s:.0f} s")
            time.sleep(LOOK_S)
        if code := os.waitstatus_to_exitcode(ended[1]):
            raise ChildProcessError(f"the process of the device was ended by signal {-code}")

    def rates(self) -> None:
        """Matrix products and memory, so many nodes at once as asked."""
        at_once = self.settings.get("at_once") or self.size
        num_nodes = self.size // self.ranks_per_node
        for first in range(0, num_nodes, at_once):
            if first <= self.node < first + at_once:
                self.part("gemm", self.gemm)
                self.part("memory", self.memory)
            if self.joined and num_nodes > at_once:
                self.barrier()

    def gemm(self) -> None:
        """The sustained rate of one square product."""
        from paceline.trainer.programs.bandwidth import clock_of, median, scatter, sustained
        from paceline.trainer.programs.gemm import flops, product

        shape = (8192,) * 3 if self.kind == "cuda" else (1024,) * 3
        work = product(self.settings["dtype"], shape, self.device)
        rates = sustained(work, flops(shape), clock_of(self.device), self.settings["seconds"])
        self.write("rate", what="gemm", value=median(rates), **scatter(rates))

    def memory(self) -> None:
        """The copy rate beyond the caches."""
        from paceline.trainer.programs.bandwidth import SIZES_BYTES, measure_copy

        short = self.kind == "cpu" and self.settings["seconds"] < 1
        size = SIZES_BYTES[self.kind][0 if short else -1]
        result = measure_copy(self.device, size, self.settings["seconds"] / 2)
        self.write("rate", what="memory", value=result.pop("bytes_per_s"), **result)

    def inside(self) -> None:
        """All-reduce among the ranks of this node."""
        if self.ranks_per_node > 1:
            first = self.node * self.ranks_per_node
            result = self.measure(list(range(first, first + self.ranks_per_node)))
            self.write("collective", **result)
        self.barrier()

    def pair(self, partner: int) -> None:
        """All-reduce with the same rank of another node."""
        ranks = sorted(node * self.ranks_per_node + self.local for node in (self.node, partner))
        self.write("pair", partner=partner, **self.measure(ranks))

    def measure(self, ranks: list[int]) -> dict[str, Any]:
        """All-reduce of the largest payload and of a small one, in a group of its own."""
        from paceline.trainer.programs.allreduce import PAYLOADS_BYTES, measure

        small, _, large = PAYLOADS_BYTES[self.kind]
        group = self.group(ranks)
        seconds = self.settings["seconds"] / 2
        result = measure(self.device, len(ranks), large, seconds, group)
        latency_s = measure(self.device, len(ranks), small, seconds / 10, group)["latency_s"]
        return {**result, "latency_s": latency_s}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: trainer check.json")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # a normal exit may wait for peers that never answer
