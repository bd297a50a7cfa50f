"""Run on Kubernetes: a workload, the states of its pods, and the records that they print."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.hardware import KubernetesName, WorkloadKind
from paceline.core.hosts import compress
from paceline.core.job import Job
from paceline.core.units import pluralize, si
from paceline.core.value import Value
from paceline.files.documents import read_value, write_value
from paceline.files.run_folder import (
    LOGS_FOLDER,
    RESULT_FILE,
    RUN_FILE,
    SCRIPT_FILE,
)
from paceline.machines import Handle, JobEnd
from paceline.machines.kubernetes.client import Kubectl, KubectlStream, well_formed
from paceline.machines.kubernetes.manifest import (
    CONTAINER_NAMES,
    GRACE_S,
    JOB_NAME,
    MAX_NAME,
    NAME,
    PRINTING_ROLES,
    ROLE_LABEL,
    RUN_LABEL,
    Manifest,
    cluster_of,
    manifests,
)
from paceline.machines.kubernetes.pods import HOPELESS, PodState, pending_text, pod_state
from paceline.machines.node.records import packed_run, write_record
from paceline.machines.node.script import open_variables, secret_variables
from paceline.machines.ray.submission import REQUEST_FILE, job_programs, job_request

RECORD_FILE = "kubernetes.json"
OWN_FILES = (RUN_FILE, RECORD_FILE, SCRIPT_FILE, RESULT_FILE)
"""Files that no pod may replace."""
MESSAGES_FILE = "kubectl.log"
"""Messages of kubectl; the output of node.sh is in host-*.log."""
POD_PROGRAM, ARCHIVE = "pod_program.py", "run.tar.gz"
MAX_ARCHIVE_BYTES = 1_000_000
"""Maximum size of a run's files: a ConfigMap holds up to 1 MiB."""
FOLLOW_S = 5.0
"""Time in seconds that the other pods have to report their own failures after the first one."""
STOP_LIMIT_S = GRACE_S + 30.0
"""Time in seconds that Kubernetes has to end the pods of a deleted workload."""
RETRY_S = 2.0
"""Minimum time in seconds between two starts of the same kubectl."""
IMAGE_LIMIT_S = 30.0
"""Time in seconds for which the image of a pod may fail to be pulled."""
EVENTS_S = 5.0
"""Time in seconds between two queries for the reason of missing pods."""
DRAIN_S = 10.0
"""Time in seconds that the last records have to arrive after the end of all pods."""
SILENT_S = 10.0
"""Time in seconds without an answer of Kubernetes after which the phase reports it."""
MAX_LINE = 200
"""Maximum number of characters of a pod's last line that are shown."""
POLL_S = 0.1
KILLED = 137
"""Exit code of a container that was ended by SIGKILL."""
LOST_CODE = 255
ENDED_BY_US = 143
"""Exit code of a deleted job, as in a shell: 128 + SIGTERM."""


class KubernetesRecord(Value):
    """Contents of kubernetes.json in a run folder."""

    name: str = Field(max_length=MAX_NAME, pattern=NAME)
    """Name of the workload."""
    kind: WorkloadKind
    context: str | None = None
    namespace: KubernetesName | None = None
    exit_code: int | None = None
    """Exit code of the job, once it has ended."""


