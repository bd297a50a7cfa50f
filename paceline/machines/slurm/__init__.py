"""Launcher for Slurm: a queued job of its own, a step of an allocation, or jobs as one array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import Host
from paceline.core.job import Job
from paceline.files.documents import write_text
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import Handle, UnfitHost
from paceline.machines.node.script import prepare_node, secret_variables
from paceline.machines.slurm import client
from paceline.machines.slurm.batch import BatchRun
from paceline.machines.slurm.foreign import OUTPUT_PATTERN, prepare_foreign, submission_script
from paceline.machines.slurm.record import (
    JOB_NUMBER,
    SlurmAttempt,
    SlurmRecord,
    orphan_job,
    read_slurm_record,
    record_cancelled,
)
from paceline.machines.slurm.script import array_script, batch_options, batch_script, step_script
from paceline.machines.slurm.states import unusable_nodes
from paceline.machines.slurm.steps import submit_step

ARRAY_SCRIPT = "array.sh"


def allocation(job: Job) -> str | None:
    """Return the number of the allocation that the job is a step of.

    None if it is queued as a job of its own.
    """
    return job.cluster.slurm.allocation if job.cluster and not job.batch else None


def render(job: Job) -> str:
    """Return job.sh.

    Raises UserError for a setting that Slurm or bash could misread.
    """
    if job.batch:
        return submission_script(job, job.batch)
    number = allocation(job)
    return step_script(job, number) if number else batch_script(job)


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its scripts into the run folder.

    Raises UserError if the container plugin or the foreign batch script is missing, or if Slurm
    cannot handle the folder's name.
    """
    container = job.cluster and job.cluster.slurm.container_image and not job.batch
    check_folder(folder, container=bool(container))
    if job.batch:
        prepare_foreign(job, job.batch, folder)
        return
    client.require_pyxis(job)
    prepare_node(job, folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path, after: Sequence[str] = ()) -> Handle:
    """Start the script that `prepare` wrote, as a step if there is an allocation, else queued.

    `after` are numbers of jobs that must have succeeded before it starts. Raises SystemFaultError
    if Slurm refuses the job or a named host cannot be used.
    """
    if number := allocation(job):
        return submit_step(job, folder, number)
    require_usable_hosts(job)
    number = client.sbatch(job, folder, SCRIPT_FILE, dependency(after))
    run = BatchRun(job, folder, number, may_retry=job.batch is None)
    _warn_of_stored_secrets(run)
    return run


def submit_array(
    jobs: Sequence[Job],
    folders: Sequence[Path],
    place: Path,
    *,
    at_once: int | None = None,
    after: Sequence[str] = (),
) -> list[BatchRun]:
    """Start many prepared jobs of one kind as one array, whose script is written into `place`.

    `at_once` is the maximum number of tasks that run at the same time. Raises like `submit`, and
    UserError if the jobs request different resources from Slurm.
    """
    script = array_script(jobs, [str(folder.resolve()) for folder in folders], at_once)
    check_folder(place)
    write_text(place / ARRAY_SCRIPT, script)
    require_usable_hosts(jobs[0])
    number = client.sbatch(jobs[0], place, ARRAY_SCRIPT, dependency(after))
    runs = [
        BatchRun(job, folder, f"{number}_{task}", may_retry=False)
        for task, (job, folder) in enumerate(zip(jobs, folders, strict=True))
    ]
    for run in runs:
        _warn_of_stored_secrets(run)
    return runs


def attach(job: Job, folder: Path) -> BatchRun | None:
    """Return the job that a run without a controller has left in Slurm, to be followed to its end.

    None if the run has no job or its end is recorded. Raises SystemFaultError if Slurm does not
    answer, because a job may then be in its queue.
    """
    record = read_slurm_record(folder)
    if record is None:
        # The controller may have died after sbatch queued the job and before it recorded the job.
        outputs = [path.stem.removeprefix("slurm-") for path in folder.glob(OUTPUT_PATTERN)]
        numbers = [number for number in outputs if JOB_NUMBER.fullmatch(number)]
        number = numbers[0] if numbers else client.job_with_output(folder.resolve())
        if number is None:
            return None
        record = SlurmRecord(attempts=(SlurmAttempt(job=number),))
    if not record.attempts or record.attempts[-1].exit_code is not None:
        return None
    return BatchRun(job, folder, record.attempts[-1].job, may_retry=False, earlier=record)


def ended_code(folder: Path) -> int | None:
    """Return the exit code of a run's last job, if its end is recorded."""
    record = read_slurm_record(folder)
    return record.attempts[-1].exit_code if record and record.attempts else None


def cancel_orphan(folder: Path) -> str | None:
    """Cancel the queued job of a run whose controller has died; return its number, if any.

    Raises SystemFaultError if Slurm does not answer, because the job may then still run at the same
    time as its successor.
    """
    orphan = orphan_job(folder)
    if orphan is None or orphan.code is not None:
        return None
    if not client.scancel(orphan.job) and client.states([orphan.job]) is None:
        raise SystemFaultError(
            f"Slurm job {orphan.job}",
            "could not be cancelled and may still be running",
            remedy="try again when Slurm responds",
        )
    record_cancelled(folder)
    return orphan.job


