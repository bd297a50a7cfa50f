"""What Kubernetes says about pods, and what it means for a run."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines import kubernetes
from paceline.machines.kubernetes.client import Kubectl, KubectlStream, fault, well_formed
from paceline.machines.kubernetes.manifest import ROLE_LABEL, RUN_LABEL
from paceline.machines.kubernetes.pods import PodState, pending_text, pod_state
from paceline.machines.kubernetes.run import KubernetesRecord, KubernetesRun
from paceline.machines.node.records import MAX_RECORD_BYTES
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
    record = KubernetesRecord(name="paceline-r-0123abcd", kind="jobset")
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


EMPTY = base64.b64encode(zlib.compress(b"")).decode()
BROKEN = [
    *("@file 0 a 0 ===", "@file 0 a x eJw=", f"@file 0 a -1 {EMPTY}", f"@file 0 a {2**70} {EMPTY}"),
    *(f"@file 0 logs 0 {EMPTY}", f"@file 0 . 0 {EMPTY}", f"@file 0 a\0b 0 {EMPTY}"),
    *(f"@file 0 logs/f/x 0 {EMPTY}", f"@file 0 {'a' * 300} 0 {EMPTY}", f"@file 0  0 {EMPTY}"),
    *(
        f"@file 0 result.json 0 {EMPTY}",
        f"@file 0 ./run.json 0 {EMPTY}",
        f"@file 0 a \u00b2 {EMPTY}",
    ),
    *("@end x y", "@end 0 -1", "@end 7 0", "@end 0 256", "@end \u0663 0", f"@end {'9' * 5000} 0"),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_record_is_ignored(run: KubernetesRun, text: str) -> None:
    (run.folder / "logs" / "f").write_text("a file\n")
    before = sorted(run.folder.parent.rglob("*"))
    run._handle_line(f"[pod/p-0/node] {text}")
    assert not run.ends and sorted(run.folder.parent.rglob("*")) == before


def test_a_record_that_expands_without_end_is_bounded(run: KubernetesRun) -> None:
    packed = base64.b64encode(zlib.compress(bytes(1 << 26))).decode()
    run._handle_line(f"[pod/p-0/node] @file 0 a 0 {packed}")
    assert (run.folder / "a").stat().st_size == MAX_RECORD_BYTES


def test_a_record_follows_no_link(run: KubernetesRun) -> None:
    (target := run.folder.parent / "target").write_text("kept")
    (run.folder / "a").symlink_to(target)
    run._handle_line(record_of("a", 0, b"x"))
    assert target.read_text() == "kept"


BAD_END = {"exitCode": "x"}
NO_PODS: list[Any] = [
    *({}, {"metadata": None}, {"metadata": {}}, {"metadata": {"name": "a"}, "status": 7}),
    {"metadata": {"name": "a"}, "status": {"containerStatuses": [7]}},
    {"metadata": {"name": "a"}, "status": {"containerStatuses": container(terminated="x")}},
    {
        "metadata": {"name": "a"},
        "status": {"containerStatuses": container(terminated={"exitCode": "x"})},
    },
    {"metadata": {"name": "a"}, "status": {"conditions": 7}},
    {"metadata": {"name": "a"}, "status": {"reason": ["x"], "phase": "Failed"}},
]


@pytest.mark.parametrize("content", NO_PODS)
def test_an_object_that_is_no_pod_is_a_clear_error(run: KubernetesRun, content: Any) -> None:
    with pytest.raises(SystemFaultError, match="a missing or invalid field"):
        run._update_pod({"type": "ADDED", "object": {"kind": "Pod", **content}})
    with pytest.raises(SystemFaultError, match="a missing or invalid field"):
        run._update_pod({"type": "ADDED", "object": 7})


@pytest.mark.parametrize("text", ["7", "[" * 20_000, '"x"', "null"])
def test_what_is_no_object_is_no_event(tmp_path: Path, text: str) -> None:
    (tmp_path / "text").write_text(text + ' {"type": "ADDED"}')
    stream = KubectlStream.start(["cat", str(tmp_path / "text")], tmp_path / "messages")
    stream.process.wait()
    assert list(stream.values()) in ([], [{"type": "ADDED"}])
    stream.close()


FAKE = """#!/bin/sh
for word; do case $word in get) verb=get;; delete) verb=delete;; esac; done
if [ $verb = get ]; then cat > /dev/null; cat {folder}/answer; else cat >> {folder}/deleted; fi
"""


@pytest.mark.parametrize(
    ("name", "labels", "is_deleted"),
    [
        ("paceline-r-0123abcd", {RUN_LABEL: "paceline-r-0123abcd"}, True),
        ("paceline-r-0123abcd", {RUN_LABEL: "paceline-other-0123abcd"}, False),
        ("paceline-r-0123abcd", {}, False),
        ("paceline-r-0123abcd", None, False),
        ("production", {RUN_LABEL: "production"}, False),
        ("--all", {RUN_LABEL: "--all"}, False),
    ],
)
def test_a_run_folder_of_somebody_else_deletes_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, labels: Any, is_deleted: bool
) -> None:
    """Its record names any object, and its manifest holds any."""
    (kubectl := tmp_path / "kubectl").write_text(FAKE.format(folder=tmp_path))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answer = {"metadata": {"name": name, "labels": labels}}
    (tmp_path / "answer").write_text(json.dumps(answer))
    (tmp_path / "kubernetes.json").write_text(json.dumps({"name": name, "kind": "job"}))
    (tmp_path / "job.sh").write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: all}\n")

    assert kubernetes.cancel_orphan(tmp_path) == (name if "-" in name[2:] else None)

    deleted = tmp_path / "deleted"
    objects = json.loads(deleted.read_text())["items"] if deleted.exists() else []
    assert [(each["kind"], each["metadata"]["name"]) for each in objects] == (
        [("Job", name)] if is_deleted else []
    )


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


@pytest.mark.parametrize("code", [float("inf"), float("nan"), "x", None, [1]])
def test_an_exit_code_that_is_none_is_a_clear_error(code: Any):
    status = {"containerStatuses": container(terminated={"exitCode": code})}
    with pytest.raises(SystemFaultError, match="missing or invalid field"), well_formed():
        state_of(**status)
