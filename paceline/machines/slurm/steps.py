"""Run that is one step of an allocation: srun on a fixed part of its nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.job import Job
from paceline.core.units import pluralize
from paceline.files.documents import read_text
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER
from paceline.machines import JobEnd, local
from paceline.machines.slurm import client
from paceline.machines.slurm.client import QUEUE, Queue
from paceline.machines.slurm.states import JobState, failed_nodes, host_names

STOP_GRACE_S = 60.0
"""Time in seconds that srun has to end its step after SIGTERM (Slurm's KillWait is 30 s)."""
SETTLE_S = 5.0
"""Time in seconds for which an allocation may still be reported as running after it ended its
steps."""
POLL_S = 0.5

_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+( DUE TO TIME LIMIT)?")
_TASK_ENDED = re.compile(r"task \S+: (?:Exited|Killed|Terminated|Aborted|Segmentation)")


def cancellation(log: str) -> re.Match[str] | None:
    """Return srun's message that its step was cancelled, or None.

    A cancellation caused by the end of a task does not count.
    """
    match = _CANCELLED.search(log)
    return None if match is None or _TASK_ENDED.search(log, 0, match.start()) else match


@dataclass
class StepRun(local.LocalRun):
    """A started step. It ends with srun, and srun ends with this process."""

    folder: Path = field(default_factory=Path)
    allocation: str = ""
    queue: Queue = field(default_factory=lambda: QUEUE)
    limit_s: float | None = None
    _started_at: float | None = None
    _stopped: bool = False

    @property
    def waiting(self) -> bool:
        """True while srun waits for nodes that are in use: no node has opened its log yet."""
        if self._started_at is None and any((self.folder / LOGS_FOLDER).glob("host-*.log")):
            self._started_at = time.monotonic()
        return self._started_at is None

    @property
    def phase(self) -> str:
        """Text that says whether the step waits for nodes or runs on them."""
        verb = "waits for" if self.waiting else "runs on"
        return f"{verb} nodes of allocation {self.allocation}"

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed since its start; waiting does not count."""
        if self.limit_s is None or self.waiting or self._started_at is None:
            return False
        return time.monotonic() - self._started_at > self.limit_s

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """End the step through srun, kill srun if it does not end, and return the exit code."""
        self._stopped = True
        return super().stop(grace_s)

    def hurry(self) -> None:
        """Do nothing: srun is ending its step, and killing srun would leave the step running."""

    def verdict(self) -> JobEnd | None:
        """Return the end of the job if Slurm or another user caused it, else None.

        Causes are the end of the allocation, a lost node, the step's time limit, and a cancelled
        step.
        """
        path = self.folder / LOGS_FOLDER / LAUNCHER_LOG
        log = read_text(path, errors="replace") if path.exists() else ""
        if not self.process.returncode or (self._stopped and not failed_nodes(log)):
            return None
        if lost_hosts := tuple(failed_nodes(log)):
            return JobEnd(
                "failed", f"allocation {self.allocation} lost {', '.join(lost_hosts)}", lost_hosts
            )
        by_slurm = cancellation(log)
        state = self._final_state() if by_slurm else self.queue.state(self.allocation, urgent=True)
        if state and state.ended:
            remedy = "finished results are kept; start the run again in another allocation"
            return JobEnd(
                "incomplete", f"allocation {self.allocation} ended ({state.state}); {remedy}"
            )
        if by_slurm and by_slurm[1]:
            return JobEnd("timeout", "Slurm ended the step at its time limit")
        if by_slurm:
            return JobEnd(
                "cancelled", f"another user cancelled the step of allocation {self.allocation}"
            )
        return None

    def _final_state(self) -> JobState | None:
        """Return the allocation's state, after waiting up to `SETTLE_S` for its end.

        An allocation is reported as ended a moment after its steps.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            state = self.queue.state(self.allocation, urgent=True)
            if (state and state.ended) or time.monotonic() > deadline:
                return state
            time.sleep(POLL_S)


def submit_step(job: Job, folder: Path, allocation: str) -> StepRun:
    """Start job.sh as a step on its nodes of a running allocation.

    Raises UserError for hosts that are not in it, and SystemFaultError if it is not running.
    """
    check_allocation(allocation, job.cluster.hosts if job.cluster else (), job.nodes)
    QUEUE.watch(allocation)
    handle = partial(StepRun, folder=folder, allocation=allocation, limit_s=job.timeout_s)
    return local.start(job, folder, client.environment(job.env), handle)


def check_allocation(allocation: str, hosts: Sequence[str], nodes: int) -> None:
    """Check that the allocation runs and has these hosts, or enough nodes.

    Raises like submit_step if it does not.
    """
    where = f"allocation {allocation}"
    jobs = client.states([allocation])
    if jobs is None:
        raise SystemFaultError(where, "Slurm does not answer, so its state is unknown")
    state = jobs.get(allocation)
    if state is None or state.state != "RUNNING":
        condition = f"is {state.state}" if state else "is unknown to Slurm"
        raise SystemFaultError(where, condition, allowed="a running allocation")
    members = host_names(state.nodes)
    outside = [host for host in hosts if host not in members]
    if outside or nodes > len(members):
        excess = f"has fewer than {pluralize(nodes, 'node')}"
        problem = f"does not contain {', '.join(outside)}" if outside else excess
        raise UserError(where, problem, allowed=state.nodes, hosts=outside)
