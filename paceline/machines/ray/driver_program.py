"""Ray driver: places one actor per node, which starts the node's agent, and relays between both.

The controller starts it in an interpreter that has Ray and sends JSON lines; the first one is the
request. It answers with JSON lines:

    {"event": "error", "kind": ..., "text": ...}     Ray refused; the program ends
    {"event": "hosts", "hosts": [...]}               nodes of the cluster, if the request is `list`
    {"event": "waiting", "why": ...}                 the nodes are busy
    {"event": "placed", "nodes": [...]}              name and address of each node of the job
    {"event": "facts", "node": N, ...}               answer of host_facts.py on a node
    {"event": "port", ...}                           free port on the first node
    {"event": "end", "node": N, "code": ..., ...}    end of a node's agent, or the loss of the node

The job ends on all nodes when its standard input ends, on SIGTERM, or when this program dies,
because Ray then ends the actors and the kernel ends the agents with them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import platform
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

POLL_S = 0.3
CONNECT_S = 10.0
FOLLOW_S = 5.0
"""Time in seconds that the other nodes have to report their own failures after the first one."""
SILENT_S = 60.0
"""Time in seconds without an answer after which a node is lost, if Ray itself has not noticed."""
GRACE_S = 8.0
"""Time in seconds that ranks have to write their stacks after SIGTERM. It exceeds the grace period
of the node's agent."""
MAX_CHUNK_BYTES = 4 << 20
"""Maximum number of bytes of one file that one message copies back."""
NOT_COPIED = ("checkpoints", "profiles")
"""Folders that stay on a node without the shared run folder, because they are large."""
UNAVAILABLE = "ActorUnavailableError"
"""Error of Ray for a worker that does not answer and may answer later."""
MARK = "PACELINE_MARK"
OMP = "OMP_NUM_THREADS"
"""Variable that Ray sets in its workers; a rank chooses its threads itself."""


