"""Job on a Ray cluster: the driver's messages, and the rules for starting and ending the job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from signal import SIGTERM
from typing import Any, Protocol

from paceline.core.errors import PacelineError, SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.interrupts import deferred_interrupts
from paceline.core.job import Job
from paceline.files.documents import parse_json, write_text
from paceline.files.programs import die_with_parent
from paceline.files.run_folder import LOGS_FOLDER
from paceline.machines import Handle, JobEnd
from paceline.machines.node.script import random_ports
from paceline.machines.ssh import gloo_interface, rendezvous_address
from paceline.machines.ssh.checks import (
    HostCheck,
    HostRequirements,
    apply_rules,
    raise_for_faults,
)

DRIVER_LOG = "ray-driver.log"
"""Messages of Ray itself; the output of node.sh is in host-*.log."""
END_S = 20.0
"""Time in seconds that the driver has to end the job on all nodes."""
LIST_S = 120.0
LOST_CODE = 255
REMEDIES = {
    "missing": "install it in this environment: pip install 'paceline[ray]', or set ray.python",
    "version": "set ray.python to an interpreter with the cluster's versions of Ray and Python",
    "connection": "check --ray-address; run Paceline on a node of the cluster, or use ray://HOST",
    "resources": "change the number of nodes or devices, or ray.resources in a cluster file",
    "host": "list the nodes with `ray list nodes`",
}


@dataclass
class NodeState:
    """State of the job on one node."""

    name: str
    address: str
    check: HostCheck | None = None
    code: int | None = None
    lost_reason: str | None = None
    """Reason why the node or its Ray worker was lost."""
    is_oom: bool = False
    output: str = ""
    """End of the agent's output, if it failed."""
    failed_s: float = math.inf


class DriverConnection(Protocol):
    """Program that has the connection to Ray."""

    @property
    def ended(self) -> bool:
        """True if it has ended; its last messages may not have been read."""
        ...

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        ...

    def messages(self) -> Iterable[dict[str, Any]]:
        """Yield the messages that have arrived; raises SystemFaultError for an error of Ray."""
        ...

    def close(self) -> None:
        """End the job on all nodes."""
        ...


def checked_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message; raises SystemFaultError if it is an error of Ray."""
    if message.get("event") == "error":
        remedy = REMEDIES.get(str(message.get("kind")))
        raise SystemFaultError("Ray", str(message.get("text")), remedy=remedy)
    return message


@dataclass
class DriverProcess:
    """The process of driver_program.py and its messages."""

    process: subprocess.Popen[bytes]
    _text: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a driver that has ended has said why."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def messages(self) -> Iterable[dict[str, Any]]:
        """Yield the messages that have arrived; raises SystemFaultError for an error of Ray."""
        self._read()
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            try:
                message = parse_json(line.decode())
            except ValueError:  # text of a library
                continue
            yield checked_message(message)

    @property
    def ended(self) -> bool:
        """True if the driver has ended; its last messages may not have been read."""
        return self.process.poll() is not None

    def close(self) -> None:
        """Have the driver end the job; kill it if it does not, and Ray ends its actors."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._read()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self.process.stdout.fileno(), 1 << 16):
                    self._text += data


def start_driver(request: Mapping[str, Any], log: Path | None) -> DriverProcess:
    """Start the driver with its request, in an interpreter that has Ray.

    Raises SystemFaultError if the interpreter cannot be started.
    """
    program = str(resources.files("paceline.machines.ray") / "driver_program.py")
    python = request["driver_python"] or sys.executable
    drivers: list[DriverProcess] = []
    try:
        # An interrupt inside Popen would leave a process that nobody knows and nobody stops.
        with Path(log or os.devnull).open("ab") as errors, deferred_interrupts():
            process = subprocess.Popen(
                [python, "-u", program],
                # Ray may be in PYTHONPATH or the user's site. Python before 3.11 has no -P.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), SIGTERM)
                if sys.platform == "linux"
                else None,
            )
            drivers.append(DriverProcess(process))
    except OSError as error:
        raise SystemFaultError(python, f"cannot be started: {error.strerror}") from error
    except KeyboardInterrupt:
        for driver in drivers:
            driver.close()
        raise
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    drivers[0].send(request)
    return drivers[0]


