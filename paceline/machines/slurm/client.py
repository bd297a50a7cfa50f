"""Slurm's commands, each of words and never a line for a shell; one question for all jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host, expand
from paceline.core.job import Job
from paceline.core.secrets import SECRET_NAME
from paceline.machines.node.script import secret_variables
from paceline.machines.slurm.states import (
    SACCT_FORM,
    SQUEUE_FORM,
    JobState,
    merged,
    parse_sacct,
    parse_squeue,
)

LIMIT_S = 60.0
"""How long a command may take; a busy controller needs many seconds."""
OWN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_")
"""Variables that give Slurm's commands other options than those that are written down."""
NO_SUCH_JOB = "Invalid job id"
"""What Slurm's commands say of a number that they do not know (any more)."""
SUBMIT_LIMIT_S = 600.0
"""How long somebody else's tool may take that submits a job."""
QUEUE_LIMIT_S = 20.0
"""How long squeue may take, which all runs of this process wait for."""
_SETTINGS: dict[str, dict[str, str]] = {}
"""What each cluster says of itself, by its SLURM_CONF."""
PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")


class UnknownJobError(SystemFaultError):
    """Slurm does not know the job (any more)."""


def ask(words: Sequence[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run one command; raises SystemFaultError where there is none or it does not answer."""
    return _run(words, environment({}), None, limit_s)


def sbatch(job: Job, folder: Path, script: str, options: Sequence[str] = ()) -> str:
    """Submit a script of `folder`, or run the one that submits somebody else's; the job's number.

    Variables that look like secrets travel in this command's environment, never in the script or
    the arguments. Raises SystemFaultError with Slurm's own words when it refuses.
    """
    own = ["sbatch", "--parsable", *options, script]
    words = ["bash", script, *options] if job.batch else own
    tool = job.batch.script if job.batch and job.batch.submits else None
    try:
        limit_s = SUBMIT_LIMIT_S if tool else LIMIT_S
        done = _run(words, environment(job.env), folder, limit_s)
    except SystemFaultError as fault:
        if isinstance(fault.__cause__, subprocess.TimeoutExpired):
            what = f"{fault.what}, and may have queued the job all the same"
            raise SystemFaultError(tool or "sbatch", what, remedy="see `squeue --me`") from fault
        raise
    number = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode or not number[0]:
        what = "no job was queued" if tool else "Slurm refused the job"
        raise SystemFaultError(tool or "sbatch", f"{what}: {_error_text(done.stderr)}")
    return number[0].partition(";")[0]


def scancel(job: str) -> bool:
    """Ask Slurm to end a job; False where it does not take the order, as for one that has ended."""
    return ask(["scancel", job]).returncode == 0


def states(jobs: Iterable[str]) -> dict[str, JobState] | None:
    """What the queue says of these jobs, ended ones it still remembers among them.

    None when Slurm does not answer; a job that it does not know is left out.
    """
    words = ["squeue", "-h", "-r", "-t", "all", "-o", SQUEUE_FORM, "-j", ",".join(jobs)]
    try:
        done = ask(words, QUEUE_LIMIT_S)
    except SystemFaultError:
        return None
    if done.returncode and NO_SUCH_JOB not in done.stderr:
        return None
    return parse_squeue(done.stdout)


def accounts(jobs: Iterable[str]) -> dict[str, JobState]:
    """What accounting says of these jobs; none where a site keeps none, or not yet."""
    if not has_accounting():
        return {}
    try:
        return parse_sacct(ask(["sacct", "-nXP", "-o", SACCT_FORM, "-j", ",".join(jobs)]).stdout)
    except SystemFaultError:
        return {}


def node_states(hosts: Sequence[str]) -> str:
    """Lines `NAME|STATE|REASON` of these nodes."""
    return ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N|%T|%E"]).stdout


def settings() -> Mapping[str, str]:
    """What `scontrol show config` says, by name; empty while Slurm does not answer."""
    values = _SETTINGS.setdefault(os.environ.get("SLURM_CONF", ""), {})
    if not values:
        with contextlib.suppress(SystemFaultError):
            lines = ask(["scontrol", "show", "config"]).stdout.splitlines()
            pairs = (line.partition("=") for line in lines)
            values |= {name.strip(): value.strip() for name, equals, value in pairs if equals}
    return values


def answers() -> bool:
    """Whether Slurm's commands are here and a controller answers them."""
    if shutil.which("sbatch") is None:
        return False
    try:
        return " is UP" in ask(["scontrol", "ping"], QUEUE_LIMIT_S).stdout
    except SystemFaultError:
        return False


def has_accounting() -> bool:
    """Whether Slurm keeps a database of jobs, as far as is known."""
    return not settings().get("AccountingStorageType", "").endswith(("none", "(null)"))


def stores_environment() -> bool:
    """Whether Slurm writes the environment of jobs into its database."""
    return "job_env" in settings().get("AccountingStoreFlags", "")


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


def _answer(words: Sequence[str]) -> str:
    """What a command of Slurm prints; raises SystemFaultError where it is missing or fails."""
    done = ask(words, QUEUE_LIMIT_S)
    if done.returncode:
        messages = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        unknown = NO_SUCH_JOB in done.stderr
        raise (UnknownJobError if unknown else SystemFaultError)(words[0], messages[0])
    return done.stdout


def needs_pyxis(job: Job) -> None:
    """Raise UserError when the job asks for a container and srun knows none."""
    image = job.cluster and job.cluster.slurm.container_image
    if image and "--container-image" not in ask(["srun", "--help"]).stdout:
        raise UserError(
            "cluster.slurm.container_image",
            "needs the Pyxis plugin, which this Slurm has not",
            remedy="leave it out, or ask the site for Pyxis and Enroot",
        )


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables for one of Slurm's commands, with the secrets of `extra`.

    Left out are secrets that the run does not name, and what would change the command's options:
    to sbatch a variable counts more than the #SBATCH line that is shown and stored.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not (name.startswith(OWN) or SECRET_NAME.search(name))
    }
    return {**kept, **secret_variables(dict(extra))}


def _run(
    words: Sequence[str], env: Mapping[str, str], folder: Path | None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise SystemFaultError(
            words[0], "is not on this machine", remedy="start Paceline where Slurm's commands are"
        )
    try:
        return subprocess.run(
            words,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(words[0], f"gave no answer for {limit_s:.0f} s") from error
    except OSError as error:
        raise SystemFaultError(words[0], f"cannot be started: {error.strerror}") from error


def _error_text(text: str) -> str:
    lines = [
        re.sub(r"^\w+: (error|fatal): ", "", line) for line in text.splitlines() if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines))[:500] or "without a word"


FIRST_S, LONGEST_S, GROWTH = 0.5, 10.0, 1.4
"""Seconds between two questions: at first, at most, and their growth while nothing changes."""
AT_LEAST_S = 0.25
"""Between two questions of which the second one is urgent."""


@dataclass
class Queue:
    """What Slurm last said of the jobs that are watched; any thread may ask."""

    longest_s: float = LONGEST_S
    questions: int = 0
    silent_since: float | None = None
    """Since when Slurm has not answered, by time.monotonic()."""
    _states: dict[str, JobState | None] = field(default_factory=dict[str, JobState | None])
    _missing: dict[str, float] = field(default_factory=dict[str, float])
    """Since when Slurm has answered without a job that it had known."""
    _asked_at: float = -1e9
    _interval_s: float = FIRST_S
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def watch(self, job: str) -> None:
        """Ask about this job too, soon; an earlier one of its number is forgotten."""
        with self._lock:
            self._states[job] = None
            self._missing.pop(job, None)
            self._interval_s = FIRST_S

    def forget(self, job: str) -> None:
        """Ask about this job no more."""
        with self._lock:
            self._states.pop(job, None)

    def state(self, job: str, urgent: bool = False) -> JobState | None:
        """What is known of a job; None while Slurm has not said anything of it.

        `urgent` asks now, if the last question is not just over.
        """
        with self._lock:
            self._states.setdefault(job, None)
            due_s = AT_LEAST_S if urgent else self._interval_s
            if time.monotonic() - self._asked_at >= due_s:
                self._ask()
            return self._states[job]

    def missing_s(self, job: str) -> float:
        """For how long neither queue nor accounting have known of a job whose end nobody told."""
        since = self._missing.get(job)
        return 0.0 if since is None else time.monotonic() - since

    def _ask(self) -> None:
        open_jobs = [job for job, state in self._states.items() if not (state and state.ended)]
        known = states(open_jobs) if open_jobs else {}
        self._asked_at, self.questions = time.monotonic(), self.questions + 1
        if known is None:
            self.silent_since = self.silent_since or self._asked_at
            return
        self.silent_since = None
        over = [job for job in open_jobs if job not in known or known[job].ended]
        rows = accounts(over) if over else {}
        changed = False
        for job in open_jobs:
            row = rows.get(job)
            if job in known or (row and row.ended):
                self._missing.pop(job, None)
            else:
                self._missing.setdefault(job, self._asked_at)
            state = merged(known.get(job), row) or self._states[job]
            changed = changed or state != self._states[job]
            self._states[job] = state
        grown_s = min(self._interval_s * GROWTH, self.longest_s)
        self._interval_s = FIRST_S if changed else grown_s


QUEUE = Queue()
"""The one that all runs of this process share."""