def dependency(after: Sequence[str]) -> list[str]:
    """Return the options of sbatch for a job that waits until others have succeeded."""
    if not after:
        return []
    return [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]


def check_folder(folder: Path, container: bool = False) -> None:
    """Raise UserError if the folder's path contains characters that Slurm interprets."""
    path = str(folder.resolve())
    forbidden = [c for c in ("%", "\\", *(":," if container else "")) if c in path]
    if forbidden or not path.isprintable():
        characters = " ".join(forbidden) or "a control character"
        raise UserError(
            repr(path),
            f"contains {characters}, which Slurm interprets",
            remedy="choose another folder with --runs-dir",
        )


def available_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the hosts of the allocation, else the idle hosts of the partition."""
    job = cluster.allocation
    return client.allocation_hosts(job) if job else client.partition_hosts(cluster.slurm.partition)


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Return the named hosts that are down or drained, each with the reason."""
    unusable = _unusable_hosts(cluster).items()
    return {host: UnfitHost(f"Slurm reports: {why}", reached=False) for host, why in unusable}


def _unusable_hosts(cluster: Cluster) -> dict[str, str]:
    if not cluster.hosts:
        return {}
    return unusable_nodes(client.node_states(cluster.hosts), bool(cluster.slurm.reservation))


def require_usable_hosts(job: Job) -> None:
    """Raise SystemFaultError naming hosts of the job that are down or drained."""
    if job.cluster and (unusable := _unusable_hosts(job.cluster)):
        reasons = "; ".join(f"{host} is {why}" for host, why in unusable.items())
        raise SystemFaultError("slurm", reasons, remedy="leave these hosts out", hosts=unusable)


def _warn_of_stored_secrets(run: BatchRun) -> None:
    names = sorted(secret_variables(run.job.env))
    if names and client.stores_environment():
        run.warn(
            "this Slurm stores the environment of jobs in its database (job_env), where its "
            f"administrators can read {', '.join(names)}"
        )


Submit = Callable[[Job, Path], Handle]
POLL_S = 0.2


@dataclass
class ArraySubmitter:
    """Collector of jobs that are submitted together as job arrays.

    It waits until every expected job was handed in or given up, then submits those handed in. Jobs
    that request different resources from Slurm become one array per kind.
    """

    expected: int
    folder: Path
    """Folder for the script of the arrays, of which Slurm keeps a copy of its own."""
    at_once: int | None = None
    """Maximum number of tasks of an array that run at the same time."""
    is_stopped: Callable[[], bool] = bool
    _handed_in: list[tuple[Job, Path]] = field(default_factory=list[tuple[Job, Path]])
    _runs: dict[Path, Handle] = field(default_factory=dict[Path, Handle])
    _fault: PacelineError | None = None
    _condition: Condition = field(default_factory=Condition)

    @contextmanager
    def submitter(self) -> Iterator[Submit]:
        """Yield a function that submits one job.

        If it was not called when the context ends, the other jobs stop waiting for this one.
        """
        handed_in = False

        def hand_in(job: Job, folder: Path) -> Handle:
            nonlocal handed_in
            if job.batch:  # a foreign batch script cannot be a task of an array
                return submit(job, folder)
            handed_in = True
            return self._submit(job, folder)

        try:
            yield hand_in
        finally:
            if not handed_in:
                with self._condition:
                    self.expected -= 1
                    self._submit_if_complete()

    def _submit(self, job: Job, folder: Path) -> Handle:
        with self._condition:
            self._handed_in.append((job, folder))
            self._submit_if_complete()
            while folder not in self._runs and self._fault is None:
                self._condition.wait(POLL_S)
                if self.is_stopped() and folder not in self._runs:
                    raise SystemFaultError(
                        "sbatch", "the sweep was stopped before the job was submitted"
                    )
        if folder not in self._runs and self._fault is not None:
            raise self._fault
        return self._runs[folder]  # submitted before another kind was refused

    def _submit_if_complete(self) -> None:
        """Submit the jobs if no other job is expected."""
        if self._runs or self._fault or not self._handed_in or len(self._handed_in) < self.expected:
            return
        kinds: dict[tuple[str, ...], list[tuple[Job, Path]]] = {}
        for job, folder in self._handed_in:
            kinds.setdefault(tuple(batch_options(job)[1:]), []).append((job, folder))
        try:
            for group in kinds.values():
                jobs, folders = [job for job, _ in group], [folder for _, folder in group]
                runs = submit_array(jobs, folders, self.folder, at_once=self.at_once)
                self._runs |= dict(zip(folders, runs, strict=True))
        except PacelineError as fault:
            self._fault = fault
        self._condition.notify_all()