@dataclass
class KubernetesRun(Handle):
    """A workload that was created, and what is known of its pods."""

    job: Job
    folder: Path
    record: KubernetesRecord
    kubectl: Kubectl
    created: Sequence[Manifest]
    """Objects of the run; the last one is the workload."""
    pods: dict[str, PodState] = field(default_factory=dict[str, PodState])
    ends: dict[int, int] = field(default_factory=dict[int, int])
    """Exit code of the agent of each node that has reported it."""
    _reporting_pods: set[str] = field(default_factory=set[str])
    """Pods whose agent has reported its end."""
    _first_failure: PodState | None = None
    """State of the pod that failed first, before this process deleted them."""
    _last_lines: dict[str, str] = field(default_factory=dict[str, str])
    """Last line of each pod's output that is not a record."""
    _watch: KubectlStream | None = None
    _logs: KubectlStream | None = None
    _logged_pods: frozenset[str] = frozenset()
    """Pods whose output the stream of logs includes."""
    _unseen_pods: set[str] = field(default_factory=set[str])
    """Pods that a new watch has not reported yet; they may have been deleted meanwhile."""
    _watch_started_s: float = -math.inf
    _logs_started_s: float = -math.inf
    _answered_s: float = field(default_factory=time.monotonic)
    _created_s: float = field(default_factory=time.monotonic)
    _events_s: float = field(default_factory=time.monotonic)
    _events_text: str = ""
    _error_s: float | None = None
    """Time since which an image cannot be pulled."""
    _failed_s: float | None = None
    _over_s: float | None = None
    _deadline: float | None = None
    _is_ending: bool = False
    _code: int | None = None
    _warnings: list[str] = field(default_factory=list[str])

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed since all pods started."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def waiting(self) -> bool:
        """True until all pods have started."""
        return self._num_started < self.job.nodes and not self.ends

    @property
    def phase(self) -> str:
        """Reason why pods have not started, or the nodes that they run on."""
        if time.monotonic() - self._answered_s > SILENT_S:
            return f"Kubernetes does not answer; {self.record.name} keeps running"
        if not self.waiting:
            return f"running on {compress(self._node_names()) or self.record.name}"
        is_partial = len(self._node_pods()) < self.job.nodes
        if is_partial and (reason := self._events_text or self._queue_text):
            return f"{self.job.nodes - len(self.pods)} of {self.job.nodes} pods wait: {reason}"
        waited_s = time.monotonic() - self._created_s
        return pending_text(self._node_pods(), self.job.nodes, waited_s)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems with the pods that did not end the run."""
        return tuple(self._warnings)

    def poll(self) -> int | None:
        """Return the exit code if the job has ended on all nodes, else None.

        Raises SystemFaultError if a pod cannot start.
        """
        if self._code is not None:
            return self._code
        self._update()
        if fault := self._start_fault():
            self.stop()
            raise fault
        if self._failure_is_clear() or self._has_ended():
            return self._end(self._exit_code())
        return None

    def stop(self) -> int:
        """Delete the workload, wait until its pods have ended, and return the exit code."""
        if self._code is not None:
            return self._code
        code = self._exit_code()
        return self._end(ENDED_BY_US if code in (0, LOST_CODE) else code)

    def sweep(self) -> None:
        """Do nothing, because the end of a job has deleted its objects."""

    def verdict(self) -> JobEnd | None:
        """Return what Kubernetes knows of the end: which pod failed on which node, and how."""
        failed = [pod for pod in self.pods.values() if pod.failure]
        failed.sort(key=lambda pod: (pod.failure and pod.failure.status) != "oom")
        if failed and failed[0].failure:
            failure = failed[0].failure
            names = tuple(dict.fromkeys(pod.node for pod in failed if pod.node))
            return JobEnd(failure.status, f"{failed[0].title}: {failure.reason}", names)
        first = self._first_failure
        if first is None or (first.name in self._reporting_pods and not first.is_deleting):
            return None
        if first.is_deleting or first.deleted:
            return JobEnd("failed", f"{first.title}: was deleted by another user or controller")
        line = self._last_lines.get(first.name)
        signal = " (killed)" if first.exit_code == KILLED else ""
        reason = f"ended with code {first.exit_code}{signal}{f': {line}' if line else ''}"
        return JobEnd("failed", f"{first.title}: {reason}", (first.node,) if first.node else ())

    @property
    def _queue_text(self) -> str:
        settings = cluster_of(self.job).kubernetes
        return f"waits in queue {settings.queue}" if settings.queue else ""

    @property
    def _selector(self) -> str:
        return f"{RUN_LABEL}={self.record.name}"

    def _node_pods(self) -> list[PodState]:
        return [pod for pod in self.pods.values() if pod.role == "node"]

    def _printing_pods(self) -> list[PodState]:
        """Return the pods that print records: one per node, or one for all nodes."""
        return [pod for pod in self.pods.values() if pod.role == self._printing_role]

    @property
    def _num_started(self) -> int:
        return sum(pod.started for pod in self._node_pods())

    def _node_names(self) -> list[str]:
        return list(dict.fromkeys(pod.node for pod in self._node_pods() if pod.node))

    def _update(self) -> None:
        """Read the states of the pods and their output."""
        self._read_states()
        self._read_logs()
        if not self.waiting and self._deadline is None and self.job.timeout_s is not None:
            self._deadline = time.monotonic() + self.job.timeout_s
        is_due = time.monotonic() - self._events_s > EVENTS_S
        if self.waiting and is_due and not self._is_ending:
            self._events_s = time.monotonic()
            self._events_text = self._warning_event()

    def _read_states(self) -> None:
        """Read the events of the pods; start another watch if the last one has ended."""
        now = time.monotonic()
        watched_s = now - self._watch_started_s
        if self._watch is None and watched_s > RETRY_S:
            self._watch_started_s, self._unseen_pods = now, set(self.pods)
            options = ["--watch", "--output-watch-events", "--output=json"]
            words = self.kubectl.words("get", "pods", f"--selector={self._selector}", *options)
            self._watch = KubectlStream.start(words, self._messages)
        if self._watch is None:
            return
        has_ended = self._watch.ended
        for event in self._watch.values():
            self._answered_s = now
            self._update_pod(event)
        if has_ended:
            self._watch.close()
            self._watch = None
        elif watched_s > RETRY_S:
            self._answered_s = now  # kubectl ends when it loses its connection
            for name in self._unseen_pods:
                self._store(replace(self.pods[name], deleted=True))
            self._unseen_pods.clear()

    def _update_pod(self, event: dict[str, Any]) -> None:
        with well_formed():
            pod, is_deleted = event.get("object", {}), event.get("type") == "DELETED"
            state = pod_state(pod, ROLE_LABEL) if pod.get("kind") == "Pod" else None
        if state is not None:
            self._unseen_pods.discard(state.name)
            self._store(replace(state, deleted=is_deleted))

    def _store(self, state: PodState) -> None:
        """Store the state of a pod, and what an earlier state of it says about its end."""
        if earlier := self.pods.get(state.name):
            code = earlier.exit_code if state.exit_code is None else state.exit_code
            state = replace(state, failure=state.failure or earlier.failure, exit_code=code)
        self.pods[state.name] = state
        is_removed = state.is_deleting or state.deleted
        if state.exit_code != 0 and (state.failure or state.exit_code or is_removed):
            self._note_failure(state)

    def _note_failure(self, pod: PodState) -> None:
        if self._first_failure is None and not self._is_ending:
            self._first_failure, self._failed_s = pod, time.monotonic()

    def _read_logs(self) -> None:
        """Read records; follow pods that have started since as well.

        A new stream repeats the records of the earlier one, which is harmless.
        """
        now = time.monotonic()
        names = frozenset(p.name for p in self._printing_pods() if p.started and not p.deleted)
        has_ended = self._logs is not None and self._logs.ended
        if self._logs is not None:
            for line in self._logs.lines():
                self._handle_line(line)
        is_new = not names <= self._logged_pods
        if self._logs is not None and has_ended and (is_new or self._is_unfinished()):
            self._logs.close()
            self._logs = None
        is_due = now - self._logs_started_s > RETRY_S
        if names and is_due and (self._logs is None or is_new):
            if self._logs is not None:
                self._logs.close()
            self._logs_started_s, self._logged_pods = now, names
            self._logs = KubectlStream.start(self._log_words(), self._messages)

    @property
    def _messages(self) -> Path:
        return self.folder / LOGS_FOLDER / MESSAGES_FILE

    def _log_words(self) -> list[str]:
        return self.kubectl.words(
            "logs",
            f"--selector={self._selector},{ROLE_LABEL}={self._printing_role}",
            f"--container={CONTAINER_NAMES.get(self.record.kind, JOB_NAME)}",
            "--follow",
            "--prefix",
            "--tail=-1",
            "--ignore-errors",
            f"--max-log-requests={self.job.nodes + 1}",
        )

    def _is_unfinished(self) -> bool:
        return any(not pod.over for pod in self._printing_pods())

    def _handle_line(self, line: str) -> None:
        """Process one line `[pod/NAME/CONTAINER] TEXT`."""
        prefix, _, text = line.partition("] ")
        pod = prefix.partition("/")[2].partition("/")[0]
        match text.split(" "):
            case ["@file", _, name, offset, data]:
                write_record(self.folder, name, offset, data, OWN_FILES)
            case ["@start", _, _]:
                return
            case ["@end", node, code] if _is_end(node, code, self.job.nodes):
                self.ends.setdefault(int(node), int(code))
                self._reporting_pods.add(pod)
                if code != "0":
                    self._note_failure(self.pods.get(pod) or PodState(pod, "node"))
            case _ if text.strip():
                self._last_lines[pod] = text.strip()[:MAX_LINE]

    def _start_fault(self) -> SystemFaultError | None:
        """Return the error for pods that cannot start, once their retries are pointless."""
        pods = [pod for pod in self.pods.values() if pod.error and not pod.over]
        if not pods:
            self._error_s = None
            return None
        now = time.monotonic()
        self._error_s = self._error_s or now
        is_hopeless = any(pod.error and pod.error.startswith(HOPELESS) for pod in pods)
        if not is_hopeless and now - self._error_s < IMAGE_LIMIT_S:
            return None
        hosts = [pod.node for pod in pods if pod.node]
        return SystemFaultError(
            pods[0].title,
            f"its container cannot start: {pods[0].error}",
            remedy="check kubernetes.image and kubernetes.pull_secrets",
            hosts=hosts,
        )

    def _failure_is_clear(self) -> bool:
        """Return True if a pod has failed, and the others have had `FOLLOW_S` to report."""
        return self._failed_s is not None and time.monotonic() - self._failed_s > FOLLOW_S

    def _has_ended(self) -> bool:
        """Return True if all nodes have reported their end, or all pods are over and drained."""
        if len(self.ends) == self.job.nodes:
            return True
        pods = self._printing_pods()
        are_over = len(pods) >= self._num_printing and all(pod.over for pod in pods)
        self._over_s = (self._over_s or time.monotonic()) if are_over else None
        return self._over_s is not None and time.monotonic() - self._over_s > DRAIN_S

    @property
    def _num_printing(self) -> int:
        return self.job.nodes if self._printing_role == "node" else 1

    @property
    def _printing_role(self) -> str:
        return PRINTING_ROLES.get(self.record.kind, "node")

    def _exit_code(self) -> int:
        codes = [code for code in self.ends.values() if code]
        codes += [pod.exit_code for pod in self.pods.values() if pod.exit_code]
        if codes:
            return codes[0]
        return 0 if len(self.ends) == self.job.nodes else LOST_CODE

    def _end(self, code: int) -> int:
        """Delete the objects, read what the pods still print, and record the end."""
        try:
            self._delete()
        finally:
            for stream in (self._watch, self._logs):
                if stream is not None:
                    stream.close()
            self._watch = self._logs = None
        self._code = code
        self.record = self.record.model_copy(update={"exit_code": code})
        write_value(self.folder / RECORD_FILE, self.record)
        return code

    def _delete(self) -> None:
        """Delete the objects, and wait until no pod runs any more."""
        self._is_ending = True
        try:
            self.kubectl.delete([*reversed(self.created)])
        except PacelineError as error:
            self._warnings.append(
                f"{self.record.name} could not be deleted and may keep running: {error}"
            )
            return
        deadline = time.monotonic() + STOP_LIMIT_S
        while any(not pod.over for pod in self.pods.values()) and time.monotonic() < deadline:
            self._update()
            time.sleep(POLL_S)
        if running := [pod.name for pod in self.pods.values() if not pod.over]:
            self._warnings.append(
                f"{pluralize(len(running), 'pod')} did not end within {STOP_LIMIT_S:.0f} s; check "
                f"`kubectl get pods --selector={self._selector}`"
            )
        deadline = time.monotonic() + DRAIN_S
        while self._logs and len(self.ends) < self.job.nodes and time.monotonic() < deadline:
            has_ended = self._logs.ended
            for line in self._logs.lines():
                self._handle_line(line)
            if has_ended:
                break
            time.sleep(POLL_S)

    def _warning_event(self) -> str:
        """Return the latest warning about the workload and its jobs; empty if there is none.

        Kubernetes reports an exceeded quota, a missing queue or volume only there.
        """
        try:
            events = self.kubectl.get("events", "--field-selector=type=Warning")
        except PacelineError:
            return ""
        with well_formed():
            ours = [
                event
                for event in events["items"]
                if event["involvedObject"]["name"].startswith(self.record.name)
            ]
            ours.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
            return " ".join(ours[-1].get("message", "").split())[:300] if ours else ""


def start_run(job: Job, folder: Path, name: str) -> KubernetesRun:
    """Create the objects of a job.

    Raises SystemFaultError with the message of Kubernetes if it refuses one of them; those that had
    been created are then deleted.
    """
    settings = cluster_of(job).kubernetes
    kubectl = Kubectl.of(settings)
    kubectl.get("pods", f"--selector={RUN_LABEL}={name}")  # fails early if pods cannot be read
    kind, context, namespace = settings.kind, settings.context, settings.namespace
    record = KubernetesRecord(name=name, kind=kind, context=context, namespace=namespace)
    documents = [*_data(job, folder, name), *manifests(job, name)]
    write_value(folder / RECORD_FILE, record)
    created: list[Manifest] = []
    try:
        for document in documents:
            created.append(kubectl.create(document))
        kubectl.set_owner(created[-1], created[:-1])
    except BaseException as error:
        with contextlib.suppress(PacelineError):
            if created:
                kubectl.delete(created)
            final = record.model_copy(update={"exit_code": LOST_CODE})
            write_value(folder / RECORD_FILE, final)
        raise error
    return KubernetesRun(job, folder, record, kubectl, documents)


def follow_run(job: Job, folder: Path) -> KubernetesRun | None:
    """Return the run that a controller has left in Kubernetes; None if it has ended or is gone.

    Raises SystemFaultError if Kubernetes does not answer.
    """
    record = read_record(folder)
    if record is None or record.exit_code is not None:
        return None
    kubectl = Kubectl(record.context, record.namespace)
    documents = manifests(job, record.name)
    if not kubectl.exists(documents[-1]):
        return None
    return KubernetesRun(job, folder, record, kubectl, documents)


def read_record(folder: Path) -> KubernetesRecord | None:
    """Return kubernetes.json of a run folder, or None if the run did not use Kubernetes."""
    try:
        return read_value(folder / RECORD_FILE, KubernetesRecord)
    except UserError:
        return None


def _data(job: Job, folder: Path, name: str) -> list[Manifest]:
    """Return the ConfigMap with the files of the run folder, and the Secret if there are secrets.

    Raises UserError if the files are too large for a ConfigMap.
    """
    archive = packed_run(job, folder, (RUN_FILE, RECORD_FILE, SCRIPT_FILE))
    size = len(archive)
    if size > MAX_ARCHIVE_BYTES:
        raise UserError(
            str(folder),
            f"holds {si(size, 'B')} of compressed files, more than a ConfigMap does",
            allowed=si(MAX_ARCHIVE_BYTES, "B"),
            remedy="put large files on a volume (kubernetes.volumes)",
        )
    namespace = cluster_of(job).kubernetes.namespace
    metadata: Manifest = {"name": name, "labels": {RUN_LABEL: name}}
    metadata |= {"namespace": namespace} if namespace else {}
    documents: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": _programs(job, name),
            "binaryData": {ARCHIVE: base64.b64encode(archive).decode()},
        }
    ]
    if secrets := secret_variables(job.env):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        documents.append({**secret, "type": "Opaque", "stringData": secrets})
    return documents


def _programs(job: Job, name: str) -> dict[str, str]:
    """Return the programs of the pods, and what they read, by file name."""
    if cluster_of(job).kubernetes.kind == "rayjob":
        request = job_request(job, name, open_variables(job.env))
        return {**job_programs(), REQUEST_FILE: json.dumps(request)}
    program = resources.files("paceline.machines.kubernetes") / POD_PROGRAM
    return {POD_PROGRAM: program.read_text("utf-8")}


def _is_end(node: str, code: str, num_nodes: int) -> bool:
    """Return True if a record names a node of the run and an exit code."""
    is_code = all(re.fullmatch("[0-9]{1,9}", text) for text in (node, code))
    return is_code and int(node) < num_nodes and int(code) <= 255
