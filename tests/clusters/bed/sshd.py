"""A real sshd on every host, with keys of its own; a client finds all it needs in one folder."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.bed.host import Host
from tests.clusters.bed.process import call
from tests.waiting import wait_until

SERVER = """\
Port 22
HostKey {folder}/host_key
PidFile /run/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
UseDNS no
PrintMotd no
PrintLastLog no
Subsystem sftp internal-sftp
"""
CLIENT = """\
Host {name}
  HostName {address}
  HostKeyAlias {name}
"""
ALL_CLIENTS = """\
Host *
  User root
  IdentityFile {folder}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@dataclass
class Sshd:
    """The servers of a bed and the client's side of them."""

    folder: Path
    """Holds ssh_config, known_hosts, id_ed25519 and hostfile."""
    hosts: Sequence[Host]
    slots: int = 1

    def prepare(self) -> None:
        """Writes keys and settings for all hosts and for the client."""
        self.folder.mkdir(mode=0o700)
        for key in (self.folder / "id_ed25519", self.folder / "stranger"):
            _make_key(key)
        for host in self.hosts:
            _make_key(host.folder / "host_key")
            (host.folder / "sshd_config").write_text(SERVER.format(folder=host.folder))
            self.let_in(host)
        self._write("known_hosts", [self._known(host) for host in self.hosts])
        self._write("hostfile", [f"{host.name} slots={self.slots}\n" for host in self.hosts])
        each = [CLIENT.format(name=host.name, address=host.address) for host in self.hosts]
        self._write("ssh_config", [*each, ALL_CLIENTS.format(folder=self.folder)])

    def start(self, hosts: Sequence[Host]) -> None:
        """Starts the servers of these hosts and waits until each greets."""
        for host in hosts:
            config, log = host.folder / "sshd_config", host.folder / "sshd.log"
            host.call("/usr/sbin/sshd", "-f", str(config), "-E", str(log))
        for host in hosts:
            wait_until(lambda host=host: greets(host.address), f"sshd of {host.name}")

    def lock_out(self, host: Host) -> None:
        """The host knows another key than the client's: nobody set up password-less login."""
        self._authorise(host, "stranger")

    def let_in(self, host: Host) -> None:
        """The host knows the client's key."""
        self._authorise(host, "id_ed25519")

    def _authorise(self, host: Host, key: str) -> None:
        text = (self.folder / f"{key}.pub").read_text()
        (host.folder / "authorized_keys").write_text(text)

    def _known(self, host: Host) -> str:
        kind, key, *_ = (host.folder / "host_key.pub").read_text().split()
        return f"{host.name},{host.address} {kind} {key}\n"

    def _write(self, name: str, lines: Sequence[str]) -> None:
        (self.folder / name).write_text("".join(lines))


def greets(address: str) -> bool:
    """True when a server on port 22 says that it speaks SSH."""
    with suppress(OSError), socket.create_connection((address, 22), timeout=1) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def _make_key(file: Path) -> None:
    call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", file.name, "-f", str(file)])
