"""Manifests of a job: one pod template, and a workload of each kind around it.

Manifests are data. They become YAML by `manifest_text`, and JSON for kubectl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from math import ceil
from typing import Any
from zlib import crc32

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from paceline.core.hardware import Cluster, KubernetesSettings, WorkloadKind
from paceline.core.job import Job
from paceline.files import catalog
from paceline.machines.node.script import rendezvous_port, secret_variables
from paceline.machines.ray.submission import PROGRAM as RAY_PROGRAM

Manifest = dict[str, Any]

RUN_LABEL = "paceline/run"
"""Label of all objects of a run. Its value is the name of the workload."""
ROLE_LABEL = "paceline/role"
"""Label of pods: `node`, or `launcher` for the pod of an MPIJob that runs mpirun and the one that
submits a RayJob, or `head` for that of Ray."""
PRINTING_ROLES: Mapping[WorkloadKind, str] = {"mpijob": "launcher", "rayjob": "launcher"}
"""Role of the pod that prints the records of all nodes; else each node prints its own."""
NAME = r"^paceline(-[a-z0-9]+)*-[0-9a-f]{8}$"
"""Pattern of the name of a workload."""
MAX_NAME = 33
"""Maximum length of a workload's name; operators append up to 30 characters for a pod."""
ROOT = "/mnt/paceline"
PORT = 29500
"""Port at which rank 0 listens, in a network of its pod's own."""
TTL_S = 3600
"""Time in seconds after its end at which Kubernetes removes a workload that nobody deleted."""
DEADLINE_SLACK_S = 600
"""Time in seconds that a pod may run beyond the time limit of its job."""
GRACE_S = 30
"""Time in seconds that a pod has to end its ranks."""
GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Google": "google.com/tpu"}
EFA_RESOURCE = "vpc.amazonaws.com/efa"
EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
RDMA_RESOURCE = re.compile(r"rdma/.+|.*/(hca|ib|roce|rdma|mlnx|sriov)[\w.-]*|nvidia\.com/mlnxnics")
"""Extended resources of InfiniBand and RoCE adapters, which need locked memory."""
SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}
JOB_NAME = "node"
"""Name of the replicated job of a JobSet, as in Kubeflow's runtimes."""
CONTAINER_NAMES = {"pytorchjob": "pytorch"}
"""Names that operators require of the container, by kind of the workload; else JOB_NAME."""
_SAFE_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_YAML_1_1_WORDS = re.compile(r"y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)
"""Words that kubectl reads as another type, because it uses YAML 1.1."""
_TOLERATION = re.compile(r"(?P<key>[^=:]*)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?")


def workload_name(job: Job, unique: str) -> str:
    """Return an RFC 1123 name of up to 33 characters; `unique` distinguishes runs of one job."""
    suffix = f"{crc32(unique.encode()):08x}"
    words = re.sub(r"[^a-z0-9]+", "-", job.name.rpartition("/")[2].lower())
    stem = f"paceline-{words}"[: MAX_NAME - len(suffix) - 1].strip("-")
    return f"{stem}-{suffix}"


def manifests(job: Job, name: str) -> list[Manifest]:
    """Return the objects of a job without its files and secrets; the last one is the workload."""
    cluster = cluster_of(job)
    settings = cluster.kubernetes
    objects: list[Manifest] = []
    if settings.kind in ("jobset", "job"):
        objects.append(_service(name))
    if settings.gang:
        objects.append(_pod_group(settings, name, job.nodes))
    objects += [_claim_template(f"{name}-{key}", of) for key, of in settings.claims.items()]
    if settings.compute_domain:
        objects.append(_compute_domain(name, job.nodes))
    return [
        _with_metadata(document, settings, name)
        for document in (*objects, WORKLOADS[settings.kind](job, name))
    ]


def workload_reference(kind: WorkloadKind, name: str) -> Manifest:
    """Return what identifies the workload of a run."""
    return {**WORKLOAD_TYPES[kind], "metadata": {"name": name, "labels": {RUN_LABEL: name}}}


def manifest_text(documents: Sequence[Manifest]) -> str:
    """Return the objects as YAML documents that kubectl reads as they were built."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.explicit_start = True  # type: ignore[assignment]
    text = StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()


class _Representer(SafeRepresenter):
    """Representer that quotes every text that YAML 1.1 could read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value in full."""
        return True


def _represent_text(representer: SafeRepresenter, text: str) -> ScalarNode:
    is_plain = _SAFE_TEXT.fullmatch(text) and not _YAML_1_1_WORDS.fullmatch(text)
    return representer.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if is_plain else '"'
    )


_Representer.add_representer(str, _represent_text)


def cluster_of(job: Job) -> Cluster:
    """Return the job's cluster."""
    assert job.cluster is not None, "every job off this machine has a cluster"
    return job.cluster


def gpu_resource(cluster: Cluster) -> str | None:
    """Return the resource that a pod requests for its devices; None without GPUs, or if unknown."""
    if cluster.device == "cpu":
        return None
    vendor = catalog.find_device(cluster.device).device.vendor
    return cluster.kubernetes.gpu_resource or GPU_RESOURCES.get(vendor)


def requests(job: Job) -> dict[str, str]:
    """Return the extended resources of one pod."""
    cluster = cluster_of(job)
    settings = cluster.kubernetes
    gpus = gpu_resource(cluster)
    return {
        **({gpus: str(job.devices_per_node)} if gpus else {}),
        **({EFA_RESOURCE: str(settings.efa)} if settings.efa else {}),
        **settings.resources,
    }


def uses_rdma(job: Job) -> bool:
    """Return True if a pod gets adapters that need locked memory."""
    has_adapters = any(RDMA_RESOURCE.fullmatch(name) for name in requests(job))
    settings = cluster_of(job).kubernetes
    return bool(has_adapters or settings.efa or settings.networks or settings.claims)


def _with_metadata(document: Manifest, settings: KubernetesSettings, name: str) -> Manifest:
    """Return the object with the run's label, and the namespace if the cluster file gives one."""
    metadata = {
        **({"namespace": settings.namespace} if settings.namespace else {}),
        **document["metadata"],
        "labels": {RUN_LABEL: name, **document["metadata"].get("labels", {})},
    }
    return {**document, "metadata": metadata}


def _service(name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _node_labels(name),
        },
    }


