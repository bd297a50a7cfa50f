"""Manifests of the Kubernetes launcher: recorded ones, their schemas, and refused settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from paceline.core.errors import UserError
from paceline.core.hardware import KubernetesSettings
from paceline.files import catalog
from paceline.machines import kubernetes
from paceline.machines.kubernetes.manifest import (
    gpu_resource,
    manifest_text,
    manifests,
    toleration,
    workload_name,
)
from tests.command import paceline
from tests.machines.kubernetes.clusters import SITES, job_on
from tests.machines.kubernetes.kuberay import RAY_JOB

GOLDEN = Path(__file__).parent / "golden"
RECORD = "PACELINE_RECORD_GOLDEN"
"""Set to 1, the tests record the manifests instead of comparing them."""
VERSION = "1.33"
"""Version of Kubernetes whose schemas are compared."""
NAME = "paceline-llama31-8b-00000000"


def workload(site: str) -> dict[str, Any]:
    return manifests(job_on(SITES[site]), NAME)[-1]


def pod_spec(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The pod of a JobSet."""
    jobset = manifests(job_on(settings, **changes), NAME)[-1]
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def read_yaml_1_1(text: str) -> list[Any]:
    """The documents as kubectl reads them."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)
    return list(yaml.load_all(text))


@pytest.mark.parametrize("site", SITES)
def test_the_manifest_is_the_recorded_one(site: str) -> None:
    text = kubernetes.render(job_on(SITES[site]))
    file = GOLDEN / f"{site}.yaml"
    if os.environ.get(RECORD):
        file.write_text(text)
    assert text == file.read_text()


def test_every_recorded_manifest_is_compared() -> None:
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(SITES)


@pytest.mark.parametrize("site", SITES)
def test_objects_of_kubernetes_itself_follow_their_strict_schemas(site: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    pods: list[dict[str, Any]] = []

    def find(node: Any) -> None:
        """Collects the pod templates of a workload."""
        if isinstance(node, dict):
            if "containers" in node.get("spec", {}) and "metadata" in node:
                pods.append(node)
            for child in node.values():
                find(child)
        elif isinstance(node, list):
            for child in node:
                find(child)

    documents = manifests(job_on(SITES[site]), NAME)
    for document in documents:
        if document["apiVersion"] in ("v1", "batch/v1"):
            validate(document, VERSION, strict=True)
        find(document)
    assert pods
    for template in pods:
        spec = {**template["spec"]}
        spec["containers"] = [{"image": "i", **one} for one in spec["containers"]]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        validate(pod, VERSION, strict=True)


@pytest.mark.parametrize(
    ("site", "model"),
    [
        *((site, "JobsetV1alpha2JobSet") for site in SITES if "jobset" in site),
        ("trainjob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_objects_of_kubeflow_keep_every_field_in_its_models(site: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document = workload(site)
    parsed = getattr(models, model).from_dict(document)
    assert json.loads(json.dumps(parsed.to_dict())) == json.loads(json.dumps(document))


def test_a_rayjob_has_only_fields_of_kuberay() -> None:
    validate = pytest.importorskip("jsonschema").validate
    document = workload("rayjob")
    validate(document, RAY_JOB)
    for name in ("rayClusterSpec", "submitterConfig"):
        wrong = {**document["spec"], name: {**document["spec"][name], "typo": 1}}
        with pytest.raises(Exception, match="typo"):
            validate({**document, "spec": wrong}, RAY_JOB)


def test_a_rayjob_waits_for_kueue_and_runs_the_program_that_its_head_mounts() -> None:
    spec = workload("rayjob")["spec"]
    assert spec["suspend"] and spec["shutdownAfterJobFinishes"]  # KubeRay allows only both
    head = spec["rayClusterSpec"]["headGroupSpec"]
    (mount,) = head["template"]["spec"]["containers"][0]["volumeMounts"]
    assert mount["mountPath"] in spec["entrypoint"] and head["rayStartParams"]["num-cpus"] == "0"
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == 2
    (container,) = workers["template"]["spec"]["containers"]
    assert "command" not in container and container["resources"]["limits"]["rdma/hca"] == "8"


@pytest.mark.parametrize("site", SITES)
def test_kubectl_reads_the_yaml_as_it_was_built(site: str) -> None:
    documents = manifests(job_on(SITES[site]), NAME)
    assert read_yaml_1_1(manifest_text(documents)) == documents


@pytest.mark.parametrize(
    "text", ["no", "Yes", "on", "y", "null", "~", "0777", "1e3", "12:30:45", "0x1f", "1_000",
             ".5", ".inf", "", " a", "a: b", "# c", "{x}", "- d", "a\nb", 'quote"', "=", "<<",
             "2026-11-29", "true", "é", "%YAML", "*a", "!t", "a #b", "\t"],
)  # fmt: skip
def test_no_text_becomes_another_type(text: str) -> None:
    document = {"value": text, "list": [text]}
    assert read_yaml_1_1(manifest_text([document])) == [document]


def test_names_are_short_and_valid_host_names() -> None:
    for name in ("llama31-8b", "Ünï_code/with.dots and spaces", "x" * 80, "-", "train.py"):
        result = workload_name(kubernetes_job(name), "/runs/a")
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,31}[a-z0-9])?", result), result
    first, second = (workload_name(kubernetes_job("a"), folder) for folder in ("/r/1", "/r/2"))
    assert first != second


def kubernetes_job(name: str) -> Any:
    return type("NamedJob", (), {"name": name})()


def test_ranks_meet_at_the_first_pod_of_the_jobset() -> None:
    container = pod_spec({})["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["PACELINE_ADDRESS"] == f"{NAME}-node-0-0.{NAME}"
    assert {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in (
        container["env"]
    )


def test_the_service_has_the_address_of_a_pod_that_is_not_ready() -> None:
    service = manifests(job_on({}), NAME)[0]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    ("device", "resource"),
    [("H100-SXM", "nvidia.com/gpu"), ("MI300X", "amd.com/gpu"), ("TPU v5p", "google.com/tpu")],
)
def test_gpus_of_each_maker_are_requested(device: str, resource: str) -> None:
    name = catalog.find_device(device).device.name
    job = job_on({}, device=name)
    assert job.cluster and gpu_resource(job.cluster) == resource
    (container,) = pod_spec({}, device=name)["containers"]
    assert container["resources"]["limits"][resource] == "8"
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_hosts_are_selected_by_node_name_and_each_gets_one_pod() -> None:
    affinity = pod_spec({}, hosts=("a", "b"))["affinity"]
    (required,) = affinity["nodeAffinity"].values()
    assert [term["matchFields"][0]["values"] for term in required["nodeSelectorTerms"]] == [
        ["a"],
        ["b"],
    ]
    assert affinity["podAntiAffinity"]


def test_secrets_are_references_in_the_manifest() -> None:
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz01234567"
    text = kubernetes.render(job_on({}, env={"HF_TOKEN": secret, "NCCL_DEBUG": "INFO"}))
    assert secret not in text and "secretKeyRef" in text and "holds HF_TOKEN" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b/c", {"key": "a.b/c", "operator": "Exists"}),
        ("a=no:NoExecute", {"key": "a", "operator": "Equal", "value": "no", "effect": "NoExecute"}),
        ("a:NoSchedule", {"key": "a", "operator": "Exists", "effect": "NoSchedule"}),
        (":NoExecute", {"operator": "Exists", "effect": "NoExecute"}),
    ],
)
def test_tolerations_are_read_as_kubectl_writes_taints(text: str, expected: Any) -> None:
    assert toleration(KubernetesSettings(tolerations=(text,)).tolerations[0]) == expected


@pytest.mark.parametrize(
    ("settings", "env", "message"),
    [
        ({"image": None}, {}, "kubernetes.image: is missing"),
        ({}, {"FI_PROVIDER": "efa"}, "FI_PROVIDER=efa, but no EFA interface is requested"),
        ({"efa": 4}, {"NCCL_NET": "Socket"}, "NCCL_NET=Socket does not use the EFA"),
        ({}, {"NCCL_NET": "gIB"}, "NCCL_NET=gIB, but the pods have no network"),
        ({"resources": {"rdma/hca": 1}}, {"NCCL_IB_DISABLE": "1"}, "rdma/hca is requested"),
        ({"topology": "rack"}, {}, "kubernetes.topology: needs Kueue"),
        ({"queue": "q", "gang": "coscheduling"}, {}, "no effect on coscheduling"),
        ({"kind": "trainjob", "host_network": True}, {}, "cannot be set by a TrainJob"),
        ({"kind": "rayjob", "results": "runs"}, {}, "results: cannot be set by a RayJob"),
        ({"volumes": {"/dev/shm": "a"}}, {}, "/dev/shm: is used by Paceline"),
        ({"volumes": {"/mnt/paceline/run": "a"}}, {}, "is used by Paceline"),
    ],
)
def test_a_contradiction_is_refused(
    settings: dict[str, Any], env: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        kubernetes.render(job_on(settings, env=env))
    assert message in str(error.value)


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(UserError) as error:
        kubernetes.render(job_on({"image": None, "topology": "r"}, env={"FI_PROVIDER": "efa"}))
    assert len(str(error.value).splitlines()) == 3


def test_an_excluded_host_is_refused() -> None:
    with pytest.raises(UserError, match="exclude: lists a, which is in hosts"):
        kubernetes.render(job_on({"exclude": ["a"]}, hosts=("a", "b")))


def test_efa_without_the_variable_is_consistent() -> None:
    variables = pod_spec({"efa": 4})["containers"][0]["env"]
    assert {"name": "FI_PROVIDER", "value": "efa"} in variables


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": "8 GB"},
        {"cpus": "many"},
        {"namespace": "Upper"},
        {"kind": "deployment"},
        {"tolerations": ["a:Sometimes"]},
        {"volumes": {"relative": "claim"}},
        {"queue": "a b"},
    ],
)
def test_the_schema_refuses_what_kubernetes_would(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KubernetesSettings.model_validate(settings)


def test_a_dry_run_prints_the_manifest_that_is_stored(tmp_path: Path) -> None:
    job = job_on(SITES["plain-job"])
    kubernetes.prepare(job, tmp_path)
    name, stored = re.compile(r"paceline-llama31-8b-\w{8}"), (tmp_path / "job.sh").read_text()
    assert name.sub("NAME", stored) == name.sub("NAME", kubernetes.render(job))


def test_a_dry_run_of_the_command_line_is_yaml(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    lines = ["name: k", "device: cpu", "devices_per_node: 1", "nodes: 2", "launcher: kubernetes"]
    file.write_text("\n".join([*lines, "kubernetes: {image: a/b, kind: job}"]) + "\n")
    words = ["run", "tiny-llama", "--cluster", str(file), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = [document["kind"] for document in read_yaml_1_1(done.stdout)]
    assert kinds == ["Service", "Job"]


def test_a_missing_image_is_refused_before_a_run_starts(tmp_path: Path) -> None:
    words = ["run", "tiny-llama", "--launcher", "kubernetes", "--device", "cpu"]
    done = paceline(*words, runs=tmp_path)
    assert done.returncode == 1 and "kubernetes.image: is missing" in done.stderr
    assert "starting" not in done.stderr and not list(tmp_path.glob("*/run.json"))
