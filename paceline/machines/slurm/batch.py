"""Run that is a job of its own in Slurm's queue."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.core.job import Job
from paceline.files.documents import open_regular
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER, SCRIPT_FILE
from paceline.machines import Handle, JobEnd
from paceline.machines.slurm import client
from paceline.machines.slurm.client import QUEUE, Queue
from paceline.machines.slurm.foreign import keep_linked_logs, submitted_logs
from paceline.machines.slurm.record import Diary, Marks, SlurmRecord, read_marks
from paceline.machines.slurm.states import (
    NODE_LOST,
    WAITING,
    JobState,
    failed_nodes,
    host_names,
    lost_nodes,
    merged,
    verdict_of,
)

STOP_LIMIT_S = 90.0
"""Time in seconds that Slurm has to end a cancelled job (its KillWait, then the epilogue)."""
UNKNOWN_LIMIT_S = 60.0
"""Time in seconds for which Slurm may not know a job, or not answer, before the end written by
job.sh is accepted."""
WHO_LIMIT_S = 3.0
"""Time in seconds to wait for accounting to report who cancelled a job."""
SILENT_S = 10.0
"""Time in seconds without an answer of Slurm after which the phase reports it."""
LOOK_S = 0.5
TAIL_BYTES = 65_536
"""Bytes read from the end of a log in which srun may have reported lost nodes."""
ENDED_BY_US = 143
"""Exit code of a cancelled job, as in a shell: 128 + SIGTERM."""
REQUEUED = "REQUEUED"


@dataclass
class BatchRun(Handle):
    """A submitted job, and the jobs that replaced it after a node was lost."""

    job: Job
    folder: Path
    id: str
    may_retry: bool = True
    queue: Queue = field(default_factory=lambda: QUEUE)
    _diary: Diary = field(init=False)
    _restart: int = 0
    """Number of times that Slurm itself has restarted the job."""
    _begun_at: float | None = None
    _heard_at: float = 0.0
    _stopped: bool = False
    _code: int = 0
    _waited_for: str = ""
    """Last reason for which the job waited."""
    _last: JobState | None = None
    _verdict: JobEnd | None = None

    def __post_init__(self) -> None:
        self._diary = Diary(self.folder)
        self._begin()

    @property
    def record(self) -> SlurmRecord:
        """Attempts, excluded nodes and warnings so far, as in slurm.json."""
        return self._diary.record

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about restarted jobs and excluded nodes."""
        return self.record.warnings

    def warn(self, text: str) -> None:
        """Add a warning to the run's record."""
        self._diary.warn(text)

    @property
    def waiting(self) -> bool:
        """True while the job is in the queue, as far as Slurm has reported."""
        return self._begun_at is None and (self._last is None or self._last.state in WAITING)

    @property
    def phase(self) -> str:
        """Reason why the job waits, or where it runs."""
        if self._silent_s > SILENT_S:
            return f"Slurm does not answer; job {self.id} goes on without it"
        return self._last.phase if self._last else f"job {self.id} was submitted"

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed since its start; waiting does not count."""
        limit_s, begun = self.job.timeout_s, self._begun_at
        return limit_s is not None and begun is not None and time.monotonic() - begun > limit_s

    def poll(self) -> int | None:
        """Return the exit code if this attempt has ended, else None."""
        marks = read_marks(self.folder, self.id)
        written = marks.code if marks and marks.restart == self._restart else None
        state = self.queue.state(self.id, urgent=written is not None)
        self._hear(state, marks)
        if self._put_back(state, marks):
            return self._end(JobState(self.id, REQUEUED, self._nodes()), 1)
        if state and state.hopeless:
            client.scancel(self.id)
            return self._end(state, 1)
        if state and state.ended:
            code = written if written is not None else state.exit_code
            return self._end(state, 0 if state.state == "COMPLETED" else code or 1)
        if written is not None and (written == 0 or self._is_forgotten(state)):
            return self._end(None, written)
        if self._is_forgotten(state) and not self._silent_s:
            self._last = None
            return self._end(None, 1)
        return None

    def stop(self) -> int:
        """Cancel the job, wait until it has ended, and return the exit code."""
        try:
            return self._cancel()
        except KeyboardInterrupt:  # a second interrupt must not prevent the cancellation
            with contextlib.suppress(SystemFaultError):
                client.scancel(self.id)
            raise

    def _cancel(self) -> int:
        if (code := self.poll()) is not None and self._last and self._last.ended:
            return code
        self._stopped = True
        deadline = time.monotonic() + STOP_LIMIT_S
        with contextlib.suppress(SystemFaultError):
            taken = False
            while time.monotonic() < deadline:
                taken = taken or client.scancel(self.id)
                state = self.queue.state(self.id, urgent=True)
                if state and state.ended:
                    return self._end(state, ENDED_BY_US)
                time.sleep(LOOK_S)
        self.warn(f"Slurm job {self.id} could not be seen to end: look with `squeue -j {self.id}`")
        return ENDED_BY_US

    def sweep(self) -> None:
        """Do nothing, because Slurm ends the processes that a job has left behind."""

    def verdict(self) -> JobEnd | None:
        """Return what Slurm knows about the end of the latest attempt."""
        if self._verdict is None and self._code:
            unknown = JobEnd("failed", f"Slurm knows nothing of job {self.id} any more")
            self._verdict = self._find_verdict(self._last) if self._last else unknown
        return self._verdict

    def restart(self) -> bool:
        """Continue with a job that Slurm requeued, or submit a new one without the lost nodes.

        Returns False if the attempt ended for another reason, or if `cluster.slurm.retries` is used
        up.
        """
        cluster, end = self.job.cluster, self.verdict()
        retries = cluster.slurm.retries if cluster else 0
        if end is None or not self.may_retry or len(self.record.attempts) > retries:
            self._give_up()
            return False
        if self._last and self._last.state == REQUEUED and not self._stopped:
            kept = self._diary.put_away()
            self.warn(
                f"Slurm started job {self.id} anew (restart {self._restart + 1}); what the start "
                f"before it wrote is in {kept}"
            )
            self._restart += 1
            self._begin()
            return True
        lost_a_node = end.hosts or (self._last and self._last.state in NODE_LOST)
        placed = cluster is not None and cluster.hosts
        return bool(lost_a_node) and not placed and self._submit_again(end)

    def _give_up(self) -> None:
        """Cancel a job that Slurm would start once more."""
        if self._last and self._last.state == REQUEUED:
            with contextlib.suppress(SystemFaultError):
                client.scancel(self.id)

    def _submit_again(self, end: JobEnd) -> bool:
        self._diary.put_away()
        excluded = self._diary.exclude(end.hosts, end.reason)
        named = self.job.cluster.slurm.exclude if self.job.cluster else ()
        without = ",".join(dict.fromkeys([*named, *excluded]))
        options = [f"--exclude={without}"] if without else []
        try:
            number = client.sbatch(self.job, self.folder, SCRIPT_FILE, options)
        except SystemFaultError as fault:
            self.warn(f"{end.reason}; no other job could take its place: {fault}")
            return False
        kept = f" without {', '.join(excluded)}" if excluded else ""
        self.warn(f"{end.reason}; job {number} was started in its place{kept}")
        self.queue.forget(self.id)
        self.id, self._restart = number, 0
        self._begin()
        return True

    def _begin(self) -> None:
        self._begun_at, self._last, self._verdict = None, None, None
        self._code, self._stopped, self._heard_at = 0, False, time.monotonic()
        self.queue.watch(self.id)
        self._diary.begin(self.id, self._restart)

    def _hear(self, state: JobState | None, marks: Marks | None) -> None:
        if state is not None:
            self._heard_at, self._last = time.monotonic(), state
            self._waited_for = state.reason if state.state in WAITING else self._waited_for
        if self._begun_at is not None or state is None or state.state in WAITING:
            return
        if self.job.batch:  # a foreign batch script writes no markers
            marks = Marks(restart=self._restart, nodes=state.nodes)
        if marks and marks.restart == self._restart:
            self._begun_at = time.monotonic()
            self._diary.note(nodes=marks.nodes, state="RUNNING")

    def _put_back(self, state: JobState | None, marks: Marks | None) -> bool:
        """Return True if Slurm has requeued the job, or has already restarted it."""
        waits = state is not None and state.state in WAITING
        again = marks is not None and marks.restart > self._restart
        return again or (waits and self._begun_at is not None)

    @property
    def _silent_s(self) -> float:
        since = self.queue.silent_since
        return 0.0 if since is None else time.monotonic() - since

    def _is_forgotten(self, state: JobState | None) -> bool:
        """Return True if Slurm has not answered, or not known the job, for too long."""
        unheard_s = time.monotonic() - self._heard_at
        unknown_s = unheard_s if state is None else self.queue.missing_s(self.id)
        return max(unknown_s, self._silent_s) > UNKNOWN_LIMIT_S

    def _end(self, state: JobState | None, code: int) -> int:
        self._last, self._code = state or self._last, code
        state_name = state.state if state else "COMPLETED" if code == 0 else "UNKNOWN"
        reason = (state.reason if state else "") or None
        self._diary.note(state=state_name, reason=reason, exit_code=code)
        if self.job.batch and self.job.batch.submits:
            keep_linked_logs(self.folder)
        return code

    def _find_verdict(self, last: JobState) -> JobEnd | None:
        if last.state == REQUEUED:
            return JobEnd("incomplete", f"Slurm put job {self.id} back into its queue")
        may_be_lost = last.state in (*NODE_LOST, "FAILED") or self._stopped
        lost = self._lost_nodes() if may_be_lost else ()
        if self._stopped and not lost:
            return None
        if last.state == "CANCELLED" and last.by is None:
            last = self._last = self._accounted(last)
            if last.by is None and self._begun_at is None:
                last = replace(last, reason=last.reason or self._waited_for)
        return verdict_of(replace(last, nodes=self._nodes()), lost)

    def _lost_nodes(self) -> tuple[str, ...]:
        """Return nodes of this attempt that srun saw fail, or that Slurm has lost."""
        # In a foreign batch script, srun's messages go to the output of that script.
        named = (Path(LOGS_FOLDER, LAUNCHER_LOG), Path(f"slurm-{self.id}.log"))
        logs = (*(self.folder / path for path in named), *submitted_logs(self.folder))
        failed = [host for path in logs for host in failed_nodes(_tail(path))]
        hosts, lost = host_names(self._nodes()), set[str]()
        with contextlib.suppress(SystemFaultError):
            lost |= lost_nodes(client.node_states(hosts)).keys() if hosts else set()
        # Slurm's list of a job lacks the lost node if the job was first seen after the loss.
        return tuple(dict.fromkeys([*failed, *(host for host in hosts if host in lost)]))

    def _accounted(self, last: JobState) -> JobState:
        """Return the last state with the user who cancelled the job.

        Waits for accounting to have the job's row; without one `last` is returned.
        """
        deadline = time.monotonic() + WHO_LIMIT_S
        while client.has_accounting() and time.monotonic() < deadline:
            row = client.accounts([self.id]).get(self.id)
            if row and row.ended:
                return merged(last, row) or row
            time.sleep(LOOK_S)
        return last

    def _nodes(self) -> str:
        """Return the nodes on which the attempt started.

        Slurm removes a lost node from a job's list, so the recorded list takes precedence.
        """
        return self._diary.last.nodes or (self._last.nodes if self._last else "")


def _tail(path: Path) -> str:
    """Return the last lines of a log; empty if it does not exist."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")
    return ""