def _node_labels(name: str) -> dict[str, str]:
    return {RUN_LABEL: name, ROLE_LABEL: "node"}


def _pod_group(settings: KubernetesSettings, name: str, nodes: int) -> Manifest:
    version = (
        "scheduling.volcano.sh/v1beta1"
        if settings.gang == "volcano"
        else "scheduling.x-k8s.io/v1alpha1"
    )
    queue = {"queue": settings.queue} if settings.queue and settings.gang == "volcano" else {}
    return {
        "apiVersion": version,
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"minMember": nodes, **queue},
    }


def _claim_template(name: str, device_class: str) -> Manifest:
    devices = {"deviceClassName": device_class, "allocationMode": "All"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "devices", "exactly": devices}]}}},
    }


def _compute_domain(name: str, nodes: int) -> Manifest:
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": name},
        "spec": {
            "numNodes": nodes,
            "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}},
        },
    }


def _claims(settings: KubernetesSettings, name: str) -> dict[str, str]:
    """Return the templates of the pod's resource claims by the name of the claim."""
    claims = {key: f"{name}-{key}" for key in settings.claims}
    return {**claims, **({"channel": f"{name}-channel"} if settings.compute_domain else {})}


def _pod(job: Job, name: str, container_name: str, address: str | None) -> Manifest:
    """Return the pod template."""
    cluster = cluster_of(job)
    settings = cluster.kubernetes
    annotations = dict(settings.annotations)
    labels = _node_labels(name)
    if settings.networks:
        interfaces = [
            {"interfaceName": "eth0", "network": "default"},
            *({"interfaceName": key, "network": of} for key, of in settings.networks.items()),
        ]
        annotations["networking.gke.io/default-interface"] = "eth0"
        annotations["networking.gke.io/interfaces"] = json.dumps(interfaces)
    if settings.topology:
        annotations["kueue.x-k8s.io/podset-required-topology"] = settings.topology
    if settings.gang == "volcano":
        annotations["scheduling.k8s.io/group-name"] = name
    elif settings.gang:
        labels["scheduling.x-k8s.io/pod-group"] = name
    claims = _claims(settings, name)
    scheduler = settings.scheduler or (SCHEDULERS[settings.gang] if settings.gang else None)
    uses_host = settings.host_network
    spec = {
        "subdomain": name if address else None,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "activeDeadlineSeconds": _deadline_s(job),
        "schedulerName": scheduler,
        "priorityClassName": settings.priority_class,
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
        "hostNetwork": uses_host or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if uses_host else None,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [toleration(text) for text in settings.tolerations],
        "affinity": _affinity(cluster, name),
        "resourceClaims": [
            {"name": key, "resourceClaimTemplateName": template} for key, template in claims.items()
        ],
        "containers": [_container(job, name, container_name, address)],
        "volumes": [
            {"name": "files", "configMap": {"name": name}},
            {"name": "run", "emptyDir": {}},
            {"name": "shm", "emptyDir": _without_empty(medium="Memory", sizeLimit=settings.shm)},
            *(
                {"name": "results", "persistentVolumeClaim": {"claimName": claim}}
                for claim in filter(None, [settings.results])
            ),
            *(
                {"name": f"volume-{at}", **_volume(source)}
                for at, source in enumerate(settings.volumes.values())
            ),
        ],
    }
    metadata = {"labels": labels, **_without_empty(annotations=annotations)}
    return {"metadata": metadata, "spec": _without_empty(**spec)}


