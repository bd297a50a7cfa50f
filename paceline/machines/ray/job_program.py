"""Ray job: place one actor per node, start the nodes' agents, and print what they write.

    python job_program.py FOLDER

It is the entry point of a submitted job and so runs inside the cluster. FOLDER has request.json,
run.tar.gz with the run folder, driver_program.py, host_facts.py and temporary_locks.py. Standard
output consists of the events of driver_program.py, and of the records that pods of the other
workloads print as well:

    @file NODE PATH OFFSET DATA     zlib-compressed content, in base64
    @end NODE CODE                  the agent of a node has ended

A line that is longer than 20,000 characters is cut by `ray job logs`. Only the standard library and
Ray are used.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import Any

driver: Any = importlib.import_module("driver_program")

BLOCK_BYTES = 8 << 10
"""Maximum number of bytes of one record before compression."""
SILENT_CODE = 255
"""Exit code that is reported for a lost node."""


class JobNode(driver.Node):
    """Actor on one node."""

    def place(self, peer: str, program: str) -> dict[str, str]:
        """Return the node's name, and the interface that has its address `peer`.

        In a pod, the name is that of the Kubernetes node.
        """
        space: dict[str, Any] = {"__name__": "host_facts"}
        exec(program, space)
        names = {address: name for name, address in space["interface_addresses"]().items()}
        host = os.environ.get("NODE_NAME") or ""
        own_address = space["resolve"](socket.gethostname()) or "127."
        is_hidden = own_address.startswith("127.") and not peer.startswith("127.")
        return {"host": host, "interface": names.get(peer, "") if is_hidden else ""}


class JobDriver(driver.Driver):
    """The job, which nobody steers from outside."""

    def __init__(self, ray: Any, request: dict[str, Any], folder: Path) -> None:
        """Keep Ray, the request and the folder of the files."""
        super().__init__(ray, request)
        self.files = folder

    def run(self) -> None:
        """Place the actors, start the agents and follow them to their end."""
        driver.Node = JobNode
        driver.packed = lambda _: (self.files / "run.tar.gz").read_bytes()
        try:
            self.place()
            self.begin()
            self.follow()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            self.close()

    def begin(self) -> None:
        """Start the agents at an address and a free port of the first node."""
        program = (self.files / "host_facts.py").read_text("utf-8")
        asks = [
            actor.place.remote(node["address"], program)
            for actor, node in zip(self.actors, self.nodes, strict=True)
        ]
        places = self.ray.get(asks)
        for node, place in zip(self.nodes, places, strict=True):
            node["name"] = place["host"] or node["name"]
        driver.say(
            event="placed", nodes=[{k: n[k] for k in ("name", "address")} for n in self.nodes]
        )
        address, python = self.nodes[0]["address"], self.request["python"]
        ask = self.actors[0].ask.remote(
            python, program, "port", address, *map(str, self.request["ports"])
        )
        answer = json.loads(self.ray.get(ask))
        if not answer.get("port"):
            why = answer.get("why") or answer.get("failure")
            driver.fail("resources", f"{self.nodes[0]['name']} cannot listen at {address}: {why}")
        several = len(self.nodes) > 1 and not self.request["interface"]
        self.start(
            [
                {
                    "words": [str(node), address, str(answer["port"])],
                    "env": {
                        "PACELINE_HOST": self.nodes[node]["name"],
                        **(
                            {"GLOO_SOCKET_IFNAME": place["interface"]}
                            if several and place["interface"]
                            else {}
                        ),
                    },
                    "copy": True,
                }
                for node, place in enumerate(places)
            ]
        )

    def follow(self) -> None:
        """Report what the nodes write until all of them have ended, or one has failed."""
        while not self.is_over():
            polls = {
                actor.poll.remote(): node
                for node, actor in enumerate(self.actors)
                if node not in self.ended
            }
            deadline = time.monotonic() + driver.SILENT_S
            while polls and time.monotonic() < deadline:
                for reference in self.ray.wait(list(polls), timeout=0.2)[0]:
                    self.handle(polls.pop(reference), reference)
            time.sleep(driver.POLL_S)

    def write(self, name: str, offset: int, data: bytes, node: int = 0) -> None:
        """Print content of a node's copy of the run folder."""
        for begin in range(0, max(len(data), 1), BLOCK_BYTES):
            text = base64.b64encode(zlib.compress(data[begin : begin + BLOCK_BYTES])).decode()
            say("@file", str(node), name.replace(" ", "%20"), str(offset + begin), text)

    def end(self, node: int, code: int | None, **about: Any) -> None:
        """Report the end of a node's agent, or its loss if there is no code."""
        is_new = node not in self.ended
        super().end(node, code, **about)
        if is_new:
            say("@end", str(node), str(SILENT_CODE if code is None else code))


def say(*words: str) -> None:
    """Print a record."""
    driver.REPLIES.write(" ".join(words) + "\n")
    driver.REPLIES.flush()


def main(folder: Path) -> int:
    """Run the job and return its exit code."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    request["folder"] = str(folder)
    request["locks"] = (folder / "temporary_locks.py").read_text("utf-8")

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    ray = driver.connect(request)
    importlib.import_module("ray.cloudpickle").register_pickle_by_value(driver)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        job = JobDriver(ray, request, folder)
        job.run()
    finally:
        ray.shutdown()
    codes = [SILENT_CODE if code is None else code for code in job.ended.values()]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    driver.REPLIES = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(Path(sys.argv[1]).resolve()))
