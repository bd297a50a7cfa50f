"""Job: the interface between an engine and a launcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.hardware import Cluster

RUN_FOLDER = "{folder}"
"""Placeholder for the path of the run folder in a BatchScript, because a job does not know it."""


@dataclass(frozen=True)
class BatchScript:
    """A batch script that comes with a framework and is submitted to Slurm unchanged.

    The script receives the variables of the job. RUN_FOLDER stands for the run folder in the
    variables and in the fields below.
    """

    script: str
    """Path of the script, relative to `folder` if it is in that folder."""
    folder: str = RUN_FOLDER
    """Working directory for sbatch, as the script expects it."""
    options: tuple[str, ...] = ()
    """Options of sbatch before the name of the script, such as `-N 2`."""
    submits: bool = False
    """True if the script runs locally, submits the job with its own tool and prints the job's
    number. It receives the sbatch options as arguments."""


COLLECTIVE_LIMIT = "PACELINE_COLLECTIVE_LIMIT_S"
"""Environment variable that passes `collective_limit_s` of a job to the native trainer."""


@dataclass(frozen=True)
class Job:
    """A distributed program, defined by an engine and started by a launcher.

    The working directory is the run folder, so paths in `program` are relative to it. The launcher
    is responsible for rendezvous.
    """

    name: str
    python: str
    """Python interpreter on the machine that runs the program."""
    program: tuple[str, ...]
    """Python file and its arguments, run once per rank."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Text files to write into the run folder before the start, by relative path."""
    nodes: int = 1
    devices_per_node: int = 1
    launches_once: bool = False
    """True if the program is started once per node and starts the ranks of its devices itself."""
    timeout_s: float | None = None
    collective_limit_s: float = 300.0
    """Maximum time in seconds that a rank waits for others in a collective."""
    batch: BatchScript | None = None
    """Batch script that Slurm submits instead of `program`."""
    logs: tuple[str, ...] = ()
    """Patterns of files with the log of the whole job, if it is not in logs/rank-*.log."""
    cluster: Cluster | None = None
    """Hosts and site settings for launchers that need them; None for this machine."""
    sampled: bool = False
    """True if every node samples power and energy during the job. On this machine, `flow` samples
    them."""

    @property
    def ranks_per_node(self) -> int:
        """Number of processes that a launcher starts per node."""
        return 1 if self.launches_once else self.devices_per_node