def _deadline_s(job: Job) -> int | None:
    return None if job.timeout_s is None else ceil(job.timeout_s) + DEADLINE_SLACK_S


def _container(job: Job, name: str, container_name: str, address: str | None) -> Manifest:
    cluster = cluster_of(job)
    settings = cluster.kubernetes
    resources = requests(job)
    limits = {**_without_empty(cpu=settings.cpus, memory=settings.memory), **resources}
    if not resources and not settings.cpus:
        limits["cpu"] = str(job.devices_per_node)
    claims = [{"name": key} for key in _claims(settings, name)]
    variables = {
        "PACELINE_RUN": name,
        "PACELINE_NODES": str(job.nodes),
        "PACELINE_DEVICES": str(job.devices_per_node),
        **({"PACELINE_ADDRESS": address} if address else {}),
        **(EFA_VARIABLES if settings.efa else {}),
    }
    env: list[Manifest] = [{"name": key, "value": value} for key, value in variables.items()]
    sources: list[tuple[str, Manifest]] = [
        ("NODE_NAME", {"fieldRef": {"fieldPath": "spec.nodeName"}}),
        *(
            (key, {"secretKeyRef": {"name": name, "key": key}})
            for key in sorted(secret_variables(job.env))
        ),
    ]
    env += [{"name": key, "valueFrom": source} for key, source in sources]
    security: Manifest = {"privileged": True} if settings.privileged else {}
    if uses_rdma(job) and not settings.privileged:
        security["capabilities"] = {"add": ["IPC_LOCK"]}
    port = rendezvous_port(name) if settings.host_network else PORT
    command = [job.python, "-u", f"{ROOT}/files/pod_program.py"]
    container = {
        "name": container_name,
        "image": settings.image,
        "command": [*command, str(port)],
        "env": env,
        "resources": _without_empty(requests=limits, limits=limits, claims=claims),
        "securityContext": security,
        "volumeMounts": [
            {"name": "files", "mountPath": f"{ROOT}/files"},
            {"name": "run", "mountPath": f"{ROOT}/run"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "results", "mountPath": f"{ROOT}/results"}] if settings.results else []),
            *(
                {"name": f"volume-{at}", "mountPath": path}
                for at, path in enumerate(settings.volumes)
            ),
        ],
    }
    return _without_empty(**container)


def toleration(text: str) -> Manifest:
    """Return the toleration that `KEY[=VALUE][:EFFECT]` describes."""
    match = _TOLERATION.fullmatch(text)
    assert match is not None, "the schema of cluster files has checked it"
    parts = match.groupdict()
    operator = "Exists" if parts["value"] is None else "Equal"
    return _without_empty(
        key=parts["key"], operator=operator, value=parts["value"], effect=parts["effect"]
    )


def _affinity(cluster: Cluster, name: str) -> Manifest:
    """Return one pod per node, on the cluster's hosts if it names any, and on no excluded node.

    A node is selected by its name: the label with its host name may have another value. Kubernetes
    allows one value per expression. Terms are alternatives, expressions of a term are not.
    """

    def expression(operator: str, host: str) -> Manifest:
        return {"key": "metadata.name", "operator": operator, "values": [host]}

    exclude = cluster.kubernetes.exclude
    terms = [{"matchFields": [expression("In", host)]} for host in cluster.hosts]
    if exclude and not terms:
        terms = [{"matchFields": [expression("NotIn", host) for host in exclude]}]
    same_run = {
        "labelSelector": {"matchLabels": _node_labels(name)},
        "topologyKey": "kubernetes.io/hostname",
    }
    mode = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        **({"nodeAffinity": {mode: {"nodeSelectorTerms": terms}}} if terms else {}),
        "podAntiAffinity": {mode: [same_run]},
    }


