"""Slurm: a job of its own in the queue, or a step of an allocation that exists already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.files.documents import write_text
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import Handle
from paceline.machines.node.script import prepare_node, secret_variables
from paceline.machines.slurm import client
from paceline.machines.slurm.batch import BatchRun
from paceline.machines.slurm.foreign import prepare_foreign, submission_script
from paceline.machines.slurm.record import left_job, note_abandoned
from paceline.machines.slurm.script import array_script, batch_script, step_script
from paceline.machines.slurm.states import unusable_nodes
from paceline.machines.slurm.steps import submit_step

ARRAY_SCRIPT = "array.sh"


def allocation(job: Job) -> str | None:
    """The number of the allocation that the job is a step of; None where it is queued by itself."""
    return job.cluster.slurm.allocation if job.cluster and not job.batch else None


def render(job: Job) -> str:
    """job.sh; raises UserError for a setting that Slurm or bash could read as something else."""
    if job.batch:
        return submission_script(job, job.batch)
    number = allocation(job)
    return step_script(job, number) if number else batch_script(job)


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its scripts into the run folder.

    Raises UserError when the container's plugin or the batch script of somebody else is missing, or
    Slurm cannot take the folder's name.
    """
    container = job.cluster and job.cluster.slurm.container_image and not job.batch
    check_folder(folder, container=bool(container))
    if job.batch:
        prepare_foreign(job, job.batch, folder)
        return
    client.needs_pyxis(job)
    prepare_node(job, folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path, after: Sequence[str] = ()) -> Handle:
    """Start the script that `prepare` wrote, as a step where there is an allocation, else queued.

    `after` are numbers of jobs that must have ended well before it begins. Raises SystemFaultError
    when Slurm refuses it or a host that it names cannot be used.
    """
    if number := allocation(job):
        return submit_step(job, folder, number)
    refuse_unusable_hosts(job)
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

    `at_once` is how many may run at the same time. Raises as `submit`, and UserError when the jobs
    ask Slurm for different things.
    """
    script = array_script(jobs, [str(folder.resolve()) for folder in folders], at_once)
    check_folder(place)
    write_text(place / ARRAY_SCRIPT, script)
    refuse_unusable_hosts(jobs[0])
    number = client.sbatch(jobs[0], place, ARRAY_SCRIPT, dependency(after))
    runs = [
        BatchRun(job, folder, f"{number}_{task}", may_retry=False)
        for task, (job, folder) in enumerate(zip(jobs, folders, strict=True))
    ]
    for run in runs:
        _warn_of_stored_secrets(run)
    return runs


def abandon(folder: Path) -> str | None:
    """Cancel the job that a run without its controller has left in the queue; its number, if any.

    Raises SystemFaultError when Slurm does not answer: the job may go on beside whatever comes
    next.
    """
    left = left_job(folder)
    if left is None or left.code is not None:
        return None
    if not client.scancel(left.job) and client.states([left.job]) is None:
        raise SystemFaultError(
            f"Slurm job {left.job}",
            "could not be cancelled, and may still run",
            remedy="try again when Slurm answers",
        )
    note_abandoned(folder)
    return left.job


def dependency(after: Sequence[str]) -> list[str]:
    """sbatch's options for a job that waits until others have ended well."""
    if not after:
        return []
    return [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]


def check_folder(folder: Path, container: bool = False) -> None:
    """Raise UserError when Slurm reads something else than a name in the folder's path."""
    path = str(folder.resolve())
    forbidden = [c for c in ("%", "\\", *(":," if container else "")) if c in path]
    if forbidden or not path.isprintable():
        shown = " ".join(forbidden) or "a control character"
        raise UserError(
            repr(path),
            f"holds {shown}, which Slurm reads as something else",
            remedy="give another place with --runs-dir",
        )


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Return the named hosts that are down or drained, each with the reason."""
    return {host: f"Slurm says: {why}" for host, why in _unusable_hosts(cluster).items()}


def _unusable_hosts(cluster: Cluster) -> dict[str, str]:
    if not cluster.hosts:
        return {}
    return unusable_nodes(client.node_states(cluster.hosts), bool(cluster.slurm.reservation))


def refuse_unusable_hosts(job: Job) -> None:
    """Raise SystemFaultError naming hosts of the job that are down or drained."""
    if job.cluster and (unusable := _unusable_hosts(job.cluster)):
        reasons = "; ".join(f"{host} is {why}" for host, why in unusable.items())
        raise SystemFaultError("slurm", reasons, remedy="leave these hosts out", hosts=unusable)


def _warn_of_stored_secrets(run: BatchRun) -> None:
    names = sorted(secret_variables(run.job.env))
    if names and client.stores_environment():
        run.warn(
            "this Slurm keeps the environment of jobs in its database (job_env), where its "
            f"administrators can read {', '.join(names)}"
        )
