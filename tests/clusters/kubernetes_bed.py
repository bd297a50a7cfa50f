"""A small Kubernetes for tests: API server, controllers, and pods that are real processes.

The API server does what kubectl needs for discovery, create, get, watch, patch, logs and delete.
Controllers make Jobs of JobSets and pods of Jobs, place one pod on a node at a time, and delete
what an owner leaves behind. A node is a virtual host of the test bed. A pod is a process there,
with a host name, process numbers and a /mnt of its own; names of pods are in /etc/hosts.
Images, volumes other than those of a run, and permissions are not simulated.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.clusters.bed import Bed, Plan
from tests.clusters.bed.needs import need, need_programs
from tests.clusters.bed.process import Process

Item = dict[str, Any]
POLL_S = 0.05
EVICTED_S, REMOVED_S = 1.0, 8.0
"""Seconds after which pods of a lost node are evicted (five minutes in a real cluster), and after
which the node is removed and its pods with it."""
NAMESPACE = "bench"
RESOURCES = {
    ("", "v1"): {
        "pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "secrets": "Secret",
        "events": "Event", "nodes": "Node",
    },
    ("batch", "v1"): {"jobs": "Job"},
    ("jobset.x-k8s.io", "v1alpha2"): {"jobsets": "JobSet"},
}  # fmt: skip
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
START_POD = r"""
set -e
hostname "$1"
mount -t tmpfs tmpfs /mnt
mkdir -p /mnt/paceline/files /mnt/paceline/run
cp "$2"/* /mnt/paceline/files
shift 2
exec "$@"
"""


@dataclass
class Container:
    """The process of a pod."""

    process: subprocess.Popen[bytes]
    log: Path
    killed_by: str | None = None
    """Reason that the status gives for its end, for example OOMKilled."""
    ending_s: float | None = None

    @property
    def first(self) -> Process | None:
        """Its process number 1, seen from outside."""
        pending = [self.process.pid]
        while pending:
            pid = pending.pop()
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid")).split()
                process = Process.of(pid)
                if numbers[-1] == "1" and process:
                    return process
                pending += process.children if process else []
        return None

    def signal(self, number: int) -> None:
        """Send a signal to its process number 1."""
        if first := self.first:
            first.kill(number)


@dataclass
class Kubernetes:
    """State of the API server, its controllers and its nodes."""

    bed: Bed
    folder: Path
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    """Objects by plural resource and name; there is one namespace."""
    events: list[tuple[int, str, str, Item]] = field(default_factory=list)
    """Version, resource, type and object of every change."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    containers: dict[str, Container] = field(default_factory=dict)
    quota: int | None = None
    """Maximum number of pods."""
    image_error: str | None = None
    """Message of a registry for every image."""
    lost: dict[str, float] = field(default_factory=dict)
    """Nodes whose kubelet does not answer any more, since when."""
    closed: bool = False
    version: int = 0
    requests: list[str] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    @property
    def kubeconfig(self) -> Path:
        """Configuration of kubectl."""
        return self.folder / "config"

    def start(self) -> None:
        """Start the API server and the controllers."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.server.daemon_threads = True
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "contexts": [
                {"name": "bed", "context": {"cluster": "bed", "user": "u", "namespace": NAMESPACE}}
            ],
            "clusters": [{"name": "bed", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {}}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        for name in self.bed.names:
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}}
            self.store("nodes", {**node, "status": status}, "ADDED")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        threading.Thread(target=self.control, daemon=True).start()

    def down(self) -> None:
        """End all pods and the server."""
        self.closed = True
        for container in self.containers.values():
            container.signal(signal.SIGKILL)
            container.process.kill()
            container.process.wait()
        if self.server:
            self.server.shutdown()
            self.server.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, resource: str, item: Item, change: str) -> Item:
        """Store an object, or its removal, and tell the watchers."""
        with self.changed:
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            key = (resource, item["metadata"]["name"])
            if change == "DELETED":
                self.items.pop(key, None)
            else:
                self.items[key] = item
            self.events.append((self.version, resource, change, json.loads(json.dumps(item))))
            self.changed.notify_all()
        return item

    def create(self, resource: str, item: Item, owner: Item | None = None) -> Item | None:
        """Store a new object; None if its name is taken."""
        metadata = item["metadata"]
        with self.changed:
            if (resource, metadata["name"]) in self.items:
                return None
            metadata |= {"uid": str(uuid.uuid4()), "namespace": NAMESPACE}
            metadata["creationTimestamp"] = now()
            if owner:
                reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
                reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
                metadata["ownerReferences"] = [{**reference, "controller": True}]
            return self.store(resource, item, "ADDED")

    def delete(self, resource: str, item: Item) -> None:
        """Begin to delete an object; the controllers remove it."""
        if not item["metadata"].get("deletionTimestamp"):
            item["metadata"]["deletionTimestamp"] = now()
            self.store(resource, item, "MODIFIED")

    def of(self, resource: str) -> list[Item]:
        """All objects of a resource."""
        return [item for (kind, _), item in list(self.items.items()) if kind == resource]

    def owned(self, owner: Item) -> list[tuple[str, Item]]:
        """Objects that another one owns, with their resources."""
        uid = owner["metadata"]["uid"]
        return [
            (resource, item)
            for (resource, _), item in list(self.items.items())
            if any(r["uid"] == uid for r in item["metadata"].get("ownerReferences", ()))
        ]

    def kill(self, pod: str, reason: str = "Error") -> None:
        """Kill a pod's processes, as the kernel or a node would."""
        self.containers[pod].killed_by = reason
        self.containers[pod].signal(signal.SIGKILL)

    def lose(self, node: str) -> None:
        """Stop a node: nobody reports its pods' end, and Kubernetes evicts them after a while."""
        with self.changed:
            self.lost[node] = time.monotonic()
            for pod in self.of("pods"):
                if pod["spec"].get("nodeName") == node:
                    self.containers[pod["metadata"]["name"]].signal(signal.SIGKILL)

    def pods(self) -> list[str]:
        """Names of the pods."""
        return [pod["metadata"]["name"] for pod in self.of("pods")]

    def control(self) -> None:
        """Run the controllers until the end."""
        while not self.closed:
            with self.changed:
                for jobset in self.of("jobsets"):
                    self.control_jobset(jobset)
                for job in self.of("jobs"):
                    self.control_job(job)
                for pod in self.of("pods"):
                    self.control_pod(pod)
                for resource in ("services", "configmaps", "secrets"):
                    for item in self.of(resource):
                        if item["metadata"].get("deletionTimestamp"):
                            self.store(resource, item, "DELETED")
            time.sleep(POLL_S)

    def remove(self, resource: str, item: Item) -> bool:
        """Remove an object that is being deleted after all that it owns; False if it is not."""
        if not item["metadata"].get("deletionTimestamp"):
            return False
        dependents = self.owned(item)
        for kind, dependent in dependents:
            self.delete(kind, dependent)
        if not dependents:
            self.store(resource, item, "DELETED")
        return True

    def control_jobset(self, jobset: Item) -> None:
        if self.remove("jobsets", jobset) or jobset["spec"].get("suspend"):
            return
        for replicated in jobset["spec"]["replicatedJobs"]:
            name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
            if ("jobs", name) not in self.items:
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
                spec = json.loads(json.dumps(replicated["template"]["spec"]))
                self.create("jobs", {**job, "spec": spec}, jobset)

    def control_job(self, job: Item) -> None:
        if self.remove("jobs", job) or job.get("status", {}).get("failed"):
            return
        pods = [pod for _, pod in self.owned(job)]
        if any(pod["status"]["phase"] == "Failed" for pod in pods):
            job["status"] = {"failed": 1}
            self.store("jobs", job, "MODIFIED")
            for pod in pods:
                if pod["status"]["phase"] in ("Pending", "Running"):
                    self.delete("pods", pod)
            return
        existing = {pod["metadata"]["annotations"][INDEX] for pod in pods}
        for index in map(str, range(job["spec"]["completions"])):
            if index not in existing:
                self.create_pod(job, index)

    def create_pod(self, job: Item, index: str) -> None:
        name = job["metadata"]["name"]
        if self.quota is not None and len(self.of("pods")) >= self.quota:
            used = len(self.of("pods"))
            text = f'pods "{name}-{index}" is forbidden: exceeded quota: small, requested: pods=1, '
            text += f"used: pods={used}, limited: pods={self.quota}"
            self.warn(job, "FailedCreate", text)
            return
        template = json.loads(json.dumps(job["spec"]["template"]))
        metadata = {**template["metadata"], "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}"}
        metadata["annotations"] = {**metadata.get("annotations", {}), INDEX: index}
        spec = {**template["spec"], "hostname": f"{name}-{index}"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.create("pods", {**pod, "status": {"phase": "Pending"}}, job)

    def warn(self, item: Item, reason: str, message: str) -> None:
        name = f"{item['metadata']['name']}.{reason}"
        reference = {"kind": item["kind"], "name": item["metadata"]["name"]}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, "type": "Warning"}
        event |= {"involvedObject": reference, "reason": reason, "message": message}
        self.create("events", {**event, "lastTimestamp": now()})

    def control_pod(self, pod: Item) -> None:
        name = pod["metadata"]["name"]
        container = self.containers.get(name)
        if (lost_s := self.lost.get(pod["spec"].get("nodeName", ""))) is not None:
            self.control_lost_pod(pod, time.monotonic() - lost_s)
            return
        if container is None:
            if pod["metadata"].get("deletionTimestamp"):
                self.store("pods", pod, "DELETED")
            elif not pod["spec"].get("nodeName"):
                self.schedule(pod)
            elif pod["status"]["phase"] == "Pending":
                self.start_pod(pod)
            return
        code = container.process.poll()
        if code is not None and pod["status"]["phase"] == "Running":
            first_code = 137 if container.killed_by else 128 - code if code < 0 else code
            reason = container.killed_by or ("Completed" if first_code == 0 else "Error")
            end = {"terminated": {"exitCode": first_code, "reason": reason}}
            pod["status"]["phase"] = "Succeeded" if first_code == 0 else "Failed"
            pod["status"]["containerStatuses"][0]["state"] = end
            self.store("pods", pod, "MODIFIED")
        if not pod["metadata"].get("deletionTimestamp"):
            return
        if code is not None:
            self.store("pods", pod, "DELETED")
        elif container.ending_s is None:
            container.ending_s = time.monotonic()
            container.signal(signal.SIGTERM)
        elif time.monotonic() - container.ending_s > pod["spec"]["terminationGracePeriodSeconds"]:
            container.signal(signal.SIGKILL)

    def control_lost_pod(self, pod: Item, since_s: float) -> None:
        """Evict a pod whose node does not answer, and forget it when the node is removed."""
        if since_s > REMOVED_S:
            self.store("pods", pod, "DELETED")
        elif since_s > EVICTED_S and not self.is_evicted(pod):
            text = "Taint manager: deleting due to NoExecute taint"
            condition = {"type": "DisruptionTarget", "status": "True", "message": text}
            condition["reason"] = "DeletionByTaintManager"
            pod["status"]["conditions"] = [*pod["status"].get("conditions", ()), condition]
            pod["metadata"]["deletionTimestamp"] = now()
            self.store("pods", pod, "MODIFIED")

    @staticmethod
    def is_evicted(pod: Item) -> bool:
        """Whether a pod has been evicted from its node."""
        return any(c["type"] == "DisruptionTarget" for c in pod["status"].get("conditions", ()))

    def schedule(self, pod: Item) -> None:
        """Give the pod a free node that its affinity allows."""
        busy = {
            other["spec"].get("nodeName")
            for other in self.of("pods")
            if other["status"]["phase"] in ("Pending", "Running")
        }
        (apart,) = pod["spec"]["affinity"].get("nodeAffinity", {"none": None}).values()
        terms = apart["nodeSelectorTerms"] if apart else [{"matchFields": []}]
        nodes = [
            n["metadata"]["name"] for n in self.of("nodes") if not n["spec"].get("unschedulable")
        ]
        able = [node for node in nodes if any(matches(node, term) for term in terms)]
        free = [node for node in able if node not in busy]
        if free:
            pod["spec"]["nodeName"] = free[0]
        message = f"0/{len(nodes)} nodes are available: {len(able)} Insufficient cpu."
        condition = {"type": "PodScheduled", "status": "True" if free else "False"}
        if not free:
            condition |= {"reason": "Unschedulable", "message": message}
        if free or not pod["status"].get("conditions"):
            pod["status"]["conditions"] = [condition]
            self.store("pods", pod, "MODIFIED")

    def start_pod(self, pod: Item) -> None:
        """Start the command of the pod's container on its node."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        container = spec["containers"][0]
        if self.image_error:
            waiting = {"reason": "InvalidImageName", "message": self.image_error}
            if not pod["status"].get("containerStatuses"):
                pod["status"]["containerStatuses"] = [{"state": {"waiting": waiting}}]
                self.store("pods", pod, "MODIFIED")
            return
        files = self.items.get(("configmaps", spec["volumes"][0]["configMap"]["name"]))
        if files is None:
            return  # the kubelet waits for the ConfigMap of a volume
        folder = self.folder / name
        folder.mkdir()
        for key, text in files.get("data", {}).items():
            (folder / key).write_text(text)
        for key, text in files.get("binaryData", {}).items():
            (folder / key).write_bytes(base64.b64decode(text))
        host = self.bed.host(spec["nodeName"])
        with self.bed.hosts_file.open("a") as names:
            print(
                host.address,
                f"{spec['hostname']}.{spec['subdomain']}",
                spec["hostname"],
                file=names,
            )
        env = {"PATH": os.environ["PATH"], "HOME": "/root", "TMPDIR": "/tmp"}
        env |= {entry["name"]: self.value_of(entry, pod) for entry in container["env"]}
        env["JOB_COMPLETION_INDEX"] = pod["metadata"]["annotations"][INDEX]
        words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += ["sh", "-c", START_POD, "pod", spec["hostname"], str(folder)]
        with (log := folder / "container.log").open("wb") as output:
            process = subprocess.Popen(
                host.argv([*words, *container["command"]]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self.containers[name] = Container(process, log)
        pod["status"] |= {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
        self.store("pods", pod, "MODIFIED")

    def value_of(self, entry: Item, pod: Item) -> str:
        """Value of a variable of a container."""
        if "value" in entry:
            return entry["value"]
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            secret = self.items["secrets", source["secretKeyRef"]["name"]]
            return secret["stringData"][source["secretKeyRef"]["key"]]
        assert source["fieldRef"]["fieldPath"] == "spec.nodeName"
        return pod["spec"]["nodeName"]


INDEX = "batch.kubernetes.io/job-completion-index"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def matches(node: str, term: Item) -> bool:
    """Whether a node's name fulfils all expressions of a term."""
    return all(
        (node in part["values"]) == (part["operator"] == "In") for part in term["matchFields"]
    )


def selected(item: Item, query: dict[str, list[str]]) -> bool:
    """Whether an object has the labels and the type that a query asks for."""
    labels = item["metadata"].get("labels", {})
    wanted = [part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part]
    fields = [part.split("=") for part in query.get("fieldSelector", [""])[0].split(",") if part]
    flat = {**item, **{f"metadata.{key}": value for key, value in item["metadata"].items()}}
    return all(labels.get(key) == value for key, value in wanted) and all(
        flat.get(key) == value for key, value in fields
    )


def handler_of(cluster: Kubernetes) -> type[BaseHTTPRequestHandler]:
    """The class that answers requests for a cluster."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionError):  # kubectl was killed
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            cluster.requests.append(format % args)

        def reply(self, content: Item, code: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def fail(self, code: int, reason: str, message: str) -> None:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            self.reply({**status, "reason": reason, "message": message}, code)

        def stream(self, blocks: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):
                for block in blocks:
                    if block:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
                        self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        def split(self) -> tuple[str, list[str], dict[str, list[str]]]:
            """Group and version, the parts after them without the namespace, and the query."""
            url = urlsplit(self.path)
            parts = [part for part in url.path.split("/") if part]
            cut = 2 if parts[:1] == ["api"] else 3
            prefix, parts = "/".join(parts[:cut]), parts[cut:]
            if parts[:1] == ["namespaces"]:
                parts = parts[2:]
            return prefix, parts, parse_qs(url.query)

        def do_GET(self) -> None:
            prefix, parts, query = self.split()
            if prefix.startswith("openapi/"):
                prefix, parts = "/".join([prefix, *parts]), []
            if not parts:
                content = discovery(prefix)
                if content is None:
                    return self.fail(404, "NotFound", "the server could not find the resource")
                return self.reply(content)
            resource, *more = parts
            kind = kind_of(prefix, resource)
            if more[1:] == ["log"]:
                return self.stream(log_blocks(more[0], "true" in query.get("follow", [""])))
            if more:
                item = cluster.items.get((resource, more[0]))
                if item is None:
                    return self.fail(404, "NotFound", f'{resource} "{more[0]}" not found')
                return self.reply(item)
            if "true" in query.get("watch", [""]) or "1" in query.get("watch", [""]):
                return self.stream(watch_blocks(resource, query))
            with cluster.changed:
                items = [item for item in cluster.of(resource) if selected(item, query)]
                version = str(cluster.version)
            return self.reply(
                {
                    "kind": f"{kind}List",
                    "apiVersion": prefix.partition("/")[2],
                    "metadata": {"resourceVersion": version},
                    "items": items,
                }
            )

        def body(self) -> Item:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")

        def do_POST(self) -> None:
            _, (resource, *_), _ = self.split()
            item = self.body()
            name = item["metadata"]["name"]
            if cluster.create(resource, item) is None:
                return self.fail(409, "AlreadyExists", f'{resource} "{name}" already exists')
            return self.reply(item, 201)

        def do_PATCH(self) -> None:
            _, (resource, name), _ = self.split()
            patch = self.body()
            item = cluster.items[resource, name]
            item["metadata"] |= patch["metadata"]
            self.reply(cluster.store(resource, item, "MODIFIED"))

        def do_DELETE(self) -> None:
            _, (resource, name), _ = self.split()
            self.body()
            item = cluster.items.get((resource, name))
            if item is None:
                return self.fail(404, "NotFound", f'{resource} "{name}" not found')
            cluster.delete(resource, item)
            return self.reply(item)

    def watch_blocks(resource: str, query: dict[str, list[str]]) -> Iterator[bytes]:
        seen = int(query.get("resourceVersion", ["0"])[0] or 0)
        while not cluster.closed:
            with cluster.changed:
                new = [e for e in cluster.events if e[0] > seen and e[1] == resource]
                seen = cluster.version
                if not new:
                    cluster.changed.wait(0.5)
            for _, _, change, item in new:
                if selected(item, query):
                    yield json.dumps({"type": change, "object": item}).encode() + b"\n"

    def log_blocks(pod: str, follow: bool) -> Iterator[bytes]:
        container = cluster.containers[pod]
        with container.log.open("rb") as file:
            while True:
                has_ended = container.process.poll() is not None
                data = file.read()
                yield data
                if (has_ended or not follow) and not data:
                    return
                if not data:
                    time.sleep(POLL_S)

    return Handler


def kind_of(prefix: str, resource: str) -> str:
    return resources_of(prefix)[resource]


def resources_of(prefix: str) -> dict[str, str]:
    """Kinds by resource of a prefix such as api/v1 or apis/batch/v1."""
    words = prefix.split("/")
    return RESOURCES.get(("", words[1]) if words[0] == "api" else (words[1], words[2]), {})


def discovery(prefix: str) -> Item | None:
    """The answer to a request without a resource; None where there is nothing."""
    if prefix == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if prefix == "apis":
        groups = []
        for group, version in RESOURCES:
            if group:
                about = {"groupVersion": f"{group}/{version}", "version": version}
                groups.append({"name": group, "versions": [about], "preferredVersion": about})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if prefix.startswith(("api/", "apis/")) and (kinds := resources_of(prefix)):
        version = prefix.partition("/")[2]
        listing = [
            {"name": name, "singularName": kind.lower(), "namespaced": kind != "Node",
             "kind": kind, "verbs": VERBS}
            for name, kind in kinds.items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "groupVersion": version, "resources": listing}
    if prefix == "openapi/v3":
        groups = [
            "/".join(["api" if not g else "apis", *filter(None, (g, v))]) for g, v in RESOURCES
        ]
        return {"paths": {g: {"serverRelativeURL": f"/openapi/v3/{g}"} for g in groups}}
    if prefix.startswith("openapi/v3/"):
        group = prefix.removeprefix("openapi/v3/")
        return {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1.33.0"},
            "paths": {
                f"/{group}/namespaces/{{namespace}}/{name}/{{name}}": validated(group, kind)
                for name, kind in resources_of(group).items()
            },
        }
    if prefix == "version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    return None


def validated(prefix: str, kind: str) -> Item:
    """What makes kubectl leave the validation of fields to the server."""
    version = prefix.split("/")[-1]
    group = "" if prefix.startswith("api/") else prefix.split("/")[1]
    identity = {"group": group, "version": version, "kind": kind}
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    return {
        "patch": {
            "parameters": [parameter],
            "responses": {},
            "x-kubernetes-group-version-kind": identity,
        }
    }


@contextmanager
def kubernetes_bed(count: int) -> Iterator[Kubernetes]:
    """A cluster of `count` nodes, each with room for one pod."""
    plan = Plan(hosts=count, ssh=False)
    need(plan)
    need_programs("kubectl")
    bed = Bed.up(f"kubernetes-{os.getpid()}", plan, tied=True)
    try:
        cluster = Kubernetes(bed, Path(tempfile.mkdtemp(prefix="kubernetes-")))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.down()
    finally:
        bed.down()
