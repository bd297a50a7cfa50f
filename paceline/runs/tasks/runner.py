"""Runs tasks side by side: their order, Ctrl-C, lost hosts, the allocation's end, Slurm's queue."""

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
from paceline.files.run_folder import Repeat, Trial
from paceline.machines.slurm import Gathering, Submit
from paceline.runs import flow
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import (
    MOST_SLOTS,
    JobSlot,
    Losses,
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
    """A task as a run on its slot, and what the run is part of (as flow.run takes it)."""

    plan: Plan
    group: str | None = None
    repeat: Repeat | None = None
    trial: Trial | None = None
    probe: bool = False


class Observer(Protocol[AnyTask, AnyKept]):
    """Who is told how tasks go on; its functions may be called from several threads."""

    def running(self, task: AnyTask, plan: Plan) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one task's run, while it runs."""
        ...

    def ended(self, task: AnyTask, outcome: AnyKept, /) -> None:
        """A task has ended, with what is kept of it."""
        ...

    def lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """A host of this slot is lost: nothing more runs on it, or the same task once more."""
        ...


class TaskQueue(Generic[Task]):
    """Tasks in their order, for whichever slot is free; what is not `missing` now is skipped."""

    def __init__(
        self, tasks: Iterable[Task], missing: Callable[[Task], bool] = lambda _: True
    ) -> None:
        self._tasks, self._missing = list(tasks), missing

    def take(self, slot: JobSlot) -> Task | None:
        """The next task for a slot."""
        while self._tasks:
            task = self._tasks.pop(0)
            if self._missing(task):
                return task
        return None

    def put_back(self, slot: JobSlot, task: Task) -> None:
        """A task that a lost host of the slot broke off comes next again."""
        self._tasks.insert(0, task)

    def share_out(self, whole: Sequence[JobSlot]) -> bool:
        """Give what other slots have left to these; whether there is anything."""
        return any(map(self._missing, self._tasks))


@dataclass
class TaskRunner(ABC, Generic[Task, Kept]):
    """Tasks that go on, one at a time on each slot; what is special in them, subclasses say."""

    observer: Observer[Task, Kept]
    root: Path
    command: list[str]
    tag: str | None = None
    slots: Sequence[JobSlot] = (JobSlot(1),)
    stop: Event = field(default_factory=Event)
    """Ends what runs, and begins nothing more."""
    halted: str | None = None
    """Why nothing more is run although it was not stopped."""
    losses: Losses = field(init=False)
    faults: ClassVar[type[PacelineError]] = SystemFaultError
    """What ends a task that could not begin, and not all."""
    _lock: Lock = field(default_factory=Lock)

    @abstractmethod
    def run_of(self, task: Task, slot: JobSlot) -> TaskRun:
        """The task as a run on a slot, planned just before it begins."""

    @abstractmethod
    def keep(self, task: Task, outcome: TaskOutcome, moved: bool) -> Kept | None:
        """Note how a task ended, or that it is tried once more after a lost host broke it off.

        What the observer is told; None where that is nothing.
        """

    def cancelled(self, task: Task, result: Result | None) -> None:
        """Note a task that the user ended; without a result its run had not begun."""
        return

    def cluster(self, task: Task) -> Cluster | None:
        """Whose hosts and allocation a run without a figure may have lost; None asks for none."""
        return None

    def key(self, task: Task) -> Hashable:
        """What is moved once alone when hosts are lost under it."""
        return task

    def run_tasks(
        self, tasks: TaskQueue[Task], arrays: Path | None = None, at_once: int | None = None
    ) -> bool:
        """Run all tasks on the slots; whether the user has broken it off.

        With `arrays` they go into Slurm's queue as arrays, whose script is written to that folder;
        `at_once` of one may run at the same time. KeyboardInterrupt ends what runs cleanly. So do
        the loss of all slots and the end of the allocation, both told in `halted`, and an exception
        that is none of `faults`, which is raised again when all have ended.
        """
        self.losses = Losses(self.slots)
        try:
            return self._in_arrays(tasks, arrays, at_once) if arrays else self._on_slots(tasks)
        except KeyboardInterrupt:
            self.stop.set()
            return True

    def _on_slots(self, tasks: TaskQueue[Task]) -> bool:
        interrupted, work = False, partial(self._work, tasks)
        while not self.stop.is_set() and (whole := self.losses.whole) and tasks.share_out(whole):
            if len(whole) == 1:
                work(whole[0])
            else:
                interrupted = side_by_side(whole, self.stop, work)
        self.halted = self.halted or self.losses.halted
        return interrupted

    def _work(self, tasks: TaskQueue[Task], slot: JobSlot) -> None:
        """One task after the other, until none is left for the slot or a host of it is lost."""
        while not self.stop.is_set() and slot not in self.losses.lost:
            with self._lock:
                task = tasks.take(slot)
            if task is None:
                return
            self._run(tasks, task, slot)

    def _in_arrays(self, tasks: TaskQueue[Task], folder: Path, at_once: int | None) -> bool:
        """As many at once as there may be threads, each of which follows one task."""
        interrupted = False
        while not self.stop.is_set():
            taken = [(slot, tasks.take(slot)) for slot in numbered_slots(MOST_SLOTS)]
            batch = {slot: task for slot, task in taken if task is not None}
            if not batch:
                break
            jobs = Gathering(len(batch), folder, at_once, abandoned=self.stop.is_set)
            interrupted = side_by_side(
                [*batch], self.stop, partial(self._follow, tasks, batch, jobs)
            )
        return interrupted

    def _follow(
        self, tasks: TaskQueue[Task], batch: dict[JobSlot, Task], jobs: Gathering, slot: JobSlot
    ) -> None:
        with jobs.place_for_one() as submit:
            self._run(tasks, batch[slot], slot, submit)

    def _run(
        self, tasks: TaskQueue[Task], task: Task, slot: JobSlot, submit: Submit | None = None
    ) -> None:
        """Run a task and keep how it ended; what `stop` ended is over, as all others are."""
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
            self.cancelled(task, result)
        if not self.stop.is_set():
            raise KeyboardInterrupt

    def _result(self, task: Task, slot: JobSlot, submit: Submit | None) -> Result:
        """What a task's run measured, which counts although its report cannot be written."""
        run = self.run_of(task, slot)
        try:
            with self.observer.running(task, run.plan) as watch:
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
                ).result
        except flow.UnwrittenReportError as fault:
            result = fault.report.result
            if result.status == "cancelled":
                raise flow.CancelledRunError(fault.report) from fault
            return result.model_copy(update={"warnings": (*result.warnings, str(fault))})

    def _note(
        self, tasks: TaskQueue[Task], task: Task, slot: JobSlot, outcome: TaskOutcome
    ) -> None:
        """Keep how a task ended, and see whether a host was lost by which it did."""
        why = why_ended(outcome)
        try:
            cluster = self._lost_cluster(task, slot, outcome)
        except KeyboardInterrupt:  # while Slurm is asked: what has ended counts all the same
            self._keep(task, outcome, moved=False)
            raise
        again = cluster is not None and self.losses.note(slot, self.key(task), why)
        if again:
            with self._lock:
                tasks.put_back(slot, task)
        self._keep(task, outcome, moved=again)
        if cluster:
            lost_slot = replace(slot, hosts=slot.hosts or cluster.hosts)
            self.observer.lost(lost_slot, why, slot in self.losses.lost)

    def _keep(self, task: Task, outcome: TaskOutcome, moved: bool) -> None:
        """Keep an outcome and tell the observer, one task at a time."""
        with self._lock:
            kept = self.keep(task, outcome, moved)
            if kept is not None:
                self.observer.ended(task, kept)

    def _lost_cluster(self, task: Task, slot: JobSlot, outcome: TaskOutcome) -> Cluster | None:
        """The cluster of which a host of the slot is lost; the end of its allocation ends all."""
        cluster = self.cluster(task)
        if cluster is None or (isinstance(outcome, Result) and has_figure(outcome)):
            return None
        if fault := allocation_fault(cluster):
            self.halted = self.halted or fault
            self.stop.set()
            return None
        return cluster if is_lost(slot, cluster, outcome, self.root) else None


def side_by_side(slots: Sequence[JobSlot], stop: Event, work: Callable[[JobSlot], None]) -> bool:
    """Call `work` on every slot, each in a thread; whether the user has broken it off.

    Ctrl-C sets `stop`, by which the threads end their runs. So does the first exception, which is
    raised again when all have ended.
    """
    interrupted = False
    with ThreadPoolExecutor(len(slots)) as pool:
        runs = [pool.submit(work, slot) for slot in slots]
        pending: set[Future[None]] = {*runs}
        while pending:
            try:
                done, pending = wait(pending, return_when=FIRST_EXCEPTION)
                if any(run.exception() for run in done):
                    stop.set()
            except KeyboardInterrupt:
                interrupted = True
                stop.set()
    for run in runs:
        run.result()
    return interrupted
