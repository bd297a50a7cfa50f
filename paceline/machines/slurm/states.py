"""States of Slurm jobs and nodes as reported by Slurm's commands, and their meaning for a run."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.core.errors import UserError
from paceline.core.hosts import expand
from paceline.core.result import Status
from paceline.core.text import whole_number
from paceline.machines import JobEnd

SQUEUE_FORMAT = "%i|%T|%N|%r"
SACCT_FORMAT = "JobID,State,ExitCode,NodeList,Reason"

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "SPECIAL_EXIT",
        "TIMEOUT",
    }
)
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING"})
NODE_LOST = frozenset({"NODE_FAIL", "BOOT_FAIL"})
NEVER_STARTS = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobArrayTaskFailed",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "ReservationDeleted",
        "launch failed requeued held",
    }
)
"""Reasons for which a waiting job will never start."""

_NODE_FAILURE = re.compile(r"Node failure on (\S+)")
# Slurm appends `*` to the state of a node that does not answer.
_LOST = re.compile(r"(down|fail|error|unknown|.*\*$)", re.IGNORECASE)
_MEANING: dict[str, tuple[Status, str]] = {
    "TIMEOUT": ("timeout", "was ended by Slurm at its time limit"),
    "DEADLINE": ("timeout", "was ended by Slurm at its deadline"),
    "OUT_OF_MEMORY": ("oom", "was ended because a node ran out of memory"),
    "NODE_FAIL": ("failed", "lost a node"),
    "BOOT_FAIL": ("failed", "has a node that did not boot"),
    "PREEMPTED": ("incomplete", "was preempted by another job"),
    "REVOKED": ("incomplete", "was revoked by another cluster"),
    "SPECIAL_EXIT": ("failed", "was put on hold by Slurm after a special exit code"),
}


@dataclass(frozen=True)
class JobState:
    """Last state of a job as reported by Slurm."""

    id: str
    state: str
    """Long name of the state, without any suffix."""
    nodes: str = ""
    reason: str = ""
    exit_code: int | None = None
    """Exit code as in a shell: 128 + number for a signal. None if only squeue was queried."""
    cancelled_by: int | None = None
    """User id of the user who cancelled the job, if accounting reports it."""

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self.state in ENDED

    @property
    def never_starts(self) -> bool:
        """True if the job waits for a condition that will never hold."""
        return self.state in WAITING and self.reason.partition(",")[0] in NEVER_STARTS

    @property
    def phase(self) -> str:
        """Text that is shown while the job is watched."""
        reason = f": {self.reason}" if self.reason else ""
        if self.state in WAITING:
            return f"job {self.id} waits in Slurm's queue{reason}"
        return f"job {self.id} is {self.state.lower()} on {self.nodes}"


def parse_squeue(text: str) -> dict[str, JobState]:
    """Return the jobs in the output of `squeue -h -r -o SQUEUE_FORM`, by id."""
    jobs: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 3)
        if len(fields) == 4:
            job, state, nodes, reason = fields
            jobs[job] = JobState(job, state, _nodes(nodes), _reason(reason))
    return jobs


def parse_sacct(text: str) -> dict[str, JobState]:
    """Return the jobs in the output of `sacct -nXP -o SACCT_FORM`, by id."""
    jobs: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) == 5:
            job, description, code, nodes, reason = fields
            state, _, by = description.partition(" by ")
            user = whole_number(by)
            # sacct prints `CANCELLED by UID`, and appends + to a truncated state.
            state = state.split(" ")[0].rstrip("+")
            jobs[job] = JobState(job, state, _nodes(nodes), _reason(reason), _exit_code(code), user)
    return jobs


def merged(queue: JobState | None, account: JobState | None) -> JobState | None:
    """Return the state of one job from the queue and from accounting.

    The queue's state is used until both report an end. Then accounting's is used, with the queue's
    reason.
    """
    if queue is None or account is None:
        return queue or account
    if not queue.ended or not account.ended:
        return queue
    return replace(account, nodes=account.nodes or queue.nodes, reason=queue.reason)


def verdict_of(last: JobState, lost_hosts: tuple[str, ...] = ()) -> JobEnd | None:
    """Return what a job's last state means for its run; None if only the ranks can tell."""
    who = f"Slurm job {last.id}"
    if last.never_starts:
        return JobEnd("failed", f"{who} can never start: {last.reason}")
    if last.state in NODE_LOST or lost_hosts:
        what = _MEANING.get(last.state, _MEANING["NODE_FAIL"])[1]
        names = (
            f": {', '.join(lost_hosts)}"
            if lost_hosts
            else f" of {last.nodes}"
            if last.nodes
            else ""
        )
        return JobEnd("failed", f"{who} {what}{names}", lost_hosts)
    if last.state == "CANCELLED":
        if last.reason.startswith("Dependency"):
            return JobEnd("cancelled", f"{who} waited for a job that failed")
        return JobEnd("cancelled", f"{who} was cancelled by {_user(last.cancelled_by)}")
    if last.state in _MEANING:
        status, what = _MEANING[last.state]
        return JobEnd(status, f"{who} {what}")
    if last.state == "FAILED" and "LaunchFailure" in last.reason:
        what = f"could not be started on {last.nodes} ({last.reason}); can it see the run folder?"
        return JobEnd("failed", f"{who} {what}", host_names(last.nodes))
    return None


def host_names(nodes: str) -> tuple[str, ...]:
    """Return the hosts in Slurm's compressed list; empty if it cannot be parsed."""
    try:
        return tuple(expand(nodes)) if nodes else ()
    except UserError:
        return ()


def failed_nodes(log: str) -> list[str]:
    """Return the nodes that failed according to srun's output."""
    names = [name.rstrip(".,:") for name in _NODE_FAILURE.findall(log)]
    return sorted({name for list_ in names for name in host_names(list_) or (list_,)})


def lost_nodes(sinfo: str) -> dict[str, str]:
    """Return nodes that Slurm has lost, with their state, from `sinfo -h -N -o '%N|%T|%E'`."""
    return {name: why for name, (state, why) in _node_states(sinfo) if _LOST.fullmatch(state)}


def unusable_nodes(sinfo: str, reserved: bool = False) -> dict[str, str]:
    """Return nodes that no new job can use, with state and reason, from the same output.

    A job with a reservation may use nodes reserved for maintenance, because the reservation may be
    its own.
    """
    unusable_states = ("drain", "power", "futur", "inval", *(() if reserved else ("maint",)))
    return {
        name: why
        for name, (state, why) in _node_states(sinfo)
        if _LOST.fullmatch(state) or state.startswith(unusable_states)
    }


def _node_states(sinfo: str) -> Iterable[tuple[str, tuple[str, str]]]:
    for line in sinfo.splitlines():
        name, _, details = line.strip().partition("|")
        state, _, reason = details.partition("|")
        why = f"{state}, {reason.strip()}" if reason.strip() not in ("", "none") else state
        yield name, (state, why)


def _user(uid: int | None) -> str:
    if uid is None:
        return "another user"
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user id {uid})"
    except KeyError:
        return f"user id {uid}"


def _nodes(text: str) -> str:
    return "" if text.lower().startswith(("(null", "none")) else text


def _reason(text: str) -> str:
    return "" if text.strip() == "None" else text.strip()


def _exit_code(text: str) -> int | None:
    # sacct prints CODE:SIGNAL.
    code, signal = (whole_number(part, 3) for part in text.partition(":")[::2])
    if code is None or signal is None:
        return None
    return 128 + signal if signal else code
