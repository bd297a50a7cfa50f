"""Progress of a scaling test on standard error: running and remaining sub-clusters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from paceline.cli.terminal import echo
from paceline.core.hosts import compress
from paceline.core.units import percent, pluralize, significant
from paceline.runs.flow import Progress, Watcher
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot
from paceline.scaling.campaigns.record import Group, PlannedRound
from paceline.scaling.campaigns.rounds import Remaining, SubCluster, SubClusterEnd

LINE_EVERY_S = 5.0
"""Interval of the lines about running sub-clusters."""
MAX_HOSTS_LISTED = 8


@dataclass
class CampaignDisplay:
    """Progress lines of a scaling test; called from the threads of all runs."""

    rounds: int
    _lock: Lock = field(default_factory=Lock)
    _steps: dict[Group, tuple[int, int]] = field(default_factory=dict["Group", tuple[int, int]])
    """Last step and number of steps of each running sub-cluster."""
    _last_line_s: float = 0.0

    def round_begins(
        self, round: PlannedRound, groups: Sequence[Group], remaining: Remaining
    ) -> None:
        """Print a line for the round and one for its hosts."""

        self.rounds = max(self.rounds, round.number)
        names = [compress(group) for group in groups[:MAX_HOSTS_LISTED]]
        more = (
            [f"and {len(groups) - MAX_HOSTS_LISTED} more"] if len(groups) > MAX_HOSTS_LISTED else []
        )
        why = "" if round.purpose == "plan" else f" ({round.purpose})"
        with self._lock:
            self._steps = dict.fromkeys(groups, (0, 0))
            size = f"{len(groups)} x {pluralize(round.nodes, 'node')} x {round.devices_per_node}"
            head = f"round {round.number} of {self.rounds}{why}: {size}"
            echo(f"{head} · {remaining_text(remaining)}", err=True)
            echo(f"  on {'  '.join([*names, *more])}", err=True)

    @contextmanager
    def running(self, task: SubCluster, plan: Plan) -> Iterator[Watcher]:
        """Record the step of a run, and print all of them from time to time."""

        def watch(progress: Progress) -> None:
            with self._lock:
                if progress.step is not None:
                    self._steps[task.hosts] = progress.step.index, progress.total_steps
                if time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                    self._last_line_s = time.monotonic()
                    self._print_running()

        yield watch

    def task_ended(self, task: SubCluster, outcome: SubClusterEnd) -> None:
        """Print a sub-cluster with its value or the cause of its failure."""

        result, remaining = outcome
        text = f"{result.status}: {result.reason}"
        if result.samples_per_s is not None:
            spread = f", steps ± {percent(result.spread)}" if result.spread is not None else ""
            text = f"{significant(result.samples_per_s, 4)} samples/s{spread}"
        with self._lock:
            self._steps.pop(result.hosts, None)
            echo(f"  {compress(result.hosts)}  {text} · {remaining_text(remaining)}", err=True)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """Print that a host is excluded."""
        with self._lock:
            echo(f"  {slot.name} is excluded from here on: {why}", err=True)

    def _print_running(self) -> None:
        steps = [step for step, _ in self._steps.values()]
        total = max((total for _, total in self._steps.values()), default=0)
        if steps and total:
            echo(
                f"  {len(steps)} running, at step {min(steps)} to {max(steps)} of {total}", err=True
            )


def remaining_text(remaining: Remaining) -> str:
    """Return e.g. `12 left in 5 rounds, about 3 min`."""
    rounds = pluralize(remaining.rounds, "round")
    if not remaining.trials:
        return "none left"
    return f"{remaining.trials} left in {rounds}{_about(remaining.seconds)}"


def _about(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {seconds:.0f} s"
    return (
        f", about {seconds / 60:.0f} min" if seconds < 5400 else f", about {seconds / 3600:.1f} h"
    )
