"""Fields of KubeRay's RayJob (ray.io/v1), from its CRD of August 2026, as a strict JSON Schema.

Pod templates are left to the schemas of Kubernetes itself.
"""

from __future__ import annotations

from typing import Any

TEXT, FLAG, NUMBER, OBJECT = ({"type": t} for t in ("string", "boolean", "number", "object"))
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: tuple[str, ...] = (), **types: Any) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {
        "type": "object",
        "properties": types,
        "required": list(required),
        "additionalProperties": False,
    }


HEAD = fields(
    ("template",),
    template=OBJECT,
    rayStartParams=TEXTS,
    enableIngress=FLAG,
    headService=OBJECT,
    ingressOptions=OBJECT,
    labels=TEXTS,
    resources=TEXTS,
    serviceType=TEXT,
)
WORKERS = fields(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=TEXT,
    template=OBJECT,
    rayStartParams=TEXTS,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    labels=TEXTS,
    priority=COUNT,
    resources=TEXTS,
    scaleStrategy=OBJECT,
    suspend=FLAG,
)
CLUSTER = fields(
    ("headGroupSpec",),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
    authOptions=OBJECT,
    autoscalerOptions=OBJECT,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=OBJECT,
    headServiceAnnotations=TEXTS,
    historyServerOptions=OBJECT,
    managedBy=TEXT,
    networkPolicy=OBJECT,
    rayVersion=TEXT,
    suspend=FLAG,
    tlsOptions=OBJECT,
    upgradeStrategy=OBJECT,
)
MODES = ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
SPEC = fields(
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    clusterSelector=TEXTS,
    deletionStrategy=OBJECT,
    entrypoint=TEXT,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=TEXT,
    metadata=TEXTS,
    preRunningDeadlineSeconds={**COUNT, "minimum": 1},
    rayClusterSpec=CLUSTER,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode={"enum": MODES},
    submitterConfig=fields(backoffLimit=COUNT),
    submitterPodTemplate=OBJECT,
    suspend=FLAG,
    ttlSecondsAfterFinished=COUNT,
)
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=OBJECT,
    spec=SPEC,
)
