"""What Kubernetes says about pods, and what it means for a run."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import pytest

from paceline.machines.kubernetes.client import Kubectl, fault
from paceline.machines.kubernetes.manifest import ROLE_LABEL
from paceline.machines.kubernetes.pods import PodState, pending_text, pod_state
from paceline.machines.kubernetes.run import KubernetesRecord, KubernetesRun
from tests.machines.kubernetes.clusters import job_on


def pod(name: str = "p-0", node: str = "node-1", **status: Any) -> dict[str, Any]:
    """A pod as kubectl prints it."""
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": {ROLE_LABEL: "node"}},
        "spec": {"nodeName": node},
        "status": status,
    }


def state_of(**status: Any) -> PodState:
    return pod_state(pod(**status), ROLE_LABEL)


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"state": state}]


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (
            {"containerStatuses": container(terminated={"exitCode": 137, "reason": "OOMKilled"})},
            "oom",
            "OOMKilled: its container used more memory than its limit",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            "failed",
            "Evicted: The node was low on memory.",
        ),
        (
            {"phase": "Failed", "reason": "DeadlineExceeded"},
            "timeout",
            "ran longer than its activeDeadlineSeconds",
        ),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"},
            "failed",
            "UnexpectedAdmissionError: no GPU",
        ),
        (
            {
                "phase": "Running",
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": reason}
                    for reason in ["PreemptionByScheduler"]
                ],
            },
            "incomplete",
            "was preempted by a pod of higher priority",
        ),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": reason}
                    for reason in ["DeletionByTaintManager"]
                ],
            },
            "failed",
            "was evicted from a node that Kubernetes lost or tainted",
        ),
    ],
)
def test_the_end_of_a_pod_is_explained(status: dict[str, Any], kind: str, words: str) -> None:
    failure = state_of(**status).failure
    assert failure is not None and (failure.status, failure.reason) == (kind, words)


def test_an_exit_code_alone_is_no_failure_of_the_pod() -> None:
    state = state_of(
        phase="Failed", containerStatuses=container(terminated={"exitCode": 7, "reason": "Error"})
    )
    assert state.exit_code == 7 and state.failure is None and state.over


def test_a_pod_has_started_once_its_container_runs() -> None:
    assert state_of(phase="Running", containerStatuses=container(running={})).started
    assert not state_of(phase="Pending").started


def test_an_unscheduled_pod_waits_for_what_the_scheduler_says() -> None:
    message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    states = [state_of(phase="Pending", conditions=[condition])]
    assert pending_text(states, 2, 45.0) == f"2 of 2 pods pending since 40 s: {message}"
    assert pending_text([], 2, 3.0) == "2 of 2 pods pending: Kubernetes has not created them"


def test_an_image_that_cannot_be_pulled_is_an_error() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    state = state_of(phase="Pending", containerStatuses=container(waiting=waiting))
    assert state.error == "ImagePullBackOff: Back-off pulling image"
    creating = {"reason": "ContainerCreating"}
    assert state_of(containerStatuses=container(waiting=creating)).error is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'error: resource mapping not found for name: "a" namespace: "" from "STDIN": '
            'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
            "the cluster has no JobSet; install the operator of JobSet, or set `kind: job`",
        ),
        (
            'Error from server (AlreadyExists): error when creating "STDIN": services "a" exists',
            'Kubernetes: services "a" exists; delete it, or start the run again',
        ),
        (
            'Error from server (Forbidden): pods "a" is forbidden: exceeded quota: q',
            "use fewer --nodes",
        ),
        (
            'Error from server (Forbidden): pods is forbidden: User "u" cannot list resource',
            "ask for this right (RBAC)",
        ),
        (
            "The connection to the server 10.0.0.1:6443 was refused - did you specify the host?",
            "check `kubectl get pods`, kubernetes.context and KUBECONFIG",
        ),
    ],
)
def test_a_refusal_of_kubernetes_says_what_to_do(text: str, words: str) -> None:
    assert words in str(fault(text)), str(fault(text))


@pytest.fixture
def run(tmp_path: Path) -> KubernetesRun:
    """A run whose kubectl is never started."""
    record = KubernetesRecord(name="r", kind="jobset")
    (tmp_path / "logs").mkdir()
    return KubernetesRun(job_on({}), tmp_path, record, Kubectl(), [])


def record_of(name: str, offset: int, data: bytes, pod: str = "p-0") -> str:
    text = base64.b64encode(zlib.compress(data)).decode()
    return f"[pod/{pod}/node] @file 0 {name} {offset} {text}"


def test_records_may_be_read_twice(run: KubernetesRun) -> None:
    lines = [record_of("steps/rank-0.jsonl", 0, b"one\n"), record_of("steps/rank-0.jsonl", 4, b"2")]
    for line in [*lines, *lines, "[pod/p-0/node] @end 0 0", "[pod/p-0/node] @end 0 0"]:
        run._handle_line(line)
    assert (run.folder / "steps/rank-0.jsonl").read_bytes() == b"one\n2" and run.ends == {0: 0}


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/outside", "a/../../outside", "run.json", "kubernetes.json", "job.sh"],
)
def test_a_record_cannot_replace_files_of_the_controller(run: KubernetesRun, name: str) -> None:
    before = sorted(run.folder.parent.rglob("*"))
    run._handle_line(record_of(name, 0, b"x"))
    assert sorted(run.folder.parent.rglob("*")) == before


@pytest.mark.parametrize("text", ["@file 0 a 0 ===", "@file 0 a x eJw=", "@end x y", "@end 0 -1"])
def test_a_broken_record_is_ignored(run: KubernetesRun, text: str) -> None:
    run._handle_line(f"[pod/p-0/node] {text}")
    assert not run.ends and not (run.folder / "a").exists()


def event(kind: str, **status: Any) -> dict[str, Any]:
    return {"type": kind, "object": pod(**status)}


def test_the_first_failed_pod_is_the_reason(run: KubernetesRun) -> None:
    killed = container(terminated={"exitCode": 137, "reason": "Error"})
    ended = container(terminated={"exitCode": 143, "reason": "Error"})
    for name in ("p-0", "p-1"):
        run._update_pod(event("ADDED", name=name, node=f"node-{name}", phase="Running"))
    run._update_pod(
        event("MODIFIED", name="p-1", node="node-p-1", phase="Failed", containerStatuses=killed)
    )
    run._handle_line("[pod/p-0/node] @end 0 143")
    run._update_pod(
        event("DELETED", name="p-0", node="node-p-0", phase="Failed", containerStatuses=ended)
    )
    end = run.verdict()
    assert end is not None and end.hosts == ("node-p-1",)
    assert end.reason == "node-p-1 (pod p-1): ended with code 137 (killed)"


def test_a_pod_that_another_user_deletes_is_named(run: KubernetesRun) -> None:
    run._update_pod(event("ADDED", phase="Running", containerStatuses=container(running={})))
    deleted = event("MODIFIED", phase="Running", containerStatuses=container(running={}))
    deleted["object"]["metadata"]["deletionTimestamp"] = "2026-11-29T08:00:00Z"
    run._update_pod(deleted)
    run._handle_line("[pod/p-0/node] @end 0 143")
    end = run.verdict()
    assert end is not None and not end.hosts
    assert end.reason == "node-1 (pod p-0): was deleted by another user or controller"


def test_a_failed_rank_is_left_to_its_own_words(run: KubernetesRun) -> None:
    run._update_pod(event("ADDED", phase="Running", containerStatuses=container(running={})))
    run._handle_line("[pod/p-0/node] @end 0 1")
    assert run.verdict() is None


def test_the_last_words_of_a_pod_without_an_agent_are_shown(run: KubernetesRun) -> None:
    run._handle_line("[pod/p-0/node] exec: python3: not found")
    code = container(terminated={"exitCode": 127, "reason": "Error"})
    run._update_pod(event("ADDED", phase="Failed", containerStatuses=code))
    end = run.verdict()
    assert end is not None
    assert end.reason == "node-1 (pod p-0): ended with code 127: exec: python3: not found"