def _volume(source: str) -> Manifest:
    if source.startswith("/"):
        return {"hostPath": {"path": source}}
    return {"persistentVolumeClaim": {"claimName": source}}


def _without_empty(**fields: Any) -> Manifest:
    return {key: value for key, value in fields.items() if value not in (None, "", [], {}, ())}


def _queue_labels(settings: KubernetesSettings) -> dict[str, str]:
    if settings.queue and settings.gang != "volcano":
        return {"kueue.x-k8s.io/queue-name": settings.queue}
    return {}


def _workload(kind: WorkloadKind, job: Job, name: str, spec: Manifest) -> Manifest:
    labels = _queue_labels(cluster_of(job).kubernetes)
    return {
        **WORKLOAD_TYPES[kind],
        "metadata": {"name": name, **_without_empty(labels=labels)},
        "spec": spec,
    }


def _suspend(job: Job) -> Manifest:
    """Return the field that keeps a workload from starting before Kueue admits it."""
    return {"suspend": True} if _queue_labels(cluster_of(job).kubernetes) else {}


def _job_spec(job: Job, template: Manifest) -> Manifest:
    return {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }


def _job(job: Job, name: str) -> Manifest:
    spec = _job_spec(job, _pod(job, name, JOB_NAME, f"{name}-0.{name}"))
    settings = {**_suspend(job), "ttlSecondsAfterFinished": TTL_S}
    return _workload("job", job, name, {**settings, **spec})


def _jobset(job: Job, name: str) -> Manifest:
    template = _pod(job, name, JOB_NAME, f"{name}-{JOB_NAME}-0-0.{name}")
    spec = {
        **_suspend(job),
        "ttlSecondsAfterFinished": TTL_S,
        "failurePolicy": {"maxRestarts": 0},
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "replicatedJobs": [
            {"name": JOB_NAME, "replicas": 1, "template": {"spec": _job_spec(job, template)}}
        ],
    }
    return _workload("jobset", job, name, spec)


def _pytorchjob(job: Job, name: str) -> Manifest:
    template = _pod(job, name, CONTAINER_NAMES["pytorchjob"], None)
    replica = {"restartPolicy": "Never", "template": template}
    others = {"Worker": {"replicas": job.nodes - 1, **replica}} if job.nodes > 1 else {}
    spec = {
        "nprocPerNode": str(job.ranks_per_node),
        "runPolicy": _run_policy(job),
        "pytorchReplicaSpecs": {"Master": {"replicas": 1, **replica}, **others},
    }
    return _workload("pytorchjob", job, name, spec)


def _run_policy(job: Job) -> Manifest:
    return {
        **_suspend(job),
        "backoffLimit": 0,
        "cleanPodPolicy": "None",  # logs are read after the end
        "ttlSecondsAfterFinished": TTL_S,
    }


def _mpijob(job: Job, name: str) -> Manifest:
    """Return an MPIJob, whose launcher starts one process per worker with mpirun.

    The workers run sshd. Only the launcher reads the files of the job.
    """
    worker = _pod(job, name, JOB_NAME, None)
    container = worker["spec"]["containers"][0]
    program = container.pop("command")
    container["command"] = ["/usr/sbin/sshd", "-De"]
    names = {variable["name"] for variable in container["env"]} - {"NODE_NAME"}
    exports = " ".join(f"-x {variable}" for variable in sorted(names))
    first = r"$(sed -n '1s/[ :].*//p' /etc/mpi/hostfile)"
    script = (
        f'export PACELINE_ADDRESS="{first}"; exec mpirun --allow-run-as-root -np {job.nodes} '
        f'-N 1 {exports} -x PACELINE_ADDRESS "$@"'
    )
    launcher = {
        **{key: container[key] for key in ("name", "image", "env")},
        "command": ["bash", "-c", script, "mpirun", *program],
    }
    spec = {key: worker["spec"][key] for key in LAUNCHER_FIELDS if key in worker["spec"]}
    labels = {RUN_LABEL: name, ROLE_LABEL: "launcher"}
    replicas = {
        "Launcher": {
            "replicas": 1,
            "template": {
                "metadata": {"labels": labels},
                "spec": {**spec, "containers": [launcher]},
            },
        },
        "Worker": {"replicas": job.nodes, "template": worker},
    }
    mpi = {"slotsPerWorker": 1, "runPolicy": _run_policy(job), "mpiReplicaSpecs": replicas}
    return _workload("mpijob", job, name, mpi)


