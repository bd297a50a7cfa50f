"""Arguments of sbatch for third-party batch scripts, in the form of published benchmarks."""

from __future__ import annotations

from paceline.core.hardware import Cluster
from paceline.core.run import RunSpec
from paceline.core.training import DEFAULT_TIME_LIMIT_S


def needs_queue(spec: RunSpec) -> list[str]:
    """Return in a sentence why a batch script cannot be submitted for `spec`."""
    number = spec.cluster.allocation
    if not spec.cluster.capabilities.batch_scripts:
        return [f"engine {spec.engine} submits a batch script and needs Slurm (--launcher slurm)"]
    if number is not None:
        return [f"engine {spec.engine} submits a batch script and cannot use allocation {number}"]
    return []


def requested_limit_s(spec: RunSpec) -> float | None:
    """Return the requested time limit in seconds.

    Returns None for the default of recipes, so that the script's own limit applies.
    """
    return None if spec.time_limit_s == DEFAULT_TIME_LIMIT_S else spec.time_limit_s


def site_options(cluster: Cluster, *, gpus: bool) -> tuple[str, ...]:
    """Return the site's sbatch options, account and partition first, without nodes and time.

    `gpus` requests the GPUs of a node if `cluster.slurm.gres` is not set. Without `gpus`, the
    script's own #SBATCH lines decide.
    """
    options = cluster.slurm.options()
    options.pop("cpus-per-task", None)
    if gpus and cluster.slurm.gres is None and cluster.device != "cpu":
        options["gres"] = f"gpu:{cluster.devices_per_node}"
    if cluster.hosts:
        options["nodelist"] = ",".join(cluster.hosts)
    short = {"-A": options.pop("account", None), "-p": options.pop("partition", None)}
    return (
        *(word for option, value in short.items() if value for word in (option, value)),
        *(f"--{option}={value}" for option, value in options.items()),
    )
