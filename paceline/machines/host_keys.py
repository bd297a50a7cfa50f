"""The keys that hosts show: their fingerprints, for a person to compare.

Nothing here makes ssh trust a host. Keys come over the network, so whoever answers for a host may
show his own; only fingerprints that are compared on another way (the host's console, the provider's
page) say more.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError

SCANS_AT_ONCE = 16
SCAN_LIMIT_S = 5


@dataclass(frozen=True)
class HostKey:
    """One key of one host, or why there is none."""

    host: str
    kind: str | None = None
    """ED25519, ECDSA, RSA."""
    bits: int | None = None
    fingerprint: str | None = None
    state: str = "unknown"
    """known, unknown, changed (ssh knows another key of this kind), or unreachable."""
    line: str = ""
    """The line of a known_hosts file."""
    note: str | None = None


def scan(hosts: Sequence[str], config: Path | None = None) -> list[HostKey]:
    """The keys of every host in order, asked at the address and port that ssh would use.

    Raises SystemFaultError where OpenSSH's programs are missing.
    """
    with ThreadPoolExecutor(SCANS_AT_ONCE) as threads:
        keys_by_host = threads.map(lambda host: _keys_of(host, config), hosts)
        return [key for keys in keys_by_host for key in keys]


def write_known_hosts(keys: Sequence[HostKey], path: Path) -> int:
    """Write the scanned keys to a new file; how many.

    Raises UserError where the file exists (a file of known hosts is never changed), and where a
    host shows another key than the one ssh knows.
    """
    changed = sorted({key.host for key in keys if key.state == "changed"})
    if changed:
        raise UserError(
            changed[0],
            "shows another key than the one that ssh knows",
            remedy="find out why; nothing was written",
        )
    lines = [key.line for key in keys if key.line]
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(
            str(path),
            f"cannot be made: {error.strerror}",
            remedy="name a new file; known hosts are never changed",
        ) from error
    with os.fdopen(file, "w", encoding="utf-8") as text:
        text.writelines(line + "\n" for line in lines)
    return len(lines)


def _keys_of(host: str, config: Path | None) -> list[HostKey]:
    settings = _settings(host, config)
    if "hostname" not in settings:
        return [HostKey(host, state="unreachable", note="ssh cannot read its configuration")]
    if (
        settings.get("proxyjump", "none") != "none"
        or settings.get("proxycommand", "none") != "none"
    ):
        return [
            HostKey(host, state="unreachable", note="lies behind another host: scan from there")
        ]
    address, port = settings["hostname"], settings.get("port", "22")
    listing = _run(["ssh-keyscan", "-T", str(SCAN_LIMIT_S), "-p", port, "--", address])
    lines = sorted(line for line in listing.splitlines() if line and not line.startswith("#"))
    if not lines:
        return [HostKey(host, state="unreachable", note=f"{address} port {port} shows no key")]
    name = settings.get("hostkeyalias") or (address if port == "22" else f"[{address}]:{port}")
    known_keys = _known_keys(name, settings)
    return [_key(host, f"{name} {line.split(' ', 1)[1]}", known_keys) for line in lines]


def _settings(host: str, config: Path | None) -> dict[str, str]:
    """What ssh would do for this host, by its own answer."""
    options = ["-F", str(config)] if config else []
    output = _run(["ssh", *options, "-G", "--", host])
    pairs = (line.partition(" ") for line in output.splitlines())
    return {name.lower(): value for name, _, value in pairs}


def _known_keys(name: str, settings: dict[str, str]) -> dict[str, set[str]]:
    """The keys that ssh knows under `name`, by their type."""
    files = f"{settings.get('userknownhostsfile', '')} {settings.get('globalknownhostsfile', '')}"
    keys: dict[str, set[str]] = {}
    for file in files.split():
        if not Path(file).expanduser().is_file():
            continue
        output = _run(["ssh-keygen", "-F", name, "-f", str(Path(file).expanduser())])
        for line in output.splitlines():
            words = line.split()
            if len(words) >= 3 and not line.startswith(("#", "@")):
                keys.setdefault(words[1], set()).add(words[2])
    return keys


def _key(host: str, line: str, known_keys: dict[str, set[str]]) -> HostKey:
    _, kind, key, *_ = line.split()
    same_kind = known_keys.get(kind, set())
    state = "known" if key in same_kind else "changed" if same_kind else "unknown"
    fields = _run(["ssh-keygen", "-l", "-f", "-"], line + "\n").split()
    if len(fields) < 3:
        return HostKey(host, kind, state="unreachable", note="shows what is no key")
    return HostKey(host, fields[-1].strip("()"), int(fields[0]), fields[1], state, line)


def _run(command: list[str], text: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=4 * SCAN_LIMIT_S,
        )
    except FileNotFoundError as error:
        raise SystemFaultError(
            command[0], "is not installed here", remedy="install OpenSSH's client"
        ) from error
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout
