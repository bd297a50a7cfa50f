"""Client of Slurm's commands, which are run without a shell; one query covers all jobs."""

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
from paceline.core.secrets import has_secret_name
from paceline.files.programs import run_program
from paceline.machines.node.script import secret_variables
from paceline.machines.slurm.record import JOB_NUMBER
from paceline.machines.slurm.states import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    JobState,
    merged,
    parse_sacct,
    parse_squeue,
)

LIMIT_S = 60.0
"""Time limit of a command in seconds; a busy controller needs many seconds."""
OPTION_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_")
"""Prefixes of variables that would change the options of Slurm's commands."""
NO_SUCH_JOB = "Invalid job id"
"""Message of Slurm's commands for a job number that they do not know, or no longer know."""
SUBMIT_LIMIT_S = 600.0
"""Time limit in seconds of a foreign tool that submits a job."""
NUMBER_WIDTH, PATH_WIDTH = 20, 4096
"""Widths of squeue's columns for a job number and a path."""
QUEUE_LIMIT_S = 20.0
"""Time limit of squeue in seconds; all runs of this process wait for it."""
_SETTINGS: dict[str, dict[str, str]] = {}
"""Cached configuration of each cluster, by its SLURM_CONF."""
PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER")


class UnknownJobError(SystemFaultError):
    """Failure because Slurm does not know the job, or no longer knows it."""


def ask(words: Sequence[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run one command; raises SystemFaultError if it is missing or does not answer."""
    return _run(words, environment({}), None, limit_s)


def sbatch(job: Job, folder: Path, script: str, options: Sequence[str] = ()) -> str:
    """Submit a script of `folder` and return the job's number.

    For a foreign batch script, job.sh is run instead, which submits it. Variables that look like
    secrets are passed in the command's environment, never in the script or the arguments. Raises
    SystemFaultError with Slurm's own message if it refuses the job.
    """
    command = ["sbatch", "--parsable", *options, script]
    words = ["bash", script, *options] if job.batch else command
    tool = job.batch.script if job.batch and job.batch.submits else None
    try:
        limit_s = SUBMIT_LIMIT_S if tool else LIMIT_S
        result = _run(words, environment(job.env), folder, limit_s)
    except SystemFaultError as fault:
        if isinstance(fault.__cause__, subprocess.TimeoutExpired):
            what = f"{fault.what}, but may have queued the job"
            raise SystemFaultError(tool or "sbatch", what, remedy="check `squeue --me`") from fault
        raise
    number = result.stdout.strip().splitlines()[-1:] or [""]
    if result.returncode or not number[0]:
        what = "no job was queued" if tool else "Slurm refused the job"
        raise SystemFaultError(tool or "sbatch", f"{what}: {_error_text(result.stderr)}")
    # --parsable prints NUMBER or NUMBER;CLUSTER.
    first_word = number[0].partition(";")[0]
    if not JOB_NUMBER.fullmatch(first_word):
        what = f"printed {first_word[:100]!r} instead of a job number; it may have queued the job"
        raise SystemFaultError(tool or "sbatch", what, remedy="check `squeue --me`")
    return first_word


def scancel(job: str) -> bool:
    """Ask Slurm to end a job; return False if it refuses, as for a job that has ended.

    scancel takes other words for options and lists of jobs.
    """
    if not JOB_NUMBER.fullmatch(job):
        raise ValueError(f"{job!r} is not a job number")
    return ask(["scancel", job]).returncode == 0


def job_with_output(folder: Path) -> str | None:
    """Return the number of this user's job that writes its output in `folder`, None without one.

    Raises SystemFaultError if Slurm does not answer.
    """
    words = ["squeue", "-h", "--me", "-O", f"JobID:{NUMBER_WIDTH},STDOUT:{PATH_WIDTH}"]
    result = ask(words)
    if result.returncode:
        raise SystemFaultError("squeue", _error_text(result.stderr))
    for line in result.stdout.splitlines():
        number, output = line[:NUMBER_WIDTH].strip(), line[NUMBER_WIDTH:].strip()
        if Path(output).parent == folder and JOB_NUMBER.fullmatch(number):
            return number
    return None


def states(jobs: Iterable[str]) -> dict[str, JobState] | None:
    """Return the queue's states of these jobs, including ended ones that it still remembers.

    None if Slurm does not answer. Jobs that it does not know are left out.
    """
    # -r lists each task of an array, -t all includes jobs that have ended.
    words = ["squeue", "-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ",".join(jobs)]
    try:
        result = ask(words, QUEUE_LIMIT_S)
    except SystemFaultError:
        return None
    if result.returncode and NO_SUCH_JOB not in result.stderr:
        return None
    return parse_squeue(result.stdout)


def accounts(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return accounting's states of these jobs; empty if the site has none, or none yet."""
    if not has_accounting():
        return {}
    try:
        return parse_sacct(ask(["sacct", "-nXP", "-o", SACCT_FORMAT, "-j", ",".join(jobs)]).stdout)
    except SystemFaultError:
        return {}


def node_states(hosts: Sequence[str]) -> str:
    """Return lines `NAME|STATE|REASON` for these nodes."""
    return ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N|%T|%E"]).stdout


def settings() -> Mapping[str, str]:
    """Return the output of `scontrol show config` by name; empty while Slurm does not answer."""
    values = _SETTINGS.setdefault(os.environ.get("SLURM_CONF", ""), {})
    if not values:
        with contextlib.suppress(SystemFaultError):
            lines = ask(["scontrol", "show", "config"]).stdout.splitlines()
            pairs = (line.partition("=") for line in lines)
            values |= {name.strip(): value.strip() for name, equals, value in pairs if equals}
    return values


def answers() -> bool:
    """Return True if Slurm's commands are installed and a controller answers them."""
    if shutil.which("sbatch") is None:
        return False
    try:
        return " is UP" in ask(["scontrol", "ping"], QUEUE_LIMIT_S).stdout
    except SystemFaultError:
        return False


def has_accounting() -> bool:
    """Return False if Slurm is known to keep no database of jobs."""
    return not settings().get("AccountingStorageType", "").endswith(("none", "(null)"))


def stores_environment() -> bool:
    """Return True if Slurm stores the environment of jobs in its database."""
    return "job_env" in settings().get("AccountingStoreFlags", "")


def allocation_hosts(job: str) -> tuple[Host, ...]:
    """Return the hosts of a running Slurm job; raises UserError if it has none."""
    nodes = _answer(["squeue", "--noheader", "--jobs", job, "--states=running", "--format=%N"])
    names = expand(",".join(nodes.split()), f"job {job}")
    if not names:
        raise UserError(
            f"job {job}", "is not running, so it has no hosts", remedy="check `squeue --me`"
        )
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def partition_hosts(partition: str | None = None) -> tuple[Host, ...]:
    """Return the idle hosts of a partition, or of all partitions if none is given.

    Raises UserError if no host is idle.
    """
    if partition is not None and not PARTITION.fullmatch(partition):
        raise UserError("partition", f"{partition!r} is not a valid partition name")
    options = [f"--partition={partition}"] if partition else []
    listing = _answer(["sinfo", "--noheader", "--format=%t %N", *options])
    # sinfo's own --states=idle also lists drained nodes, and nodes that do not answer (`idle*`).
    lines = (line.split() for line in listing.splitlines())
    idle = [line[1] for line in lines if len(line) == 2 and line[0] == "idle"]
    names = expand(",".join(idle), "sinfo")
    if not names:
        raise UserError(
            f"partition {partition}" if partition else "sinfo",
            "has no idle node",
            remedy="check the nodes' states with `sinfo`",
        )
    return tuple(Host(name=name) for name in dict.fromkeys(names))


def _answer(words: Sequence[str]) -> str:
    """Return the output of a Slurm command.

    Raises SystemFaultError if the command is missing or fails.
    """
    result = ask(words, QUEUE_LIMIT_S)
    if result.returncode:
        messages = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        unknown = NO_SUCH_JOB in result.stderr
        raise (UnknownJobError if unknown else SystemFaultError)(words[0], messages[0])
    return result.stdout


def require_pyxis(job: Job) -> None:
    """Raise UserError if the job requests a container and srun does not support them."""
    image = job.cluster and job.cluster.slurm.container_image
    if image and "--container-image" not in ask(["srun", "--help"]).stdout:
        raise UserError(
            "cluster.slurm.container_image",
            "needs the Pyxis plugin, which this Slurm does not have",
            remedy="omit it, or ask your administrators for Pyxis and Enroot",
        )


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables for one of Slurm's commands, with the secrets of `extra`.

    Secrets that the run does not name are removed, and so are variables that would change the
    command's options: for sbatch a variable takes precedence over the #SBATCH line that is shown
    and stored.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES
        or not (name.startswith(OPTION_PREFIXES) or has_secret_name(name, value))
    }
    return {**variables, **secret_variables(dict(extra))}


def _run(
    words: Sequence[str], env: Mapping[str, str], folder: Path | None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise SystemFaultError(
            words[0], "is not installed on this machine", remedy="run Paceline on a login node"
        )
    try:
        return run_program(words, env=env, folder=folder, limit_s=limit_s)
    except subprocess.TimeoutExpired as error:
        raise SystemFaultError(words[0], f"did not answer within {limit_s:.0f} s") from error
    except OSError as error:
        raise SystemFaultError(words[0], f"cannot be started: {error.strerror}") from error


def _error_text(text: str) -> str:
    lines = [
        re.sub(r"^\w+: (error|fatal): ", "", line) for line in text.splitlines() if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines))[:500] or "no message"


INITIAL_INTERVAL_S, MAX_INTERVAL_S, GROWTH = 0.5, 10.0, 1.4
"""Interval between two queries in seconds: initial and maximum value, and growth factor while
nothing changes."""
MIN_INTERVAL_S = 0.25
"""Minimum interval in seconds before an urgent query."""


@dataclass
class Queue:
    """Last known states of the watched jobs. It can be used from any thread."""

    max_interval_s: float = MAX_INTERVAL_S
    num_queries: int = 0
    silent_since: float | None = None
    """Time since which Slurm has not answered, by time.monotonic()."""
    _states: dict[str, JobState | None] = field(default_factory=dict[str, JobState | None])
    _missing: dict[str, float] = field(default_factory=dict[str, float])
    """Time since which Slurm has answered without a job that it had known."""
    _asked_at: float = -1e9
    _interval_s: float = INITIAL_INTERVAL_S
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def watch(self, job: str) -> None:
        """Query this job too, starting soon; an earlier job of the same number is forgotten."""
        with self._lock:
            self._states[job] = None
            self._missing.pop(job, None)
            self._interval_s = INITIAL_INTERVAL_S

    def forget(self, job: str) -> None:
        """Stop querying this job."""
        with self._lock:
            self._states.pop(job, None)

    def state(self, job: str, urgent: bool = False) -> JobState | None:
        """Return the last known state of a job; None while Slurm has not reported it.

        `urgent` queries now, unless the last query was less than `AT_LEAST_S` ago.
        """
        with self._lock:
            self._states.setdefault(job, None)
            due_s = MIN_INTERVAL_S if urgent else self._interval_s
            if time.monotonic() - self._asked_at >= due_s:
                self._ask()
            return self._states[job]

    def missing_s(self, job: str) -> float:
        """Return the time in seconds since a job without a known end disappeared, else 0.

        The job has then disappeared from both queue and accounting.
        """
        since = self._missing.get(job)
        return 0.0 if since is None else time.monotonic() - since

    def _ask(self) -> None:
        open_jobs = [job for job, state in self._states.items() if not (state and state.ended)]
        current = states(open_jobs) if open_jobs else {}
        self._asked_at, self.num_queries = time.monotonic(), self.num_queries + 1
        if current is None:
            self.silent_since = self.silent_since or self._asked_at
            return
        self.silent_since = None
        # Accounting is queried only about jobs that have ended or left the queue.
        ended_jobs = [job for job in open_jobs if job not in current or current[job].ended]
        rows = accounts(ended_jobs) if ended_jobs else {}
        is_changed = False
        for job in open_jobs:
            row = rows.get(job)
            if job in current or (row and row.ended):
                self._missing.pop(job, None)
            else:
                self._missing.setdefault(job, self._asked_at)
            state = merged(current.get(job), row) or self._states[job]
            is_changed = is_changed or state != self._states[job]
            self._states[job] = state
        longer_s = min(self._interval_s * GROWTH, self.max_interval_s)
        self._interval_s = INITIAL_INTERVAL_S if is_changed else longer_s


QUEUE = Queue()
"""The queue that all runs of this process share."""
