"""Clusters of Kubernetes for tests: one for each kind of site."""

from __future__ import annotations

from typing import Any

from paceline.core.hardware import Cluster, KubernetesSettings
from paceline.core.job import Job

SITES: dict[str, dict[str, Any]] = {
    "plain-job": {"kind": "job", "cpus": 4, "memory": "8Gi"},
    "eks-jobset": {
        "namespace": "ml",
        "efa": 32,
        "queue": "gpu",
        "topology": "topology.k8s.aws/network-node-layer-1",
        "tolerations": ["nvidia.com/gpu:NoSchedule", "team=no", "spot"],
        "exclude": ["node-7", "node-9"],
        "volumes": {"/data": "training-data", "/lustre": "/mnt/lustre"},
        "results": "runs",
        "shm": "64Gi",
        "pull_secrets": ["ngc"],
    },
    "gke-jobset": {
        "networks": {"eth1": "gvnic-1", "eth2": "rdma-0"},
        "annotations": {"devices.gke.io/container.tcpxo-daemon": "on"},
        "priority_class": "high",
        "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"},
    },
    "dra-jobset": {"claims": {"rdma": "mrdma.google.com"}, "compute_domain": True},
    "bare-metal-volcano": {
        "resources": {"rdma/hca": 8},
        "gang": "volcano",
        "queue": "default",
        "host_network": True,
        "service_account": "trainer",
    },
    "coscheduling": {"gang": "coscheduling", "privileged": True, "scheduler": "gang"},
    "pytorchjob": {"kind": "pytorchjob", "resources": {"rdma/hca": 8}},
    "trainjob": {
        "kind": "trainjob",
        "tolerations": ["nvidia.com/gpu:NoSchedule"],
        "queue": "gpu",
        "results": "runs",
    },
    "mpijob": {"kind": "mpijob", "resources": {"rdma/hca": 8}, "pull_secrets": ["ngc"]},
    "rayjob": {
        "kind": "rayjob",
        "resources": {"rdma/hca": 8},
        "tolerations": ["nvidia.com/gpu:NoSchedule"],
        "queue": "gpu",
        "pull_secrets": ["ngc"],
    },
}


def job_on(settings: dict[str, Any], env: dict[str, str] | None = None, **changes: Any) -> Job:
    """A job of two nodes with these Kubernetes settings."""
    fields = {
        "name": "site",
        "device": "H100-SXM",
        "nodes": 2,
        "devices_per_node": 8,
        "launcher": "kubernetes",
        "kubernetes": KubernetesSettings.model_validate({"image": "nvcr.io/a/b:1", **settings}),
        **changes,
    }
    cluster = Cluster.model_validate(fields)
    return Job(
        name="llama31-8b",
        python=cluster.interpreter,
        program=("trainer", "trainer.json"),
        env=env or {},
        files={"trainer.json": "{}\n"},
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        timeout_s=3600.0,
        cluster=cluster,
    )
