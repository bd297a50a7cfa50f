"""Launcher for this machine: the node agent, with one rank per device.

The script contains no paths, because it changes to its own folder first. A dry run therefore prints
exactly the bytes that run, wherever the run folder is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.interrupts import deferred_interrupts
from paceline.core.job import COLLECTIVE_LIMIT, Job
from paceline.files.documents import write_text
from paceline.files.programs import die_with_parent
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER, SCRIPT_FILE, STEPS_FOLDER
from paceline.machines import Handle, JobEnd, UnfitHost
from paceline.machines.node.script import (
    AGENT_FILE,
    RANK0_STORE,
    agent_command,
    agent_text,
    open_variables,
    secret_variables,
)
from paceline.machines.ssh import remote

GRACE_S = 5.0
"""Time in seconds that programs have to end after SIGTERM before they are killed."""


def render(job: Job) -> str:
    """Return the bash script that starts `job` on this machine.

    The script contains no secrets; `submit` passes them in the environment. Raises ValueError for a
    variable name that bash would misread.
    """
    settings = {
        RANK0_STORE: "rank0",
        COLLECTIVE_LIMIT: f"{job.collective_limit_s:g}",
        **open_variables(job.env),
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(settings.items())]
    start = [job.python, *agent_command(job.ranks_per_node), *job.program]
    lines = [
        "#!/usr/bin/env bash",
        f"# {shlex.quote(' '.join(job.name.split()))} on this machine",
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        *exports,
        f"exec {shlex.join(start)}",
    ]
    return "\n".join(lines) + "\n"


@dataclass
class LocalRun(Handle):
    """A started job: one process group, and all processes started by its members."""

    process: subprocess.Popen[bytes]
    deadline: float | None
    guard: subprocess.Popen[bytes] | None
    """Process that ends what has left the job's family, also after the death of this process. It
    has no default, because a handle without it would end the job; None on other systems than
    Linux."""
    _family: dict[int, psutil.Process] = field(default_factory=dict[int, psutil.Process])

    def poll(self) -> int | None:
        """Return the exit code if the job has ended, else None.

        Every descendant process seen so far is recorded for `sweep`. All are ended with the job.
        """
        code = self.process.poll()
        if code is None:
            self._remember()
        else:
            self._end_all()
        return code

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def stop(self, grace_s: float = GRACE_S) -> int:
        """End every process of the job and return the exit code.

        Processes get SIGTERM first, and SIGKILL after `grace_s` seconds.
        """
        self._remember()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self._wake()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._remember()
                self.process.kill()
            except KeyboardInterrupt:
                self.hurry()
                raise
        code = self.process.wait()
        self.sweep()
        return code

    def hurry(self) -> None:
        """Kill the job without a grace period and sweep, on a second interrupt."""
        self._remember()
        self.process.kill()
        self.process.wait()
        self.sweep()

    def sweep(self) -> None:
        """Kill the processes that the job left behind.

        Programs may start sessions of their own, so they are killed individually, not by group.
        """
        for process in self._family.values():
            try:
                process.kill()  # psutil checks that the pid is still the same process
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(list(self._family.values()), timeout=GRACE_S)
        self._end_all()

    def verdict(self) -> JobEnd | None:
        """Return None: on one machine the ranks' processes report every cause of an end."""
        return None

    def _end_all(self) -> None:
        """Have the guard kill every process with the job's mark, and end."""
        if self.guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guard.communicate(b"end\n", timeout=GRACE_S)
            self.guard = None

    def _wake(self) -> None:
        """Resume stopped processes, so that the pending SIGTERM makes them write their stacks."""
        for process in self._family.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.terminate()
                    process.resume()

    def _remember(self) -> None:
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self._family |= {child.pid: child for child in children}


RunT = TypeVar("RunT", bound=LocalRun)


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files, the agent and the script into the run folder."""
    for name, text in {**job.files, AGENT_FILE: agent_text()}.items():
        write_text(folder / name, text)
    write_text(folder / SCRIPT_FILE, render(job))
    for name in (LOGS_FOLDER, STEPS_FOLDER):
        (folder / name).mkdir(exist_ok=True)


def submit(job: Job, folder: Path) -> LocalRun:
    """Start the script that `prepare` wrote as `start` does."""
    return start(job, folder, None, LocalRun)


def start(
    job: Job,
    folder: Path,
    env: dict[str, str] | None,
    handle: Callable[[subprocess.Popen[bytes], float | None, subprocess.Popen[bytes] | None], RunT],
) -> RunT:
    """Start the script that `prepare` wrote; its output goes to logs/launcher.log.

    `env` replaces this process's environment variables if given. `handle` makes the handle of the
    process, its deadline and its guard. If this process dies, the kernel sends SIGTERM to the
    launcher, and the ranks end with it; the guard ends all others. Raises SystemFaultError if the
    job cannot be started.
    """
    mark = secrets.token_hex(16)
    deadline = None if job.timeout_s is None else time.monotonic() + job.timeout_s
    runs: list[RunT] = []
    try:
        # An interrupt inside Popen would leave a process that nobody knows and nobody stops.
        with (folder / LOGS_FOLDER / LAUNCHER_LOG).open("ab") as log, deferred_interrupts():
            guard = _start_guard(mark) if sys.platform == "linux" else None
            process = subprocess.Popen(
                ["bash", SCRIPT_FILE],
                cwd=folder,
                env={
                    **(os.environ if env is None else env),
                    **secret_variables(job.env),
                    remote.MARK: mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM)
                if sys.platform == "linux"
                else None,
            )
            runs.append(handle(process, deadline, guard))
    except OSError as error:
        raise SystemFaultError(
            str(folder), f"the job cannot be started: {error.strerror}"
        ) from error
    except KeyboardInterrupt:
        for run in runs:
            run.stop()
        raise
    return runs[0]


def _start_guard(mark: str) -> subprocess.Popen[bytes]:
    """Start a process that ends all processes with a mark in their environment.

    It does so at once after a line on its standard input, and with a grace period at the end of
    the input, which is also the death of this process.
    """
    at_once = f"while paceline_signal {mark} 0 KILL; do sleep 0.05; done"
    script = f"{remote.PROGRAM}if read -r; then {at_once}; else paceline_end {mark} 0; fi"
    return subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Return no hosts, because this machine runs the check itself."""
    return {}
