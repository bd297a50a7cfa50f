"""Runner of concurrent tasks: order, Ctrl-C, lost hosts, the allocation's end, Slurm's queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import ClassVar, Generic, Protocol, TypeVar

from paceline.compare.over_time.repeats import has_figure
from paceline.core.errors import PacelineError, SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.result import Result
from paceline.core.run_report import RunReport
from paceline.files.run_folder import Repeat, Trial
from paceline.machines.slurm import ArraySubmitter, Submit
from paceline.runs import flow
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import (
    MAX_SLOTS,
    JobSlot,
    LostSlots,
    TaskOutcome,
    allocation_fault,
    is_lost,
    numbered_slots,
    why_ended,
)

Task = TypeVar("Task")
Kept = TypeVar("Kept")
AnyTask = TypeVar("AnyTask", contravariant=True)
AnyKept = TypeVar("AnyKept", contravariant=True)


@dataclass(frozen=True)
class TaskRun:
    """Task planned as a run on its slot, with the group, repeat or trial passed to flow.run."""

    plan: Plan
    group: str | None = None
    repeat: Repeat | None = None
    trial: Trial | None = None
    probe: bool = False


class Observer(Protocol[AnyTask, AnyKept]):
    """Observer of the progress of tasks; its methods may be called from several threads."""

    def running(self, task: AnyTask, plan: Plan) -> AbstractContextManager[flow.Watcher]:
        """Return a context with the watcher for one task's run."""
        ...

    def task_ended(self, task: AnyTask, outcome: AnyKept, /) -> None:
        """Handle the end of a task, with its stored outcome."""
        ...

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """Handle a lost host of a slot.

        The slot is not used again if `for_good`; otherwise the same task is retried on it.
        """
        ...


class TaskQueue(Generic[Task]):
    """Ordered tasks for any free slot; tasks that are no longer `missing` are skipped."""

    def __init__(
        self, tasks: Iterable[Task], missing: Callable[[Task], bool] = lambda _: True
    ) -> None:
        self._tasks, self._missing = list(tasks), missing

    def take(self, slot: JobSlot) -> Task | None:
        """Return the next task for a slot; None if there is none."""
        while self._tasks:
            task = self._tasks.pop(0)
            if self._missing(task):
                return task
        return None

    def put_back(self, slot: JobSlot, task: Task) -> None:
        """Put a task that a lost host interrupted back at the front."""
        self._tasks.insert(0, task)

    def share_out(self, slots: Sequence[JobSlot]) -> bool:
        """Give the remaining tasks of lost slots to these; return whether any task remains."""
        return any(map(self._missing, self._tasks))