def request_for(cluster: Cluster) -> dict[str, Any]:
    """Return the part of the driver's request that describes the cluster."""
    settings, count = cluster.ray, cluster.devices_per_node
    devices = {} if cluster.device == "cpu" else {"GPU": count}
    return {
        "list": False,
        "address": settings.address or os.environ.get("RAY_ADDRESS") or "auto",
        "driver_python": settings.python,
        "device": cluster.device,
        "hosts": cluster.hosts,
        "nodes": cluster.nodes,
        "resources": {"CPU": count, **devices, **settings.resources},
        "runtime_env": settings.runtime_env,
    }


def list_nodes(cluster: Cluster) -> list[dict[str, str]]:
    """Return name and address of each node that has the resources of one node of the job.

    Raises SystemFaultError if the cluster does not answer.
    """
    driver = start_driver({**request_for(cluster), "list": True}, None)
    try:
        deadline = time.monotonic() + LIST_S
        while time.monotonic() < deadline:
            has_ended = driver.ended
            for message in driver.messages():
                return message["hosts"]
            if has_ended:
                break
            time.sleep(0.05)
        raise SystemFaultError("Ray", "did not list its nodes")
    finally:
        driver.close()


@dataclass
class RayRun(Handle):
    """A started job on nodes of a Ray cluster."""

    driver: DriverConnection
    job: Job
    folder: Path
    nonce: str
    nodes: list[NodeState] = field(default_factory=list[NodeState])
    _phase: str = "connecting to Ray"
    _warnings: tuple[str, ...] = ()
    _deadline: float | None = None
    _stopped_s: float = math.inf

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def waiting(self) -> bool:
        """True until Ray has placed the job."""
        return not self.nodes

    @property
    def phase(self) -> str:
        """Reason why the job waits, or where it runs."""
        return self._phase

    @property
    def warnings(self) -> tuple[str, ...]:
        """Nodes that do not share the run folder."""
        return self._warnings

    def poll(self) -> int | None:
        """Return the exit code if the job has ended on all nodes, else None.

        Raises SystemFaultError if Ray refuses the job or a node is unfit, before any rank starts.
        """
        has_ended = self.driver.ended
        try:
            for message in self.driver.messages():
                self._handle(message)
        except PacelineError:
            self.stop()
            raise
        if has_ended and not self.nodes:
            raise SystemFaultError("Ray", f"the driver ended; see {LOGS_FOLDER}/{DRIVER_LOG}")
        if has_ended and not any(node.code or node.lost_reason for node in self.nodes):
            for node in self.nodes:  # their ends would have been reported
                node.lost_reason = None if node.code == 0 else "the connection to Ray ended"
        return self._code() if has_ended else None

    def stop(self) -> int:
        """End every process of the job on every node and return the exit code."""
        self._stopped_s = min(self._stopped_s, time.monotonic())
        (self.folder / self.nonce.partition("=")[0]).unlink(missing_ok=True)
        self.driver.close()
        with contextlib.suppress(PacelineError):  # the job is over
            for message in self.driver.messages():
                if message["event"] == "end":
                    self._handle(message)
        return self._code()

    def sweep(self) -> None:
        """End the driver; each node has itself ended what the job left behind."""
        self.driver.close()

    def verdict(self) -> JobEnd | None:
        """Return the nodes that were lost, or the one whose ranks could not be started."""
        lost_nodes = [node for node in self.nodes if node.lost_reason]
        if lost_nodes:
            names = tuple(node.name for node in lost_nodes)
            reasons = "; ".join(dict.fromkeys(node.lost_reason or "" for node in lost_nodes))
            status = "oom" if any(node.is_oom for node in lost_nodes) else "failed"
            return JobEnd(status, f"{compress(names)}: {reasons}", names)
        first = self._first_failure()
        if first is None or "@exit rank=" in first.output:
            return None
        lines = first.output.strip().splitlines()
        last_words = f": {lines[-1][:200]}" if lines else ""
        return JobEnd(
            "failed", f"{first.name}: ended with code {first.code}{last_words}", (first.name,)
        )

    def _handle(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "waiting":
                self._phase = f"waiting: {message['why']}"
            case "placed":
                self.nodes = [NodeState(**node) for node in message["nodes"]]
                self._phase = f"running on {self._names()}"
                if self.job.timeout_s is not None:
                    self._deadline = time.monotonic() + self.job.timeout_s
            case "facts":
                node = self.nodes[message["node"]]
                node.check = _check(node, message, self.job.python)
                if message["node"] == len(self.nodes) - 1:
                    self._check_nodes()
            case "port":
                self._start(message)
            case "end":
                node = self.nodes[message["node"]]
                node.code, node.lost_reason = message.get("code"), message.get("lost")
                node.is_oom, node.output = message.get("oom", False), message.get("output", "")
                if (node.code or node.lost_reason) and not message.get("stopped"):
                    node.failed_s = time.monotonic()

    def _names(self) -> str:
        return compress([node.name for node in self.nodes])

    def _checks(self) -> list[HostCheck]:
        return [node.check for node in self.nodes if node.check]

    def _check_nodes(self) -> None:
        """Refuse unfit nodes, then ask the first node for a free port."""
        file = self.nonce.partition("=")[0]
        (self.folder / file).unlink(missing_ok=True)
        cluster = self.job.cluster
        world_size = self.job.nodes * self.job.ranks_per_node
        interface = cluster.interface if cluster else None
        requirements = HostRequirements(self.job.python, None, interface, world_size)
        raise_for_faults(apply_rules(self._checks(), requirements))
        ports = map(str, random_ports())
        self.driver.send({"port": [rendezvous_address(self._checks()), *ports]})

    def _start(self, answer: Mapping[str, Any]) -> None:
        checks = self._checks()
        address = rendezvous_address(checks)
        if not answer.get("port"):
            why = answer.get("why") or answer.get("failure") or "no answer"
            raise SystemFaultError(self.nodes[0].name, f"cannot listen at {address}: {why}")
        starts = [
            {
                "words": [str(number), address, str(answer["port"])],
                "env": gloo_interface(check, self.job),
                "copy": check.folder != "shared",
            }
            for number, check in enumerate(checks)
        ]
        if separate := [c.host for c in checks if c.folder != "shared"]:
            self._warnings = (
                f"{compress(separate)} {'do' if len(separate) > 1 else 'does'} not see "
                f"{self.folder}: logs and steps were copied through Ray, checkpoints were not",
            )
        self.driver.send({"start": starts})

    def _code(self) -> int:
        first = self._first_failure()
        if first is not None:
            return first.code or LOST_CODE
        code = next((node.code for node in self.nodes if node.code), None)
        is_ok = bool(self.nodes) and all(node.code == 0 for node in self.nodes)
        return code or (0 if is_ok else LOST_CODE)

    def _first_failure(self) -> NodeState | None:
        """Return the node that failed first without being asked to end, or None."""
        failed = [node for node in self.nodes if node.failed_s < self._stopped_s]
        return min(failed, key=lambda node: node.failed_s, default=None)


def start_run(job: Job, folder: Path) -> RayRun:
    """Start the driver, which places the job; `RayRun.poll` starts the ranks."""
    assert job.cluster is not None
    nonce = f".paceline-{secrets.token_hex(8)}={secrets.token_hex(16)}"
    file, _, content = nonce.partition("=")
    write_text(folder / file, content)
    facts = (resources.files("paceline.machines.node") / "host_facts.py").read_text("utf-8")
    request = {
        **request_for(job.cluster),
        "nodes": job.nodes,
        "env": job.env,
        "folder": str(folder),
        "python": job.python,
        "mark": secrets.token_hex(16),
        "facts": [facts, "facts", str(folder), nonce, job.cluster.interface or ""],
        "locks": (resources.files("paceline.files") / "temporary_locks.py").read_text("utf-8"),
    }
    driver = start_driver(request, folder / LOGS_FOLDER / DRIVER_LOG)
    return RayRun(driver, job, folder, nonce)


def _check(node: NodeState, message: Mapping[str, Any], python: str) -> HostCheck:
    facts = message["facts"]
    if failure := facts.get("failure"):
        return HostCheck(
            host=node.name,
            fault=f"cannot run {python}: {failure[:200]}",
            remedy="set `python` in a cluster file; python3 is the interpreter of Ray's workers",
        )
    clock = {name: message[name] for name in ("round_trip_s", "clock_skew_s")}
    return HostCheck(host=node.name, server_address=node.address, **clock, **facts)
