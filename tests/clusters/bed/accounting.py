"""Slurm's accounting: a database of the bed's own and slurmdbd before it, so that sacct works."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.bed.host import Host
from tests.clusters.bed.process import BedError, call, spawn
from tests.waiting import wait_until

SETTINGS = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={head.address}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
"""
DAEMON = """\
DbdHost={head.name}
DbdAddr={head.address}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""
SERVER = (
    "--skip-name-resolve",
    "--bind-address=127.0.0.1",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    # Several servers at once may ask for more of these than the kernel has.
    "--innodb-use-native-aio=0",
    "--innodb-lock-wait-timeout=900",
    "--skip-innodb-doublewrite",
    "--performance-schema=OFF",
)

LIMIT_S = 180.0
"""How long each may take to answer: several beds may start at once on a busy machine."""


@dataclass
class Accounting:
    """The database and slurmdbd on the controller's host."""

    folder: Path
    """Slurm's folder in the bed."""
    head: Host

    @property
    def settings(self) -> str:
        """Lines of slurm.conf."""
        return SETTINGS.format(folder=self.folder, head=self.head)

    @property
    def socket(self) -> str:
        """Where the database listens; in the host's private /run."""
        return "/run/database.socket"

    def prepare(self) -> None:
        """Makes an empty database and the settings of slurmdbd."""
        database, conf = self.folder / "database", self.folder / "slurmdbd.conf"
        database.mkdir()
        shutil.chown(database, "mysql", "mysql")
        install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={database}"]
        call([*install, "--skip-test-db", "--auth-root-authentication-method=socket"])
        conf.touch(mode=0o600)
        password = secrets.token_hex(12)
        conf.write_text(DAEMON.format(folder=self.folder, head=self.head, password=password))

    def start(self) -> None:
        """Starts both and waits until slurmdbd answers."""
        server = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={self.folder}/database"]
        server += [f"--socket={self.socket}", *SERVER]
        # The database opens its socket's folder to its own user alone.
        self.head.call("chmod", "1777", "/run")
        log = self.folder / "log" / "database"
        process = spawn(self.head.argv(server), log)
        self.head.keep(process)
        wait_until(lambda: self._answers() or process.poll() is not None, "the database", LIMIT_S)
        if process.poll() is not None:
            raise BedError(f"the database ended at once: {log.read_text()[-1000:]}")
        self._grant()
        conf = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        call(self.head.argv(["slurmdbd"]), env=conf)
        wait_until(lambda: self._register(conf), "slurmdbd", LIMIT_S)

    def _answers(self) -> bool:
        ping = ("mariadb-admin", "--no-defaults", f"--socket={self.socket}", "ping")
        return self.head.run(*ping).returncode == 0

    def _grant(self) -> None:
        password = (
            (self.folder / "slurmdbd.conf").read_text().partition("StoragePass=")[2].split()[0]
        )
        user = "slurm@'%'"
        statements = [
            "create database if not exists slurm",
            f"create user if not exists {user} identified by '{password}'",
            f"grant all on slurm.* to {user}",
        ]
        client = ["mariadb", "--no-defaults", f"--socket={self.socket}"]
        call(self.head.argv(client), text=";".join(statements))

    def _register(self, conf: dict[str, str]) -> bool:
        add = ["sacctmgr", "--immediate", "add", "cluster", "bed"]
        done = self.head.run(*add, env={"PATH": "/usr/bin:/bin", **conf})
        return done.returncode == 0 or "already exists" in done.stdout + done.stderr