class Node:
    """Actor on one node: starts node.sh in the run folder, or in a copy of it."""

    def __init__(self) -> None:
        """Start without a job."""
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = self.log = ""
        self.copy = False
        self.mark = ""
        self.lock = -1
        """Open handle of the copied folder, which is locked until this process ends."""
        self.read: dict[str, tuple[int, int]] = {}

    def clock(self) -> float:
        """Return the node's wall clock in seconds."""
        return time.time()

    def ask(self, python: str, program: str, *arguments: str) -> str:
        """Return the JSON that host_facts.py prints, or `{"failure": ...}`."""
        try:
            result = subprocess.run(
                [python, "-c", program, *arguments],
                capture_output=True,
                text=True,
                timeout=60,
                env=environment({}),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return json.dumps({"failure": str(error)})
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        if result.returncode or not lines:
            words = result.stderr.strip().splitlines() or ["no output"]
            return json.dumps({"failure": words[-1]})
        return lines[-1]

    def start(
        self,
        folder: str,
        files: bytes | None,
        words: list[str],
        env: dict[str, str],
        log: str,
        mark: str,
        locks: str,
    ) -> None:
        """Start node.sh in `folder`, or in a temporary folder with `files` unpacked.

        `locks` is the text of temporary_locks.py, which removes the folders of killed workers.
        """
        self.folder, self.log, self.mark = folder, log, mark
        if files is not None:
            space: dict[str, Any] = {"__name__": "temporary_locks"}
            exec(locks, space)
            place = tempfile.gettempdir()
            space["remove_abandoned"](Path(place))
            self.folder, self.lock = space["locked_folder"](place)
            self.copy = True
            with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                archive.extractall(self.folder, filter="data")
            self.read = {name: (size, inode) for name, size, inode in self.listing()}
        with Path(self.folder, log).open("ab") as output:
            self.process = subprocess.Popen(
                ["bash", "node.sh", *words],
                cwd=self.folder,
                env={**environment(env), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> tuple[int | None, list[tuple[str, int, bytes]]]:
        """Return the agent's exit code, if it has ended, and new content of a copied folder."""
        code = self.process.poll() if self.process else None
        changes = self.changes() if self.copy else []
        return (None if changes else code), changes

    def output(self) -> str:
        """Return the end of the agent's output."""
        try:
            return Path(self.folder, self.log).read_text(errors="replace")[-4096:]
        except OSError:
            return ""

    def stop(self) -> int:
        """End all processes of the job on this node and return the agent's exit code."""
        if self.process is None:
            return 0
        deadline = time.monotonic() + GRACE_S
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.signal(number)
        while self.signal(0) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        self.signal(signal.SIGKILL)
        return self.process.wait()

    def remove(self) -> None:
        """Remove the copy of the run folder."""
        if self.copy:
            shutil.rmtree(self.folder, ignore_errors=True)

    def signal(self, number: int) -> bool:
        """Send a signal to all processes of the job; return False if there are none."""
        entry, is_any = f"{MARK}={self.mark}".encode(), False
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            with contextlib.suppress(OSError):
                if pid != os.getpid() and entry in path.read_bytes().split(b"\0"):
                    os.kill(pid, number)
                    is_any = True
        return is_any

    def listing(self) -> list[tuple[str, int, int]]:
        """Return path, size and inode of each file of the copied folder."""
        files: list[tuple[str, int, int]] = []
        for path in Path(self.folder).rglob("*"):
            name = path.relative_to(self.folder)
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and name.parts[0] not in NOT_COPIED:
                    about = path.stat()
                    files.append((str(name), about.st_size, about.st_ino))
        return files

    def changes(self) -> list[tuple[str, int, bytes]]:
        """Return path, offset and bytes of what was appended or replaced since the last call."""
        changes: list[tuple[str, int, bytes]] = []
        for name, size, inode in self.listing():
            offset, old_inode = self.read.get(name, (0, inode))
            if inode != old_inode or size < offset:
                offset = 0
            if size > offset or inode != old_inode or name not in self.read:
                with contextlib.suppress(OSError), Path(self.folder, name).open("rb") as file:
                    file.seek(offset)
                    data = file.read(MAX_CHUNK_BYTES)
                    self.read[name] = offset + len(data), inode
                    changes.append((name, offset, data))
        return changes


def environment(env: dict[str, str]) -> dict[str, str]:
    """Return the variables of a program on a node; `python3` is the interpreter of Ray's worker."""
    variables = {name: value for name, value in os.environ.items() if name != OMP}
    path = f"{os.path.dirname(sys.executable)}:{variables.get('PATH', os.defpath)}"  # noqa: PTH120
    return {**variables, "PATH": path, **env}


class Driver:
    """One job on a Ray cluster."""

    def __init__(self, ray: Any, request: dict[str, Any]) -> None:
        """Keep Ray and the controller's request."""
        self.ray, self.request = ray, request
        self.orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.nodes: list[dict[str, str]] = []
        self.actors: list[Any] = []
        self.group: Any = None
        self.ended: dict[int, int | None] = {}
        self.failed_s: float | None = None
        self.answered_s: dict[int, float] = {}
        """Time of the last answer of each node."""

    def run(self) -> None:
        """Place the actors, start the job when the controller agrees, and follow it."""
        threading.Thread(target=self.read_orders, daemon=True).start()
        try:
            if self.place():
                self.report_facts()
                self.serve()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            self.close()

    def read_orders(self) -> None:
        """Queue the controller's lines; None stands for their end."""
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put(None)

    def place(self) -> bool:
        """Reserve the nodes and start an actor on each; False if the controller has gone."""
        alive = alive_nodes(self.ray)
        bundles = self.bundles(alive)
        util = importlib.import_module("ray.util")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        self.group = util.placement_group(bundles, strategy="STRICT_SPREAD")
        ready, is_reported = self.group.ready(), False
        while not self.ray.wait([ready], timeout=1.0)[0]:
            if not self.orders.empty():
                return False
            if not is_reported:
                say(event="waiting", why=f"Ray has no {describe(bundles)} free")
                is_reported = True
        self.ray.get(ready)
        actor = self.ray.remote(Node)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if self.request["runtime_env"]:
            options["runtime_env"] = self.request["runtime_env"]
        for index, bundle in enumerate(bundles):
            strategy = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=index
            )
            needs = {k: v for k, v in bundle.items() if k not in ("CPU", "GPU", "memory")}
            self.actors.append(
                actor.options(
                    **{**options, "num_cpus": bundle.get("CPU", 0)},
                    num_gpus=bundle.get("GPU", 0),
                    resources=needs,
                    scheduling_strategy=strategy,
                ).remote()
            )
        table = util.placement_group_table(self.group)["bundles_to_node_id"]
        by_id = {node["id"]: node for node in alive_nodes(self.ray)}
        self.nodes = [by_id[table[index]] for index in range(len(bundles))]
        say(event="placed", nodes=[{k: n[k] for k in ("name", "address")} for n in self.nodes])
        return True

    def bundles(self, alive: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the resources of each node; ends this program if the cluster lacks them."""
        resources: dict[str, float] = dict(self.request["resources"])
        if "GPU" in resources:
            resources |= accelerator(self.request["device"], alive)
        resources = {name: number for name, number in resources.items() if number}
        hosts = [find(host, alive) for host in self.request["hosts"]]
        able = [node for node in alive if fits(resources, node["resources"])]
        unable = [n["name"] for n in hosts if n not in able]
        if unable:
            fail("resources", f"{', '.join(unable)} lacks {describe([resources])}")
        if len(able) < self.request["nodes"]:
            fail(
                "resources",
                f"{self.request['nodes']} nodes with {describe([resources])} each are requested, "
                f"{len(able)} of its {len(alive)} nodes have them",
            )
        if hosts:
            return [{**resources, f"node:{node['address']}": 0.001} for node in hosts]
        return [resources] * self.request["nodes"]

    def report_facts(self) -> None:
        """Report what host_facts.py says on each node, and the skew of its clock."""
        asks: list[Any] = []
        first = self.nodes[0]["name"]
        for node, (actor, about) in enumerate(zip(self.actors, self.nodes, strict=True)):
            skew = self.clock(node, actor)
            words = [*self.request["facts"], first, about["address"]]
            asks.append((skew, actor.ask.remote(self.request["python"], *words)))
        for node, (skew, answer) in enumerate(asks):
            try:
                facts = json.loads(self.ray.get(answer, timeout=90))
            except Exception as error:
                facts = {"failure": self.reason(error)}
            say(event="facts", node=node, **skew, facts=facts)

    def clock(self, node: int, actor: Any) -> dict[str, float]:
        """Return the node's clock minus this one's at the middle of the round trip."""
        try:
            self.ray.get(actor.clock.remote())  # waits for the actor's process
            start, asked_unix = time.monotonic(), time.time()
            theirs = self.ray.get(actor.clock.remote(), timeout=60)
        except Exception as error:
            say(event="end", node=node, **self.loss(node, error))
            raise SystemExit(1) from error
        trip = time.monotonic() - start
        return {"round_trip_s": trip, "clock_skew_s": theirs - asked_unix - trip / 2}

    def serve(self) -> None:
        """Obey the controller and report the ends of the nodes, until it closes the connection."""
        polls: dict[Any, int] = {}
        is_started, due = False, 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                order = self.orders.get(timeout=0.05 if polls else POLL_S)
                if order is None:
                    return
                if "port" in order:
                    words = ["port", *order["port"]]
                    ask = self.actors[0].ask.remote(
                        self.request["python"], self.request["facts"][0], *words
                    )
                    say(event="port", **json.loads(self.ray.get(ask)))
                elif "start" in order:
                    self.start(order["start"])
                    is_started = True
            if not is_started:
                continue
            if time.monotonic() >= due:
                due = time.monotonic() + POLL_S
                waiting = set(polls.values()) | set(self.ended)
                polls |= {
                    actor.poll.remote(): node
                    for node, actor in enumerate(self.actors)
                    if node not in waiting
                }
            ready = self.ray.wait(list(polls), num_returns=len(polls), timeout=0.1)[0]
            for reference in ready:
                self.handle(polls.pop(reference), reference)
            if self.is_over():
                return

    def is_over(self) -> bool:
        """Return True if all nodes have ended, or one has failed and the others are known.

        The others have had `FOLLOW_S` to report, and each has answered since, ended or been lost.
        """
        now = time.monotonic()
        running = [node for node in range(len(self.actors)) if node not in self.ended]
        for node in running:
            if now - self.answered_s[node] > SILENT_S:
                self.end(node, None, lost=f"did not answer Ray for {SILENT_S:g} s")
        if self.failed_s is None or now - self.failed_s < FOLLOW_S:
            return len(self.ended) == len(self.actors)
        return all(self.answered_s[node] > self.failed_s for node in running)

    def start(self, starts: list[dict[str, Any]]) -> None:
        """Start node.sh on every node; nodes without the run folder receive its files."""
        folder = self.request["folder"]
        files = self.ray.put(packed(folder)) if any(s["copy"] for s in starts) else None
        marks = [
            actor.start.remote(
                folder,
                files if start["copy"] else None,
                start["words"],
                {**self.request["env"], **start["env"]},
                self.log(node),
                self.request["mark"] + f"-{node}",
                self.request["locks"],
            )
            for node, (actor, start) in enumerate(zip(self.actors, starts, strict=True))
        ]
        for node, mark in enumerate(marks):
            try:
                self.ray.get(mark)
            except Exception as error:
                self.end(node, None, **self.loss(node, error))
            self.answered_s[node] = time.monotonic()

    def log(self, node: int) -> str:
        """Return the path of the agent's output in the run folder."""
        return f"logs/host-{self.nodes[node]['name']}.log"

    def handle(self, node: int, reference: Any) -> None:
        """Store what a node has written, and report its end."""
        try:
            code, changes = self.ray.get(reference)
        except Exception as error:
            # Ray needs a while to tell a lost node from a broken connection.
            if type(error).__name__ != UNAVAILABLE:
                self.end(node, None, **self.loss(node, error))
            return
        self.answered_s[node] = time.monotonic()
        for name, offset, data in changes:
            self.write(name, offset, data)
        if code is not None:
            output = self.ray.get(self.actors[node].output.remote()) if code else ""
            self.end(node, code, output=output)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write content of a node's copy of the run folder into the run folder."""
        path = Path(self.request["folder"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset and path.exists() else "wb") as file:
            file.seek(offset)
            file.write(data)

    def end(self, node: int, code: int | None, **about: Any) -> None:
        """Report the end of a node's agent, or its loss if there is no code."""
        if node in self.ended:
            return
        self.ended[node] = code
        if code != 0 and self.failed_s is None:
            self.failed_s = time.monotonic()
        say(event="end", node=node, code=code, **about)

    def loss(self, node: int, error: Exception | None) -> dict[str, Any]:
        """Return why a node was lost, in plain words."""
        text = str(error)
        is_oom = "OutOfMemory" in type(error).__name__ or "OUT_OF_MEMORY" in text
        is_oom = is_oom or "running low on memory" in text
        if is_oom:
            return {"oom": True, "lost": "Ray ended its process because the node ran out of memory"}
        if self.is_dead(node):
            return {"lost": "Ray lost the node"}
        if error is None or type(error).__name__ == UNAVAILABLE:
            return {"lost": "its Ray worker did not answer"}
        return {"lost": self.reason(error)}

    def is_dead(self, node: int) -> bool:
        with contextlib.suppress(Exception):
            return self.nodes[node]["id"] not in {n["id"] for n in alive_nodes(self.ray)}
        return False

    def reason(self, error: Exception) -> str:
        """Return the line of an error of Ray that explains it."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "RuntimeEnv" in type(error).__name__:
            return f"runtime_env cannot be set up: {lines[-1] if lines else error!r}"
        if type(error).__name__.startswith("Actor"):
            details = [line for line in lines if "exit detail" in line or "died" in line]
            return f"its Ray worker died: {(details or lines or ['no reason given'])[-1]}"
        return lines[-1] if lines else repr(error)

    def close(self) -> None:
        """End the job on all nodes and release them."""
        stops = {actor.stop.remote(): node for node, actor in enumerate(self.actors)}
        errors: dict[int, Exception] = {}
        deadline = time.monotonic() + GRACE_S + 3
        while stops and time.monotonic() < deadline:
            for reference in self.ray.wait(list(stops), timeout=0.2)[0]:
                node = stops.pop(reference)
                try:
                    code = self.ray.get(reference)
                    for name, offset, data in self.remainder(node):
                        self.write(name, offset, data)
                    if node not in self.ended:
                        say(event="end", node=node, code=code, stopped=True)
                except Exception as error:
                    errors[node] = error
        for node in {*errors, *stops.values()} - set(self.ended):
            while not self.is_dead(node) and time.monotonic() < deadline:
                time.sleep(0.5)  # Ray needs a while to notice that a node is lost
            self.end(node, None, **self.loss(node, errors.get(node)))
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self.ray.get(actor.remove.remote(), timeout=5)
            with contextlib.suppress(Exception):
                self.ray.kill(actor)
        if self.group is not None:
            with contextlib.suppress(Exception):
                importlib.import_module("ray.util").remove_placement_group(self.group)

    def remainder(self, node: int) -> list[tuple[str, int, bytes]]:
        """Return what a node has written and not yet sent."""
        changes: list[tuple[str, int, bytes]] = []
        while more := self.ray.get(self.actors[node].poll.remote(), timeout=10)[1]:
            changes += more
        return changes


def alive_nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the nodes of the cluster by address; a host name that is unique is a node's name."""
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"] and node.get("Resources")),
        key=lambda node: [part.zfill(3) for part in node["NodeManagerAddress"].split(".")],
    )
    names = Counter(node["NodeManagerHostname"] for node in alive)
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "hostname": node["NodeManagerHostname"],
            "name": node["NodeManagerHostname"]
            if names[node["NodeManagerHostname"]] == 1
            else node["NodeManagerAddress"],
            "resources": node["Resources"],
        }
        for node in alive
    ]


def find(host: str, alive: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the node with this name, address or host name; ends this program if there is none."""
    for node in alive:
        if host in (node["name"], node["address"]):
            return node
    names = ", ".join(node["name"] for node in alive)
    return fail("host", f"{host} is not one of its nodes: {names}")


GENERIC_WORD = re.compile(
    r"AMD|GEFORCE|GPU|GTX|INSTINCT|INTEL|MAX|NVIDIA|NVL|OAM|PCIE|QUADRO|RTX|SXM\d?|TESLA|TPU"
)
"""Words in names of devices that many models share."""


def model_and_memory(name: str) -> tuple[set[str], set[str]]:
    """Return the words for the model and the memory (40G, 80GB) of a device."""
    words = {word for word in name.upper().split("-") if not GENERIC_WORD.fullmatch(word)}
    memory = {word for word in words if re.fullmatch(r"\d+GB?", word)}
    return words - memory, {word.removesuffix("B") for word in memory}


def accelerator(device: str, alive: list[dict[str, Any]]) -> dict[str, float]:
    """Return the resource of a GPU type, if Ray knows the types of the cluster's GPUs.

    Ends this program if no node has the requested type.
    """
    prefix = "accelerator_type:"
    types = {name for node in alive for name in node["resources"] if name.startswith(prefix)}
    model, memory = model_and_memory(device)
    for name in sorted(types, key=len, reverse=True):
        other_model, other_memory = model_and_memory(name.removeprefix(prefix))
        same_memory = not (memory and other_memory) or memory == other_memory
        if model & other_model and same_memory:
            return {name: 0.001}
    if types:
        others = ", ".join(sorted(name.removeprefix(prefix) for name in types))
        fail("resources", f"no node has the device {device}; its GPUs are {others}")
    return {}


def fits(needs: dict[str, float], available: dict[str, float]) -> bool:
    return all(available.get(name, 0) >= number for name, number in needs.items())


def describe(bundles: list[dict[str, float]]) -> str:
    """Return the resources of a bundle in words, with the number of nodes if it is above 1."""
    text = " and ".join(f"{number:g} {name}" for name, number in bundles[0].items() if number >= 1)
    return f"{len(bundles)} nodes with {text or 'any resources'}" if len(bundles) > 1 else text


def packed(folder: str) -> bytes:
    """Return the run folder's files as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, ".")
    return buffer.getvalue()


def say(**message: Any) -> None:
    """Send a message to the controller; one that has gone needs none."""
    with contextlib.suppress(OSError, ValueError):
        REPLIES.write(json.dumps(message) + "\n")
        REPLIES.flush()


def fail(kind: str, text: str) -> Any:
    """Report an error and end this program."""
    say(event="error", kind=kind, text=text)
    raise SystemExit(1)


def connect(request: dict[str, Any]) -> Any:
    """Return Ray, connected to the cluster; ends this program if that fails."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        return fail("missing", str(error))
    host, _, port = request["address"].removeprefix("ray://").partition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=request["address"], log_to_driver=False, logging_level="error")
    except Exception as error:
        text = " ".join(str(error).split())
        if "mismatch" in text.lower():
            versions = f"Ray {ray.__version__} and Python {platform.python_version()}"
            return fail("version", f"{text[:400]} (this interpreter has {versions})")
        return fail("connection", f"{request['address']}: {text[:300]}")
    return ray


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.readline())

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    ray = connect(request)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)  # after Ray, which sets its own
    try:
        if request["list"]:
            nodes = alive_nodes(ray)
            needs = request["resources"]
            hosts = [n for n in nodes if fits(needs, n["resources"])]
            keys = ("name", "address")
            say(event="hosts", hosts=[{key: node[key] for key in keys} for node in hosts])
        else:
            Driver(ray, request).run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    # Libraries may print to standard output, which carries messages only.
    REPLIES = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
