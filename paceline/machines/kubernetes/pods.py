"""States of pods as Kubernetes reports them, and their meaning for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.result import Status

HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerError", "RunContainerError")
"""Reasons of a waiting container that cannot start."""
RETRYING = ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError")
"""Reasons of a waiting container whose cause may pass by itself."""
DISRUPTIONS: Mapping[str, tuple[Status, str]] = {
    "PreemptionByScheduler": ("incomplete", "was preempted by a pod of higher priority"),
    "DeletionByTaintManager": ("failed", "was evicted from a node that Kubernetes lost or tainted"),
    "EvictionByEvictionAPI": ("incomplete", "was evicted, as when a node is drained"),
    "TerminationByKubelet": ("failed", "was ended by its node"),
    "DeletionByPodGC": ("failed", "was removed, because its node no longer exists"),
}
"""Reasons of the condition DisruptionTarget, with the status of the run and what happened."""
REASONS: Mapping[str, tuple[Status, str]] = {
    "OOMKilled": ("oom", "OOMKilled: its container used more memory than its limit"),
    "Evicted": ("failed", "Evicted"),
    "Preempting": ("incomplete", "was preempted"),
    "NodeLost": ("failed", "Kubernetes lost its node"),
    "NodeShutdown": ("failed", "its node was shut down"),
    "Terminated": ("failed", "its node was shut down"),
    "DeadlineExceeded": ("timeout", "ran longer than its activeDeadlineSeconds"),
}
"""Reasons of a failed pod or container, with the status of the run and what happened."""

SHOWN_S = (10, 20, 40, 60, 120, 300, 600, 1800, *range(3600, 360_000, 3600))
"""Waiting times in seconds at which the text on pending pods changes."""


@dataclass(frozen=True)
class PodFailure:
    """Reason why a pod failed, if it is not an exit code of its program."""

    status: Status
    reason: str


@dataclass(frozen=True)
class PodState:
    """Last known state of one pod."""

    name: str
    role: str
    node: str = ""
    """Name of its Kubernetes node; empty before it is scheduled."""
    started: bool = False
    """True if its container has started."""
    exit_code: int | None = None
    """Exit code of its container, or 1 if the pod failed without one."""
    failure: PodFailure | None = None
    waiting_for: str = ""
    """Reason why it has not started."""
    error: str | None = None
    """Reason why its container cannot start."""
    deleted: bool = False
    is_deleting: bool = False

    @property
    def over(self) -> bool:
        """True if its container has ended or the pod is gone."""
        return self.deleted or self.exit_code is not None

    @property
    def title(self) -> str:
        """Name of its node, with that of the pod."""
        return f"{self.node} (pod {self.name})" if self.node else f"pod {self.name}"


def pod_state(pod: Mapping[str, Any], role_label: str) -> PodState:
    """Return the state that a pod's JSON describes; other JSON is for `well_formed`."""
    metadata, status = pod["metadata"], pod.get("status", {})
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state", {})
    end, waiting = state.get("terminated"), state.get("waiting", {})
    phase = status.get("phase", "Pending")
    code = int(end.get("exitCode", 1)) if end else None
    if code is None and phase in ("Succeeded", "Failed"):
        code = 0 if phase == "Succeeded" else 1
    reason = waiting.get("reason", "")
    message = f"{reason}: {waiting['message']}" if waiting.get("message") else reason
    return PodState(
        name=str(metadata["name"]),
        role=str(metadata.get("labels", {}).get(role_label, "node")),
        node=str(pod.get("spec", {}).get("nodeName", "")),
        started="terminated" in state or "running" in state,
        exit_code=code,
        failure=_failure(status, end or {}) if code or _disruption(status) else None,
        waiting_for=_waiting_for(status, message),
        error=message if reason in (*HOPELESS, *RETRYING) else None,
        is_deleting=bool(metadata.get("deletionTimestamp")),
    )


def _disruption(status: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the condition that says who ended a pod, if anybody did."""
    return next(
        (
            condition
            for condition in status.get("conditions", ())
            if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        ),
        None,
    )


def _failure(status: Mapping[str, Any], end: Mapping[str, Any]) -> PodFailure | None:
    """Return why a pod failed; None if only the exit code of its program is known."""
    if disruption := _disruption(status):
        reason = disruption.get("reason", "")
        state, what = DISRUPTIONS.get(reason, ("failed", f"was ended ({reason})"))
        return PodFailure(state, _with_message(what, disruption.get("message")))
    for source in (status, end):
        reason = source.get("reason") or ""
        if reason in REASONS:
            state, what = REASONS[reason]
            return PodFailure(state, _with_message(what, source.get("message")))
    if reason := status.get("reason"):
        return PodFailure("failed", _with_message(reason, status.get("message")))
    return None


def _with_message(what: str, message: str | None) -> str:
    return f"{what}: {' '.join(message.split())[:300]}" if message else what


def _waiting_for(status: Mapping[str, Any], container: str) -> str:
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    return container or "not scheduled yet"


def pending_text(pods: Collection[PodState], total: int, seconds: float) -> str:
    """Return how many pods of a run have not started, since when, and the most common reason."""
    waiting = [pod for pod in pods if not (pod.started or pod.over)]
    reasons = Counter(pod.waiting_for for pod in waiting).most_common(1)
    reason = reasons[0][0] if reasons else "Kubernetes has not created them"
    shown_s = max((mark for mark in SHOWN_S if mark <= seconds), default=0)
    since = f" since {shown_s:,} s" if shown_s else ""
    return f"{total - len(pods) + len(waiting)} of {total} pods pending{since}: {reason}"