@dataclass
class TaskRunner(ABC, Generic[Task, Kept]):
    """Runner of tasks, one at a time per slot; subclasses define the kind of task."""

    observer: Observer[Task, Kept]
    root: Path
    command: list[str]
    tag: str | None = None
    slots: Sequence[JobSlot] = (JobSlot(1),)
    stop: Event = field(default_factory=Event)
    """Event that stops running tasks and starts no more."""
    stop_reason: str | None = None
    """Reason why no more tasks run, if `stop` was not the cause."""
    lost_slots: LostSlots = field(init=False)
    faults: ClassVar[type[PacelineError]] = SystemFaultError
    """Exceptions that end only the task that could not start."""
    _lock: Lock = field(default_factory=Lock)

    @abstractmethod
    def run_of(self, task: Task, slot: JobSlot) -> TaskRun:
        """Return the task as a run on a slot, planned just before it starts."""

    @abstractmethod
    def keep(self, task: Task, outcome: TaskOutcome, moved: bool) -> Kept | None:
        """Record how a task ended, or that it is retried after a lost host.

        Returns the value for the observer; None if there is nothing to report.
        """

    def task_cancelled(self, task: Task, result: Result | None) -> None:
        """Record a task that the user cancelled; without a result its run had not started."""
        return

    def cluster(self, task: Task) -> Cluster | None:
        """Return the cluster to check for lost hosts if a run has no figure; None to skip it."""
        return None

    def key(self, task: Task) -> Hashable:
        """Return the key of the tasks that may be moved only once when a host is lost."""
        return task

    def run_tasks(
        self, tasks: TaskQueue[Task], arrays: Path | None = None, at_once: int | None = None
    ) -> bool:
        """Run all tasks on the slots; return whether the user interrupted them.

        With `arrays` they are submitted as Slurm job arrays, whose script is written to that
        folder; `at_once` tasks of an array may run at the same time. KeyboardInterrupt stops
        running tasks cleanly. So do the loss of all slots and the end of the allocation, which
        are reported in `stop_reason`. An exception that is not one of `faults` also stops them, and
        is raised again when all have ended.
        """
        self.lost_slots = LostSlots(self.slots)
        try:
            return self._in_arrays(tasks, arrays, at_once) if arrays else self._on_slots(tasks)
        except KeyboardInterrupt:
            self.stop.set()
            return True

    def _on_slots(self, tasks: TaskQueue[Task]) -> bool:
        interrupted, work = False, partial(self._work, tasks)
        while (
            not self.stop.is_set()
            and (usable := self.lost_slots.usable)
            and tasks.share_out(usable)
        ):
            if len(usable) == 1:
                work(usable[0])
            else:
                interrupted = side_by_side(usable, self.stop, work)
        self.stop_reason = self.stop_reason or self.lost_slots.stop_reason
        return interrupted

    def _work(self, tasks: TaskQueue[Task], slot: JobSlot) -> None:
        """Run tasks in order until none is left for the slot or the slot loses a host."""
        while not self.stop.is_set() and slot not in self.lost_slots.reasons:
            with self._lock:
                task = tasks.take(slot)
            if task is None:
                return
            self._run(tasks, task, slot)

    def _in_arrays(self, tasks: TaskQueue[Task], folder: Path, at_once: int | None) -> bool:
        """Submit up to MAX_SLOTS tasks at a time, each followed by its own thread."""
        interrupted = False
        while not self.stop.is_set():
            assignments = [(slot, tasks.take(slot)) for slot in numbered_slots(MAX_SLOTS)]
            batch = {slot: task for slot, task in assignments if task is not None}
            if not batch:
                break
            jobs = ArraySubmitter(len(batch), folder, at_once, is_stopped=self.stop.is_set)
            interrupted = side_by_side(
                [*batch], self.stop, partial(self._follow, tasks, batch, jobs)
            )
        return interrupted

    def _follow(
        self,
        tasks: TaskQueue[Task],
        batch: dict[JobSlot, Task],
        jobs: ArraySubmitter,
        slot: JobSlot,
    ) -> None:
        with jobs.submitter() as submit:
            self._run(tasks, batch[slot], slot, submit)

    def _run(
        self, tasks: TaskQueue[Task], task: Task, slot: JobSlot, submit: Submit | None = None
    ) -> None:
        """Run a task and record how it ended; a task ended by `stop` is cancelled."""
        try:
            result = self._result(task, slot, submit)
        except flow.CancelledRunError as cancelled:
            self._cancel(task, cancelled.report.result)
        except KeyboardInterrupt:
            self._cancel(task, None)
        except self.faults as fault:
            self._note(tasks, task, slot, fault)
        else:
            self._note(tasks, task, slot, result)

    def _cancel(self, task: Task, result: Result | None) -> None:
        with self._lock:
            self.task_cancelled(task, result)
        if not self.stop.is_set():
            raise KeyboardInterrupt

    def _result(self, task: Task, slot: JobSlot, submit: Submit | None) -> Result:
        """Return the result of a task's run, even if its report cannot be written."""
        run = self.run_of(task, slot)
        try:
            with self.observer.running(task, run.plan) as watch:
                return self.report_of(task, run, watch, submit).result
        except flow.UnwrittenReportError as fault:
            result = fault.report.result
            if result.status == "cancelled":
                raise flow.CancelledRunError(fault.report) from fault
            return result.model_copy(update={"warnings": (*result.warnings, str(fault))})

    def report_of(
        self, task: Task, run: TaskRun, watch: flow.Watcher, submit: Submit | None
    ) -> RunReport:
        """Run a task and return its report."""
        return flow.run(
            run.plan,
            self.root,
            self.command,
            watch,
            tag=self.tag,
            probe=run.probe,
            group=run.group,
            repeat=run.repeat,
            trial=run.trial,
            is_cancelled=self.stop.is_set,
            submit=submit,
        )

    def _note(
        self, tasks: TaskQueue[Task], task: Task, slot: JobSlot, outcome: TaskOutcome
    ) -> None:
        """Record how a task ended, and check whether a lost host was the cause."""
        why = why_ended(outcome)
        try:
            cluster = self._lost_cluster(task, slot, outcome)
        except KeyboardInterrupt:  # during a query of Slurm: record the ended task anyway
            self._keep(task, outcome, moved=False)
            raise
        retry = cluster is not None and self.lost_slots.note(slot, self.key(task), why)
        if retry:
            with self._lock:
                tasks.put_back(slot, task)
        self._keep(task, outcome, moved=retry)
        if cluster:
            lost_slot = replace(slot, hosts=slot.hosts or cluster.hosts)
            self.observer.slot_lost(lost_slot, why, slot in self.lost_slots.reasons)

    def _keep(self, task: Task, outcome: TaskOutcome, moved: bool) -> None:
        """Record an outcome and notify the observer, one task at a time."""
        with self._lock:
            record = self.keep(task, outcome, moved)
            if record is not None:
                self.observer.task_ended(task, record)

    def _lost_cluster(self, task: Task, slot: JobSlot, outcome: TaskOutcome) -> Cluster | None:
        """Return the cluster if the slot lost a host; stop all tasks if the allocation ended."""
        cluster = self.cluster(task)
        if cluster is None or (isinstance(outcome, Result) and has_figure(outcome)):
            return None
        if fault := allocation_fault(cluster):
            self.stop_reason = self.stop_reason or fault
            self.stop.set()
            return None
        return cluster if is_lost(slot, cluster, outcome, self.root) else None


def side_by_side(slots: Sequence[JobSlot], stop: Event, work: Callable[[JobSlot], None]) -> bool:
    """Call `work` on every slot, each in a thread; return whether the user interrupted it.

    Ctrl-C sets `stop`, which makes the threads end their runs. So does the first exception, which
    is raised again when all have ended.
    """
    interrupted = False
    with ThreadPoolExecutor(len(slots)) as pool:
        runs = [pool.submit(work, slot) for slot in slots]
        pending: set[Future[None]] = {*runs}
        while pending:
            try:
                finished, pending = wait(pending, return_when=FIRST_EXCEPTION)
                if any(run.exception() for run in finished):
                    stop.set()
            except KeyboardInterrupt:
                interrupted = True
                stop.set()
    for run in runs:
        run.result()
    return interrupted
