"""Run the agent of one node in a pod, and print the run folder's files as they grow.

    python pod_program.py PORT

The pod's number, and the address of the first pod, are in the variables of the workload's kind. The
run folder is unpacked from the archive of the pod's ConfigMap. Standard output consists of records,
one per line, which the controller reads with `kubectl logs`:

    @start NODE HOST         the agent starts; HOST is the name of the Kubernetes node
    @file NODE PATH OFFSET DATA     zlib-compressed content, in base64
    @end NODE CODE           the agent has ended

A record may be read more than once. Only the standard library is used.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zlib
from pathlib import Path

POLL_S = 0.5
BLOCK_BYTES = 32 << 10
"""Maximum number of bytes of one record before compression."""
RESOLVE_S = 300.0
"""Time in seconds to wait until the first pod has an address."""
FILES = Path("/mnt/paceline/files")
FOLDER = Path("/mnt/paceline/run")
RESULTS = Path("/mnt/paceline/results")
LARGE_FOLDERS = ("checkpoints", "profiles")
"""Folders that are too large for a log. They are on the volume for results, if there is one."""
NODE_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
    "PET_NODE_RANK",
    "RANK",
)
"""Variables with the pod's number: of mpirun, an indexed Job, torchrun and a PyTorchJob."""
ADDRESS_VARIABLES = ("PACELINE_ADDRESS", "PET_MASTER_ADDR", "MASTER_ADDR")


class Folder:
    """The run folder, and how much of each file has been printed."""

    def __init__(self, node: str, folder: Path) -> None:
        """Regard the present files as known to the controller."""
        self.node, self.folder = node, folder
        self.printed: dict[str, tuple[int, int]] = {}
        self.printed = {name: (size, inode) for name, size, inode in self.files()}

    def files(self) -> list[tuple[str, int, int]]:
        """Return path, size and inode of each file."""
        files: list[tuple[str, int, int]] = []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            with contextlib.suppress(OSError):
                if name.parts[0] not in LARGE_FOLDERS and path.is_file() and not path.is_symlink():
                    about = path.stat()
                    files.append((str(name), about.st_size, about.st_ino))
        return files

    def print_changes(self) -> None:
        """Print what was appended to a file or replaced it since the last call."""
        for name, size, inode in self.files():
            offset, earlier_inode = self.printed.get(name, (0, inode))
            if inode != earlier_inode or size < offset:
                offset = 0
            elif size == offset and name in self.printed:
                continue
            with contextlib.suppress(OSError), (self.folder / name).open("rb") as file:
                file.seek(offset)
                while True:
                    data = file.read(BLOCK_BYTES)
                    if data or offset == 0:
                        text = base64.b64encode(zlib.compress(data)).decode()
                        say("@file", self.node, name.replace(" ", "%20"), str(offset), text)
                    offset += len(data)
                    self.printed[name] = offset, inode
                    if len(data) < BLOCK_BYTES:
                        break


def say(*words: str) -> None:
    """Print a record."""
    print(*words, flush=True)


def variable(names: tuple[str, ...]) -> str:
    """Return the first of these environment variables that is set."""
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    sys.exit(f"none of the variables {', '.join(names)} is set")


def unpack(folder: Path) -> None:
    """Unpack the run folder, and put its large folders on the volume for results."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(FILES / "run.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    if RESULTS.is_dir():
        place = RESULTS / os.environ["PACELINE_RUN"]
        for name in LARGE_FOLDERS:
            (place / name).mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(place / name)


def wait_for_name(address: str) -> None:
    """Wait until an address resolves, because the first pod may have none yet."""
    deadline = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the name {address} of the first pod does not resolve: {error}")
            time.sleep(POLL_S)
        else:
            return


def main(port: str) -> int:
    """Run the agent and return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    node = variable(NODE_VARIABLES)
    address = variable(ADDRESS_VARIABLES)
    host = os.environ.get("NODE_NAME") or socket.gethostname()
    unpack(FOLDER)
    folder = Folder(node, FOLDER)
    if node == "0" and re.fullmatch(r"localhost|127\..*", address):
        address = socket.gethostname()
    wait_for_name(address)
    say("@start", node, host)
    nodes = os.environ["PACELINE_NODES"]
    env = {
        **os.environ,
        "PACELINE_HOST": host,
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": os.environ["PACELINE_DEVICES"],
        "PET_NODE_RANK": node,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
    }
    with (FOLDER / "logs" / f"host-{host}.log").open("ab") as log:
        agent = subprocess.Popen(
            ["bash", "node.sh", node, address, port],
            cwd=FOLDER,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(number: int, frame: object) -> None:
        agent.send_signal(signal.SIGTERM)  # the agent ends its ranks, and this program waits

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while agent.poll() is None:
        folder.print_changes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(POLL_S)
    folder.print_changes()
    code = agent.returncode if agent.returncode >= 0 else 128 - agent.returncode
    say("@end", node, str(code))
    return code


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
