"""Job: all that an engine and a launcher share."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.hardware import Cluster

RUN_FOLDER = "{folder}"
"""In what a BatchScript is given: the run folder's path, which a job does not know."""


@dataclass(frozen=True)
class BatchScript:
    """A batch script of somebody else, which Slurm is given as it is.

    Its variables are the job's. RUN_FOLDER stands for the run folder in them and in what is below.
    """

    script: str
    """The file, relative to `folder` if it is there."""
    folder: str = RUN_FOLDER
    """Where sbatch is called, as the script expects."""
    options: tuple[str, ...] = ()
    """Words of sbatch before the script's name, such as `-N 2`."""
    submits: bool = False
    """Whether the script is run here, submits the job by a tool of its own and prints its number;
    it is given options of sbatch as arguments."""


COLLECTIVE_LIMIT = "PACELINE_COLLECTIVE_LIMIT_S"
"""The variable by which the native trainer learns a job's `collective_limit_s`."""


@dataclass(frozen=True)
class Job:
    """A distributed program: what an engine wants started, and what a launcher starts.

    Working directory is the run folder, so paths in `program` are relative to that. How ranks find
    each other is the launcher's matter.
    """

    name: str
    python: str
    """Interpreter on the machine that runs it."""
    program: tuple[str, ...]
    """Python file and its arguments, run once per rank."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Text files that must lie in the run folder before the start, by relative path."""
    nodes: int = 1
    devices_per_node: int = 1
    launches_once: bool = False
    """Whether the program is started once a node and starts the ranks of its devices itself."""
    timeout_s: float | None = None
    collective_limit_s: float = 300.0
    """How long a rank waits for others in a collective before it gives up."""
    batch: BatchScript | None = None
    """Submitted in place of `program`, by Slurm alone."""
    logs: tuple[str, ...] = ()
    """Patterns of the files that hold the whole job's log, where logs/rank-*.log do not."""
    cluster: Cluster | None = None
    """Hosts and site settings, for launchers that need them; None for this machine."""
    sampled: bool = False
    """Whether every node samples power and energy meanwhile; on this machine `flow` does it."""

    @property
    def ranks_per_node(self) -> int:
        """Processes that a launcher starts on a node."""
        return 1 if self.launches_once else self.devices_per_node
