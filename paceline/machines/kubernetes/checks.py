"""Contradictions in the Kubernetes settings of a cluster, found before anything is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.machines.kubernetes.manifest import (
    EFA_RESOURCE,
    RDMA_RESOURCE,
    ROOT,
    cluster_of,
    gpu_resource,
    requests,
)

UNUSABLE_FIELDS: Mapping[str, tuple[str, Sequence[str], str]] = {
    "trainjob": (
        "a TrainJob",
        ("priority_class", "host_network", "claims", "compute_domain", "gang", "scheduler"),
        "set it in the runtime, or use `kind: jobset`",
    ),
    "rayjob": ("a RayJob", ("gang", "results"), "omit it, or use `kind: jobset`"),
}
"""Kinds of workloads with the settings that they cannot follow, and the remedy."""


def require_consistent(job: Job) -> None:
    """Raise one UserError with every contradiction of the job's cluster, if there is any."""
    faults = [
        UserError(f"cluster.{where}", what, remedy=remedy) for where, what, remedy in _faults(job)
    ]
    if faults:
        first, *others = faults
        raise UserError(first.where, first.what, remedy=first.remedy, others=others)


def _faults(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield the setting, the problem and the remedy of each contradiction."""
    cluster = cluster_of(job)
    settings, env = cluster.kubernetes, job.env
    resources = requests(job)
    if not settings.image:
        yield "kubernetes.image", "is missing", "name an image with Python and the framework"
    if cluster.device != "cpu" and gpu_resource(cluster) is None:
        yield (
            "kubernetes.gpu_resource",
            f"is missing, and {cluster.device} has no default",
            "set the resource of its device plugin, such as habana.ai/gaudi",
        )
    has_efa, has_rdma = EFA_RESOURCE in resources, any(map(RDMA_RESOURCE.fullmatch, resources))
    if env.get("FI_PROVIDER") == "efa" and not has_efa:
        yield (
            "env",
            "FI_PROVIDER=efa, but no EFA interface is requested, so NCCL would use sockets",
            "set kubernetes.efa to the number of interfaces of a node, or omit FI_PROVIDER",
        )
    net = env.get("NCCL_NET")
    if has_efa and net in ("IB", "Socket", "gIB"):
        yield "env", f"NCCL_NET={net} does not use the EFA interfaces", "omit it"
    if net == "gIB" and not (settings.networks or settings.claims or settings.host_network):
        yield (
            "env",
            "NCCL_NET=gIB, but the pods have no network for it",
            "set kubernetes.networks or kubernetes.claims",
        )
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0") and has_rdma:
        names = ", ".join(name for name in resources if RDMA_RESOURCE.fullmatch(name))
        yield "env", f"NCCL_IB_DISABLE is set, but {names} is requested", "omit one of both"
    if settings.topology and not settings.queue:
        yield "kubernetes.topology", "needs Kueue", "set kubernetes.queue"
    if settings.topology and settings.gang:
        yield "kubernetes.topology", f"is for Kueue, not for {settings.gang}", "omit one of both"
    if settings.queue and settings.gang == "coscheduling":
        yield "kubernetes.queue", "has no effect on coscheduling", "omit queue or gang"
    if settings.compute_domain and gpu_resource(cluster) != "nvidia.com/gpu":
        yield "kubernetes.compute_domain", "needs NVIDIA GPUs", "omit it"
    if both := sorted({*cluster.hosts} & {*settings.exclude}):
        yield "kubernetes.exclude", f"lists {both[0]}, which is in hosts", "omit one of both"
    kind, fields, remedy = UNUSABLE_FIELDS.get(settings.kind, ("", (), ""))
    for name in fields:
        if getattr(settings, name):
            yield f"kubernetes.{name}", f"cannot be set by {kind}", remedy
    for path, source in settings.volumes.items():
        if path == "/dev/shm" or f"{path}/".startswith(f"{ROOT}/"):
            yield f"kubernetes.volumes: {path}", "is used by Paceline", "use another mount path"
        elif not source:
            yield f"kubernetes.volumes: {path}", "has no source", "name a claim or a folder"