def _trainjob(job: Job, name: str) -> Manifest:
    """Return a TrainJob. Fields of the pod are a patch of its runtime."""
    settings = cluster_of(job).kubernetes
    pod = _pod(job, name, JOB_NAME, None)
    container = pod["spec"].pop("containers")[0]
    patch = {key: pod["spec"][key] for key in TRAINJOB_PATCH if key in pod["spec"]}
    in_patch = _without_empty(
        name=JOB_NAME,
        volumeMounts=container["volumeMounts"],
        securityContext=container.get("securityContext"),
    )
    template = {"metadata": pod["metadata"], "spec": {**patch, "containers": [in_patch]}}
    job_patch = {"name": JOB_NAME, "template": {"spec": {"template": template}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job_patch]}}}
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "env": container["env"],
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "resourcesPerNode": container["resources"],
    }
    spec = {
        **_suspend(job),
        "runtimeRef": {"name": settings.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "paceline/launcher", "trainingRuntimeSpec": runtime},
        ],
    }
    return _workload("trainjob", job, name, spec)


def _rayjob(job: Job, name: str) -> Manifest:
    """Return a RayJob, whose head has no devices and whose workers are the nodes.

    The submitter's pod prints the log of the job, which job_program.py writes on the head.
    """
    worker = _pod(job, name, JOB_NAME, None)
    container = worker["spec"]["containers"][0]
    del container["command"]  # KubeRay starts Ray
    worker["spec"].pop("activeDeadlineSeconds", None)  # that of the RayJob counts
    devices = str(job.devices_per_node)
    is_cpu = cluster_of(job).device == "cpu"
    workers = {
        "groupName": "nodes",
        "replicas": job.nodes,
        "minReplicas": job.nodes,
        "maxReplicas": job.nodes,
        "rayStartParams": {"num-cpus": devices, **({} if is_cpu else {"num-gpus": devices})},
        "template": worker,
    }
    files = "files"
    head = {
        "resources": {"requests": {"cpu": "1"}},
        "volumeMounts": [m for m in container["volumeMounts"] if m["name"] == files],
    }
    volumes = [volume for volume in worker["spec"]["volumes"] if volume["name"] == files]
    spec = {
        **_suspend(job),
        "entrypoint": f"{job.python} {ROOT}/files/{RAY_PROGRAM} {ROOT}/files",
        "submissionMode": "K8sJobMode",
        "backoffLimit": 0,
        "submitterConfig": {"backoffLimit": 0},
        "shutdownAfterJobFinishes": True,
        **_without_empty(activeDeadlineSeconds=_deadline_s(job)),
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0"},
                "template": _ray_pod(worker, name, "head", head, volumes),
            },
            "workerGroupSpecs": [workers],
        },
        "submitterPodTemplate": _ray_pod(worker, name, "launcher", {}, []),
    }
    return _workload("rayjob", job, name, spec)


def _ray_pod(
    worker: Manifest, name: str, role: str, fields: Manifest, volumes: list[Manifest]
) -> Manifest:
    """Return the template of a RayJob's pod without devices."""
    common = {key: worker["spec"][key] for key in LAUNCHER_FIELDS if key in worker["spec"]}
    container = {"name": JOB_NAME, "image": worker["spec"]["containers"][0]["image"], **fields}
    return {
        "metadata": {"labels": {RUN_LABEL: name, ROLE_LABEL: role}},
        "spec": {**common, "containers": [container], **_without_empty(volumes=volumes)},
    }


LAUNCHER_FIELDS = (
    "imagePullSecrets",
    "priorityClassName",
    "restartPolicy",
    "serviceAccountName",
    "tolerations",
)
"""Fields of a node's pod that also apply to pods without devices, such as that of mpirun."""
TRAINJOB_PATCH = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)
"""Fields of a pod that a TrainJob may patch; its runtime sets all others."""

WORKLOAD_TYPES: Mapping[WorkloadKind, Manifest] = {
    "jobset": {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"},
    "job": {"apiVersion": "batch/v1", "kind": "Job"},
    "pytorchjob": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"},
    "trainjob": {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"},
    "mpijob": {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"},
    "rayjob": {"apiVersion": "ray.io/v1", "kind": "RayJob"},
}
WORKLOADS: Mapping[str, Callable[[Job, str], Manifest]] = {
    "jobset": _jobset,
    "job": _job,
    "pytorchjob": _pytorchjob,
    "trainjob": _trainjob,
    "mpijob": _mpijob,
    "rayjob": _rayjob,
}
