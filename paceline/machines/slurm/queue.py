"""One question to Slurm for all jobs of this process, at growing intervals."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from paceline.machines.slurm import client
from paceline.machines.slurm.states import JobState, merged

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
        states = client.states(open_jobs) if open_jobs else {}
        self._asked_at, self.questions = time.monotonic(), self.questions + 1
        if states is None:
            self.silent_since = self.silent_since or self._asked_at
            return
        self.silent_since = None
        over = [job for job in open_jobs if job not in states or states[job].ended]
        rows = client.accounts(over) if over else {}
        changed = False
        for job in open_jobs:
            row = rows.get(job)
            if job in states or (row and row.ended):
                self._missing.pop(job, None)
            else:
                self._missing.setdefault(job, self._asked_at)
            state = merged(states.get(job), row) or self._states[job]
            changed = changed or state != self._states[job]
            self._states[job] = state
        grown_s = min(self._interval_s * GROWTH, self.longest_s)
        self._interval_s = FIRST_S if changed else grown_s


QUEUE = Queue()
"""The one that all runs of this process share."""
