"""Facts about a host. The file is sent as text to every host and run by the job's interpreter.

    facts FOLDER NONCE INTERFACE PEER [SERVER]    one JSON object: versions, limits, disk, addresses
    port ADDRESS PORT ...                         the first port that is free at this address

SERVER is the address at which the controller reached this host. Only the standard library is used.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915
"""Linux ioctl for the address of an interface. The buffer holds 16 bytes of name, then a
sockaddr_in, whose IPv4 address follows family and port (2 bytes each) and so begins at byte 20."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def facts(folder: str, nonce: str, interface: str, peer: str, server: str = "") -> dict[str, Any]:
    """Return all facts that are checked before a job starts; None where unknown."""
    temporary = os.environ.get("TMPDIR") or "/tmp"
    addresses = interface_addresses()
    return {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "torch": torch_version(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "folder": folder_state(folder, nonce) if folder else None,
        "free_bytes": free_bytes(folder) if folder else None,
        "temporary": temporary,
        "temporary_free_bytes": free_bytes(temporary),
        "address": addresses.get(interface) if interface else None,
        "peer_address": resolve(peer),
        "own_address": resolve(socket.gethostname()),
        "reached_on": next(
            (name for name, address in addresses.items() if address == server), None
        ),
        "interfaces": sorted(addresses),
        "machine": machine(),
        "addresses": sorted(a for a in addresses.values() if not a.startswith("127.")),
    }


def machine() -> str:
    """Return the kernel's boot id and this host's own name.

    Either alone may be equal on two hosts.
    """
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{boot} {socket.gethostname()}"


def torch_version() -> str | None:
    """Return the installed version of torch without importing it, which takes seconds."""
    for folder in filter(os.path.isdir, sys.path):
        for name in os.listdir(folder):  # noqa: PTH208
            if name.startswith("torch-") and name.endswith((".dist-info", ".egg-info")):
                return name.split("-")[1].removesuffix(".dist").removesuffix(".egg")
    return None


def folder_state(folder: str, nonce: str) -> str:
    """Return how this host sees the run folder.

    It is `shared` if the controller's file is there and the folder is writable, `read-only` if it
    is not writable, `another` if the file has other content, and `missing` if it is not there.
    """
    name, _, content = nonce.partition("=")
    try:
        file_content = Path(folder, name).read_text()
    except (OSError, UnicodeError):
        return "missing"
    if file_content != content:
        return "another"
    return "shared" if os.access(folder, os.W_OK | os.X_OK) else "read-only"


def free_bytes(folder: str) -> int | None:
    """Return the number of bytes that this user may still write; None if unknown."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def resolve(name: str) -> str | None:
    """Return the address that this host resolves a name to, or None."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def free_port(address: str, *ports: str) -> dict[str, Any]:
    """Return the first port that is free to listen on, or the reason why none is."""
    reason = ""
    for port in map(int, ports):
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((address, port), family=family).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return {"port": port}
    return {"port": None, "why": reason}


if __name__ == "__main__":
    query, *arguments = sys.argv[1:]
    print(json.dumps(facts(*arguments) if query == "facts" else free_port(*arguments)))
