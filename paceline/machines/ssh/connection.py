"""Command line of the system's ssh, and the meaning of its messages."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import psutil

from paceline.core.hardware import SshSettings
from paceline.core.hosts import check_name
from paceline.machines.ssh.remote import COMMAND

SSH = "ssh"
MAX_MISSED_HEARTBEATS = 3
"""Number of missed heartbeats after which a connection counts as lost."""
MAX_SOCKET_PATH = 80
"""Maximum length of a socket path in bytes. The kernel allows 108, and ssh adds a suffix of its own
while it creates the socket."""
_PREFIX = "pl-"
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@:=,-]+")

CHANGED_KEY = "REMOTE HOST IDENTIFICATION HAS CHANGED"
"""Message of a changed host key. It comes in the middle of ssh's output, which ends with the
message for an unknown key."""
EXPLANATIONS = (
    (
        CHANGED_KEY,
        "its host key has changed",
        "find out why before you remove the old one with ssh-keygen -R",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is unknown",
        "compare its fingerprint with the host's own, then connect once with ssh to accept it",
    ),
    (
        r"Permission denied|Too many authentication failures|No more authentication methods",
        "refuses to log in without a password",
        "add your public key there with ssh-copy-id",
    ),
    (
        r"Could not resolve hostname",
        "its name does not resolve",
        "correct the host list, /etc/hosts or ~/.ssh/config",
    ),
    (
        r"timed out|Timeout, server|No route to host|Network is unreachable",
        "does not answer",
        "check that it is up, or leave it out",
    ),
    (r"Connection refused", "no ssh server is listening", "start sshd, or leave it out"),
    (r"open-file|Too many open files", "this machine has too many open files", "raise `ulimit -n`"),
)
"""Patterns of ssh's messages, what they mean for the host, and the remedy."""


def ssh_argv(
    host: str, settings: SshSettings, control: str | None = None, master: bool = False
) -> list[str]:
    """Return the ssh command for one host; other options come from the user's configuration.

    `control` is the socket of the shared connection, which the `master` creates. Host keys are
    checked as the configuration requires. Without a terminal an unknown key is refused.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": settings.connect_timeout_s,
        "ConnectionAttempts": 1,
        "ServerAliveInterval": settings.alive_interval_s,
        "ServerAliveCountMax": MAX_MISSED_HEARTBEATS,
        "ControlMaster": "yes" if master else "no",
        "ControlPath": control or "none",
        "ControlPersist": "no",
        "LogLevel": "INFO",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "PermitLocalCommand": "no",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
    }
    config_options = ["-F", str(Path(settings.config).expanduser())] if settings.config else []
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [SSH, *config_options, *words, "--", check_name(host), COMMAND]


def private_folder() -> Path:
    """Create a folder for sockets that no other user can enter, and return its path.

    The path is short enough for the kernel. It contains no `%`, quotes or spaces, which ssh would
    interpret.
    """
    place = tempfile.gettempdir()
    # mkdtemp adds eight characters.
    length = len(os.fsencode(place)) + len(f"/{_PREFIX}{os.getpid()}-") + 8
    if length > MAX_SOCKET_PATH or not _PLAIN_PATH.fullmatch(place):
        place = "/tmp"
    _remove_stale_folders(Path(place))
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))


def _remove_stale_folders(place: Path) -> None:
    """Remove folders that killed processes of this user left; their sockets ended with ssh."""
    for folder in place.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            is_own = folder.lstat().st_uid == os.getuid()
            if is_own and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                folder.rmdir()  # fails if not empty: a process of another namespace uses it


def explain(messages: str) -> tuple[str, str | None]:
    """Return the meaning of ssh's messages for a host, and a remedy.

    If no message is known, the last line is returned. Otherwise the last known message is used,
    because a host may print any text in its greeting before it.
    """
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for text in [*(line for line in lines if CHANGED_KEY in line), *reversed(lines)]:
        for pattern, what, remedy in EXPLANATIONS:
            if re.search(pattern, text):
                return what, remedy
    return (f"ssh failed: {lines[-1][:200]}" if lines else "ssh ended without a message"), None
