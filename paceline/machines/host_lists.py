"""The hosts that Slurm names: of a running job, or idle ones of a partition."""

from __future__ import annotations

import re
import subprocess

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host, expand
from paceline.machines.slurm import client

TIME_LIMIT_S = 30.0
"""How long a command of Slurm may take to answer."""
PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class UnknownJobError(SystemFaultError):
    """Slurm does not know the job (any more)."""


def from_allocation(job: str) -> tuple[Host, ...]:
    """The hosts of a running Slurm job; raises UserError where it has none (yet)."""
    nodes = _answer(["squeue", "--noheader", "--jobs", job, "--states=running", "--format=%N"])
    names = expand(",".join(nodes.split()), f"job {job}")
    if not names:
        raise UserError(f"job {job}", "has no hosts: it does not run", remedy="squeue --me")
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def from_partition(partition: str | None = None) -> tuple[Host, ...]:
    """The idle hosts of a partition, of all without one; raises UserError when none is idle."""
    if partition is not None and not PARTITION.fullmatch(partition):
        raise UserError("partition", f"{partition!r} is no name of one")
    options = [f"--partition={partition}"] if partition else []
    listing = _answer(["sinfo", "--noheader", "--format=%t %N", *options])
    # sinfo's own --states=idle also takes drained nodes, and those that do not answer (`idle*`).
    lines = (line.split() for line in listing.splitlines())
    idle = [line[1] for line in lines if len(line) == 2 and line[0] == "idle"]
    names = expand(",".join(idle), "sinfo")
    if not names:
        raise UserError(
            f"partition {partition}" if partition else "sinfo",
            "has no idle node",
            remedy="sinfo tells the nodes' states",
        )
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def _answer(command: list[str]) -> str:
    """What a command of Slurm prints; raises SystemFaultError where it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
            env=client.environment({}),
        )
    except FileNotFoundError as error:
        raise SystemFaultError(command[0], "is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(command[0], f"did not answer in {TIME_LIMIT_S:.0f} s") from error
    if done.returncode:
        messages = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        unknown = client.NO_SUCH_JOB in done.stderr
        raise (UnknownJobError if unknown else SystemFaultError)(command[0], messages[0])
    return done.stdout
