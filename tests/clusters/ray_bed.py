"""Ray clusters of this machine for tests: every node has an address of its own on loopback."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.clusters.bed.needs import skip_or_fail
from tests.ports import free_port
from tests.waiting import wait_until

FIRST_ADDRESS = 2
START_S = 120
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
SIZES = ["--num-cpus=2", "--object-store-memory=100000000", "--memory=2000000000"]


@dataclass
class RayBed:
    """A head and further raylets, each the family of one `ray start --block`."""

    folder: Path
    address: str = ""
    has_dashboard: bool = False
    dashboard: str = ""
    """Address of the dashboard, to which jobs are submitted."""
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, number: int, hidden: Path | None = None) -> None:
        """Start node `number`, where an empty disk hides the folder `hidden`; wait for it."""
        name = f"127.0.0.{FIRST_ADDRESS + number}"
        if number == 0:
            self.address = f"{name}:{free_port()}"
            port = self.address.rpartition(":")[2]
            place = ["--head", f"--port={port}", f"--temp-dir={self.folder}"]
            place += [f"--include-dashboard={str(self.has_dashboard).lower()}"]
            if self.has_dashboard:
                self.dashboard = f"http://{name}:{free_port()}"
                port = self.dashboard.rpartition(":")[2]
                place += [f"--dashboard-host={name}", f"--dashboard-port={port}"]
        else:
            place = [f"--address={self.address}"]
        # Without an agent of its own, one of two clusters on this machine would accept no jobs.
        place.append(f"--dashboard-agent-listen-port={free_port()}")
        words = [*RAY, f"--node-ip-address={name}", *SIZES, *place]
        if hidden is not None:
            mount = f"mount -t tmpfs tmpfs {shlex.quote(str(hidden))}"
            words = ["unshare", "--mount", "sh", "-c", f"{mount} && exec {shlex.join(words)}"]
        file = self.folder / f"{name}.log"
        with file.open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env=with_python(), start_new_session=True
            )
        wait_until(
            lambda: b"Ray runtime started" in file.read_bytes() or self.nodes[name].poll(),
            f"node {name}",
            START_S,
        )
        assert self.nodes[name].poll() is None, file.read_text()

    def raylet(self, name: str) -> psutil.Process:
        """The raylet of a node."""
        family = psutil.Process(self.nodes[name].pid).children(recursive=True)
        (process,) = [p for p in family if p.name() == "raylet"]
        return process

    def down(self) -> None:
        """End every process of every node."""
        family = {
            child
            for process in self.nodes.values()
            if process.poll() is None
            for child in psutil.Process(process.pid).children(recursive=True)
        }
        for process in self.nodes.values():
            process.terminate()
        for process in self.nodes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ray_bed(count: int, hidden: Mapping[int, Path], *, dashboard: bool = False) -> Iterator[RayBed]:
    """A cluster of `count` nodes; `hidden` gives the folder that a node does not share."""
    missing = None if find_spec("ray") else "not installed: ray; `make test-clusters` installs it"
    skip_or_fail(missing)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need short paths
    bed = RayBed(folder, has_dashboard=dashboard)
    try:
        for number in range(count):  # nodes that start at once would take each other's sockets
            bed.start(number, hidden.get(number))
        yield bed
    finally:
        bed.down()


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "token-of-a-bed-0123456789abcdef0123456789"}
"""Variables of a cluster, and of a user, whose dashboard has token authentication."""


def with_python() -> dict[str, str]:
    """Variables with which `python3` is the interpreter that has Ray, as in Ray's images."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"}
