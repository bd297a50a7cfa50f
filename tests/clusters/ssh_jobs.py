"""Small jobs on ssh hosts, and what is left of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.core.hardware import Cluster, SshSettings
from paceline.core.job import Job
from paceline.machines import ssh
from paceline.machines.ssh.run import SshRun
from tests.clusters.bed import Bed
from tests.waiting import wait_until

SLEEP = "time.sleep(float(sys.argv[1]))"
RANK = f"""
import os, socket, sys, time
rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
print(socket.gethostname(), rank, port, os.environ.get("MY_TOKEN"))
sys.stdout.flush()
{SLEEP}
sys.exit(int(sys.argv[2]) if rank == "1" else 0)
"""


def settings(bed: Bed) -> SshSettings:
    """Limits so short that a dead host costs a test seconds, and a busy machine kills none."""
    return SshSettings(config=str(bed.ssh_config), alive_interval_s=2, connect_timeout_s=10)


def make_job(
    bed: Bed, hosts: Sequence[str], seconds: float = 100, code: int = 0, **fields: object
) -> Job:
    """A job whose ranks print who they are and wait; rank 1 then ends with `code`."""
    cluster = Cluster(
        name="bed",
        device="cpu",
        devices_per_node=1,
        nodes=len(hosts),
        hosts=tuple(hosts),
        launcher="ssh",
        ssh=settings(bed),
    )
    defaults = {"python": sys.executable, "files": {"rank.py": RANK}, "cluster": cluster, **fields}
    return Job(
        name="job",
        program=("rank.py", str(seconds), str(code)),
        nodes=len(hosts),
        **defaults,  # type: ignore[arg-type]
    )


def start(job: Job, folder: Path) -> SshRun:
    """The job, started in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    ssh.prepare(job, folder)
    return ssh.submit(job, folder)


def follow(runs: Sequence[SshRun], within_s: float = 60) -> list[int]:
    """The exit codes, once all have ended."""
    codes: dict[int, int] = {}

    def ended() -> bool:
        for number, run in enumerate(runs):
            if number not in codes and (code := run.poll()) is not None:
                codes[number] = code
        return len(codes) == len(runs)

    wait_until(ended, "the end of the jobs", within_s)
    return [codes[number] for number in range(len(runs))]


def follow_until(run: SshRun, done: Callable[[], object]) -> None:
    """Follow a job until something holds."""

    def holds() -> bool:
        if done():
            return True
        assert run.poll() is None, f"the job ended: {run.verdict()}"
        return False

    wait_until(holds, "what the job should do")


def running(run: SshRun, folder: Path) -> Callable[[], bool]:
    """Whether every rank of a job has said who it is."""
    return lambda: all(log_of(folder, host.session.host) for host in run.hosts)


def log_of(folder: Path, host: str) -> str:
    """What a host's ranks printed."""
    file = folder / "logs" / f"host-{host}.log"
    return file.read_text() if file.exists() else ""


def ranks_on(bed: Bed, host: str) -> list[str]:
    """Command lines of the ranks and their starters on a host."""
    return [line for line in bed.hosts[host].leftovers().values() if "rank.py" in line]
