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
from paceline.machines.slurm.record import JobMarkers, SlurmJournal, SlurmRecord, read_markers
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
CANCELLER_LIMIT_S = 3.0
"""Time in seconds to wait for accounting to report who cancelled a job."""
SILENT_S = 10.0
"""Time in seconds without an answer of Slurm after which the phase reports it."""
POLL_S = 0.5
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
    earlier: SlurmRecord | None = None
    """Record of the controller that submitted the job, if that was another process."""
    _journal: SlurmJournal = field(init=False)
    _restart: int = 0
    """Number of times that Slurm itself has restarted the job."""
    _started_at: float | None = None
    _last_answer_at: float = 0.0
    _stopped: bool = False
    _code: int = 0
    _wait_reason: str = ""
    """Last reason for which the job waited."""
    _last: JobState | None = None
    _verdict: JobEnd | None = None

    def __post_init__(self) -> None:
        if self.earlier is None:
            self._journal = SlurmJournal(self.folder)
            self._start_attempt()
            return
        self._journal = SlurmJournal(self.folder, self.earlier)
        self._restart = self._journal.last.restart
        self._watch_attempt()

    @property
    def record(self) -> SlurmRecord:
        """Attempts, excluded nodes and warnings so far, as in slurm.json."""
        return self._journal.record

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about restarted jobs and excluded nodes."""
        return self.record.warnings

    def warn(self, text: str) -> None:
        """Add a warning to the run's record."""
        self._journal.warn(text)

    @property
    def waiting(self) -> bool:
        """True while the job is in the queue, as far as Slurm has reported."""
        return self._started_at is None and (self._last is None or self._last.state in WAITING)

    @property
    def phase(self) -> str:
        """Reason why the job waits, or where it runs."""
        if self._silent_s > SILENT_S:
            return f"Slurm does not answer; job {self.id} keeps running"
        return self._last.phase if self._last else f"job {self.id} was submitted"

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed since its start; waiting does not count."""
        limit_s, started_at = self.job.timeout_s, self._started_at
        return (
            limit_s is not None
            and started_at is not None
            and time.monotonic() - started_at > limit_s
        )

    def poll(self) -> int | None:
        """Return the exit code if this attempt has ended, else None."""
        markers = read_markers(self.folder, self.id)
        script_code = markers.code if markers and markers.restart == self._restart else None
        state = self.queue.state(self.id, urgent=script_code is not None)
        self._update(state, markers)
        if self._is_requeued(state, markers):
            return self._end(JobState(self.id, REQUEUED, self._nodes()), 1)
        if state and state.never_starts:
            client.scancel(self.id)
            return self._end(state, 1)
        if state and state.ended:
            code = script_code if script_code is not None else state.exit_code
            return self._end(state, 0 if state.state == "COMPLETED" else code or 1)
        if script_code is not None and (script_code == 0 or self._is_forgotten(state)):
            return self._end(None, script_code)
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
            is_cancelling = False
            while time.monotonic() < deadline:
                is_cancelling = is_cancelling or client.scancel(self.id)
                state = self.queue.state(self.id, urgent=True)
                if state and state.ended:
                    return self._end(state, ENDED_BY_US)
                time.sleep(POLL_S)
        self.warn(f"Slurm did not confirm the end of job {self.id}; check `squeue -j {self.id}`")
        return ENDED_BY_US

    def sweep(self) -> None:
        """Do nothing, because Slurm ends the processes that a job has left behind."""

    def verdict(self) -> JobEnd | None:
        """Return what Slurm knows about the end of the latest attempt."""
        if self._verdict is None and self._code:
            unknown = JobEnd("failed", f"Slurm no longer knows job {self.id}")
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
            archive = self._journal.archive_output()
            self.warn(
                f"Slurm restarted job {self.id} (restart {self._restart + 1}); the output of the "
                f"previous start is in {archive}"
            )
            self._restart += 1
            self._start_attempt()
            return True
        lost_a_node = end.hosts or (self._last and self._last.state in NODE_LOST)
        has_fixed_hosts = cluster is not None and cluster.hosts
        return bool(lost_a_node) and not has_fixed_hosts and self._submit_again(end)

    def _give_up(self) -> None:
        """Cancel a job that Slurm would start once more."""
        if self._last and self._last.state == REQUEUED:
            with contextlib.suppress(SystemFaultError):
                client.scancel(self.id)

    def _submit_again(self, end: JobEnd) -> bool:
        self._journal.archive_output()
        excluded = self._journal.exclude(end.hosts, end.reason)
        site_exclude = self.job.cluster.slurm.exclude if self.job.cluster else ()
        exclude_list = ",".join(dict.fromkeys([*site_exclude, *excluded]))
        options = [f"--exclude={exclude_list}"] if exclude_list else []
        try:
            number = client.sbatch(self.job, self.folder, SCRIPT_FILE, options)
        except SystemFaultError as fault:
            self.warn(f"{end.reason}; no replacement job could be submitted: {fault}")
            return False
        without_nodes = f" without {', '.join(excluded)}" if excluded else ""
        self.warn(f"{end.reason}; job {number} replaces it{without_nodes}")
        self.queue.forget(self.id)
        self.id, self._restart = number, 0
        self._start_attempt()
        return True

    def _start_attempt(self) -> None:
        self._watch_attempt()
        self._journal.begin(self.id, self._restart)

    def _watch_attempt(self) -> None:
        self._started_at, self._last, self._verdict = None, None, None
        self._code, self._stopped, self._last_answer_at = 0, False, time.monotonic()
        self.queue.watch(self.id)

    def _update(self, state: JobState | None, markers: JobMarkers | None) -> None:
        if state is not None:
            self._last_answer_at, self._last = time.monotonic(), state
            self._wait_reason = state.reason if state.state in WAITING else self._wait_reason
        if self._started_at is not None or state is None or state.state in WAITING:
            return
        if self.job.batch:  # a foreign batch script writes no markers
            markers = JobMarkers(restart=self._restart, nodes=state.nodes)
        if markers and markers.restart == self._restart:
            self._started_at = time.monotonic()
            self._journal.note(nodes=markers.nodes, state="RUNNING")

    def _is_requeued(self, state: JobState | None, markers: JobMarkers | None) -> bool:
        """Return True if Slurm has requeued the job, or has already restarted it."""
        is_waiting = state is not None and state.state in WAITING
        is_restarted = markers is not None and markers.restart > self._restart
        return is_restarted or (is_waiting and self._started_at is not None)

    @property
    def _silent_s(self) -> float:
        since = self.queue.silent_since
        return 0.0 if since is None else time.monotonic() - since

    def _is_forgotten(self, state: JobState | None) -> bool:
        """Return True if Slurm has not answered, or not known the job, for too long."""
        unanswered_s = time.monotonic() - self._last_answer_at
        unknown_s = unanswered_s if state is None else self.queue.missing_s(self.id)
        return max(unknown_s, self._silent_s) > UNKNOWN_LIMIT_S

    def _end(self, state: JobState | None, code: int) -> int:
        self._last, self._code = state or self._last, code
        state_name = state.state if state else "COMPLETED" if code == 0 else "UNKNOWN"
        reason = (state.reason if state else "") or None
        self._journal.note(state=state_name, reason=reason, exit_code=code)
        if self.job.batch and self.job.batch.submits:
            keep_linked_logs(self.folder)
        return code

    def _find_verdict(self, last: JobState) -> JobEnd | None:
        if last.state == REQUEUED:
            return JobEnd("incomplete", f"Slurm requeued job {self.id}")
        may_be_lost = last.state in (*NODE_LOST, "FAILED") or self._stopped
        lost_hosts = self._lost_nodes() if may_be_lost else ()
        if self._stopped and not lost_hosts:
            return None
        if last.state == "CANCELLED" and last.cancelled_by is None:
            last = self._last = self._with_canceller(last)
            if last.cancelled_by is None and self._started_at is None:
                last = replace(last, reason=last.reason or self._wait_reason)
        return verdict_of(replace(last, nodes=self._nodes()), lost_hosts)

    def _lost_nodes(self) -> tuple[str, ...]:
        """Return nodes of this attempt that srun saw fail, or that Slurm has lost."""
        # In a foreign batch script, srun's messages go to the output of that script.
        outputs = (Path(LOGS_FOLDER, LAUNCHER_LOG), Path(f"slurm-{self.id}.log"))
        logs = (*(self.folder / path for path in outputs), *submitted_logs(self.folder))
        failed = [host for path in logs for host in failed_nodes(_tail(path))]
        hosts, lost_hosts = host_names(self._nodes()), set[str]()
        with contextlib.suppress(SystemFaultError):
            lost_hosts |= lost_nodes(client.node_states(hosts)).keys() if hosts else set()
        # Slurm's list of a job lacks the lost node if the job was first seen after the loss.
        return tuple(dict.fromkeys([*failed, *(host for host in hosts if host in lost_hosts)]))

    def _with_canceller(self, last: JobState) -> JobState:
        """Return the last state with the user who cancelled the job.

        Waits for accounting to have the job's row; without one `last` is returned.
        """
        deadline = time.monotonic() + CANCELLER_LIMIT_S
        while client.has_accounting() and time.monotonic() < deadline:
            row = client.accounts([self.id]).get(self.id)
            if row and row.ended:
                return merged(last, row) or row
            time.sleep(POLL_S)
        return last

    def _nodes(self) -> str:
        """Return the nodes on which the attempt started.

        Slurm removes a lost node from a job's list, so the recorded list takes precedence.
        """
        return self._journal.last.nodes or (self._last.nodes if self._last else "")


def _tail(path: Path) -> str:
    """Return the last lines of a log; empty if it does not exist."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")
    return ""
