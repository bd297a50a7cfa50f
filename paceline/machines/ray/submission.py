"""Job submission to a Ray cluster by the REST API of its dashboard.

The job runs job_program.py inside the cluster and continues without this controller. Its log brings
the files of all nodes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
from pydantic import Field

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.units import si
from paceline.core.value import Value
from paceline.files.documents import parse_json, read_value, write_value
from paceline.files.run_folder import LOGS_FOLDER, RESULT_FILE, RUN_FILE, SCRIPT_FILE
from paceline.machines.node.records import packed_run, write_record
from paceline.machines.node.script import random_ports
from paceline.machines.ray.run import (
    DRIVER_LOG,
    RayRun,
    checked_message,
    request_for,
)

RECORD_FILE = "ray.json"
PROGRAM, REQUEST_FILE = "job_program.py", "request.json"
OWN_FILES = (RUN_FILE, RECORD_FILE, SCRIPT_FILE, RESULT_FILE)
"""Files that no node may replace."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of Ray's jobs that have ended."""
ENDED_BY_US = 143
HEADERS_VARIABLE, TOKEN_VARIABLE = "RAY_JOB_HEADERS", "RAY_AUTH_TOKEN"
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "30"}
"""Time in seconds that Ray gives a job to end its ranks before it kills the entry point."""
AGENT_LIMIT_S = 60.0
NO_AGENT = "No available agent"
"""Part of Ray's answer while no node's dashboard agent has registered."""
STOP_LIMIT_S = 40.0
REQUEST_S, UPLOAD_S = 30.0, 300.0
POLL_S = 1.0
POLL_SHARE = 10.0
"""Minimum time between two queries, in units of the time that the last one took: the API sends
the whole log each time."""
SILENT_S = 60.0
"""Time in seconds for which the dashboard may fail to answer."""
MAX_ANSWER_BYTES = 1 << 28
MAX_MESSAGE = 400
"""Maximum number of characters of an error of Ray that are shown."""


class RayJobRecord(Value):
    """Contents of ray.json in a run folder."""

    address: str
    submission_id: str = Field(pattern=r"^paceline-[0-9a-f]{16}$")
    exit_code: int | None = None
    """Exit code of the job, once it has ended."""


def dashboard_of(cluster: Cluster) -> str | None:
    """Return the address of the dashboard; None if the cluster is not used by job submission."""
    address = request_for(cluster)["address"]
    return address.rstrip("/") if address.startswith(("http://", "https://")) else None


@dataclass(frozen=True)
class Dashboard:
    """The REST API of a Ray dashboard."""

    address: str

    def ask(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """Return the answer to a request.

        Raises SystemFaultError without an answer, or if it is larger than `MAX_ANSWER_BYTES`.
        """
        limit_s = UPLOAD_S if "content" in content else REQUEST_S
        try:
            with (
                httpx2.Client(timeout=limit_s, headers=self._headers()) as client,
                client.stream(method, f"{self.address}{path}", **content) as answer,
            ):
                body = b""
                for block in answer.iter_bytes():
                    body += block
                    if len(body) > MAX_ANSWER_BYTES:
                        what = f"{path} is larger than {si(MAX_ANSWER_BYTES, 'B')}"
                        raise SystemFaultError(self.address, what)
                return httpx2.Response(answer.status_code, content=body)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise SystemFaultError(
                self.address,
                f"Ray's dashboard does not answer: {error}",
                remedy="check --ray-address; jobs need Ray with its dashboard: ray[default]",
            ) from error

    def get(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Return the JSON object of a good answer; raises SystemFaultError for another one."""
        answer = self.ask(method, path, **content)
        if answer.is_success:
            with contextlib.suppress(ValueError):
                document = parse_json(answer.text)
                if isinstance(document, dict):
                    return document
        lines = answer.text.strip().splitlines() or ["no text"]
        what = f"{method} {path}: {answer.status_code} {lines[-1][:MAX_MESSAGE]}"
        raise SystemFaultError(self.address, what, remedy=_remedy(answer))

    def _headers(self) -> dict[str, str]:
        """Return the headers that Ray's own client takes from these variables."""
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": " ".join(("Bearer", token))} if token else {}
        try:
            extra = parse_json(os.environ.get(HEADERS_VARIABLE) or "{}")
            return headers | {str(key): str(value) for key, value in extra.items()}
        except (AttributeError, ValueError) as error:
            raise UserError(HEADERS_VARIABLE, "is not a JSON object") from error


def list_nodes(cluster: Cluster, address: str) -> list[dict[str, str]]:
    """Return name and address of each alive node that has the resources of a node of the job."""
    answer = Dashboard(address).get("GET", "/api/v0/nodes?detail=1&limit=10000")
    needs: dict[str, float] = request_for(cluster)["resources"]
    try:
        nodes = answer["data"]["result"]["result"]
        return [
            {"name": node["node_name"], "address": node["node_ip"]}
            for node in nodes
            if node["state"] == "ALIVE"
            and all(node["resources_total"].get(key, 0) >= n for key, n in needs.items())
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise SystemFaultError(address, "its list of nodes lacks a field") from error


@dataclass
class SubmittedJob:
    """A job in the cluster, in place of the local driver."""

    dashboard: Dashboard
    name: str
    folder: Path
    ended: bool = False
    _num_read: int = 0
    """Number of characters of the log that have been processed."""
    _is_explained: bool = False
    """True if a node has reported why the job failed."""
    _due_s: float = 0.0
    _answered_s: float = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Do nothing, because the job decides itself."""

    def messages(self) -> Iterable[dict[str, Any]]:
        """Yield the events of the log, and write its records into the run folder.

        Raises SystemFaultError for an error of Ray, and if the dashboard stops answering.
        """
        started_s = time.monotonic()
        self._answered_s = self._answered_s or started_s
        if self.ended or started_s < self._due_s:
            return
        try:
            about = self.dashboard.get("GET", f"/api/jobs/{self.name}")
            text = str(self.dashboard.get("GET", f"/api/jobs/{self.name}/logs").get("logs", ""))
        except SystemFaultError:
            self._due_s = started_s + POLL_S
            if time.monotonic() - self._answered_s > SILENT_S:
                raise
            return
        self._answered_s = time.monotonic()
        self._due_s = self._answered_s + max(POLL_S, POLL_SHARE * (self._answered_s - started_s))
        end = text.rfind("\n") + 1
        lines, self._num_read = text[self._num_read : end].splitlines(), max(end, self._num_read)
        yield from self._events(lines)
        if about.get("status") in ENDED:
            self.ended = True
            if about["status"] != "SUCCEEDED" and not self._is_explained:
                raise SystemFaultError("Ray", f"job {self.name} {_end_text(about)}")

    def _events(self, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
        with (self.folder / LOGS_FOLDER / DRIVER_LOG).open("a", encoding="utf-8") as log:
            for line in lines:
                match line.split(" "):
                    case ["@file", _, name, offset, data]:
                        write_record(self.folder, name, offset, data, OWN_FILES)
                    case ["@end", _, _]:
                        pass
                    case _ if (message := _event(line)) is not None:
                        event = checked_message(message)
                        self._is_explained |= bool(event.get("code") or event.get("lost"))
                        yield event
                    case _:
                        log.write(f"{line}\n")

    def close(self) -> None:
        """Stop the job, and wait until it has ended."""
        if self.ended:
            return
        with contextlib.suppress(SystemFaultError):
            self.dashboard.get("POST", f"/api/jobs/{self.name}/stop")
        deadline = time.monotonic() + STOP_LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(SystemFaultError):
                about = self.dashboard.get("GET", f"/api/jobs/{self.name}")
                if about.get("status") in ENDED:
                    self._due_s = 0.0  # the rest of its log has arrived
                    return
            time.sleep(POLL_S / 2)


@dataclass
class SubmittedRun(RayRun):
    """A submitted job, whose end is recorded."""

    def poll(self) -> int | None:
        """Return the exit code if the job has ended on all nodes, else None."""
        code = super().poll()
        if code is not None:
            _record_end(self.folder, code)
        return code

    def stop(self) -> int:
        """End the job and return its exit code.

        The end is recorded if the dashboard confirms it; otherwise the job may still run.
        """
        code = super().stop()
        if self.driver.ended:
            _record_end(self.folder, code)
        return code

    def _handle(self, message: dict[str, Any]) -> None:
        try:
            super()._handle(message)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise SystemFaultError("Ray", "the job's log has an invalid event") from error


def submit_job(job: Job, folder: Path, address: str) -> SubmittedRun:
    """Upload the run folder and submit the job.

    Raises SystemFaultError with the message of Ray if it refuses the job.
    """
    assert job.cluster is not None
    dashboard = Dashboard(address)
    package = packed_job(job, folder)
    digest = hashlib.sha256(package).hexdigest()[:16]
    name = f"paceline-{os.urandom(8).hex()}"
    uri = f"_ray_pkg_{digest}.zip"
    if not dashboard.ask("GET", f"/api/packages/gcs/{uri}").is_success:
        answer = dashboard.ask("PUT", f"/api/packages/gcs/{uri}", content=package)
        if not answer.is_success:
            what = f"refuses the files of the run: {answer.text.strip()[-MAX_MESSAGE:]}"
            raise SystemFaultError(address, what, remedy=_remedy(answer))
    write_value(folder / RECORD_FILE, RayJobRecord(address=address, submission_id=name))
    runtime_env = {**job.cluster.ray.runtime_env, "working_dir": f"gcs://{uri}"}
    entry = {
        "entrypoint": f"{shlex.quote(job.python)} {PROGRAM} .",
        "submission_id": name,
        "runtime_env": {**runtime_env, "env_vars": STOP_WAIT},
        "metadata": {"name": job.name, "program": "paceline"},
    }
    try:
        _post_job(dashboard, entry)
    except PacelineError:
        _record_end(folder, ENDED_BY_US)
        raise
    return _run_of(job, folder, dashboard, name)


def _post_job(dashboard: Dashboard, entry: Mapping[str, Any]) -> None:
    """Submit a job, once the agent of a node that has just started takes it.

    Raises SystemFaultError if Ray refuses it, or has no agent for `AGENT_LIMIT_S` seconds.
    """
    deadline = time.monotonic() + AGENT_LIMIT_S
    while True:
        try:
            dashboard.get("POST", "/api/jobs/", json=entry)
            return
        except SystemFaultError as error:
            if NO_AGENT not in str(error) or time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


def follow_job(job: Job, folder: Path) -> SubmittedRun | None:
    """Return the job that a controller has left in the cluster; None if there is none."""
    record = read_record(folder)
    if record is None or record.exit_code is not None:
        return None
    dashboard = Dashboard(record.address)
    if dashboard.ask("GET", f"/api/jobs/{record.submission_id}").status_code == 404:
        return None
    return _run_of(job, folder, dashboard, record.submission_id)


def cancel_job(folder: Path) -> str | None:
    """Stop the job of a run whose controller has died; return its name, if there is any.

    Raises SystemFaultError if the dashboard does not answer, because the job may then still run.
    """
    record = read_record(folder)
    if record is None or record.exit_code is not None:
        return None
    dashboard = Dashboard(record.address)
    if dashboard.ask("GET", f"/api/jobs/{record.submission_id}").status_code != 404:
        dashboard.get("POST", f"/api/jobs/{record.submission_id}/stop")
    _record_end(folder, ENDED_BY_US)
    return record.submission_id


def read_record(folder: Path) -> RayJobRecord | None:
    """Return ray.json of a run folder, or None if its job was not submitted."""
    try:
        return read_value(folder / RECORD_FILE, RayJobRecord)
    except UserError:
        return None


def job_request(job: Job, name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return request.json for job_program.py; `env` are the variables of the ranks."""
    assert job.cluster is not None
    return {
        **request_for(job.cluster),
        "address": "auto",
        "runtime_env": {},  # the job's own applies to its actors
        "nodes": job.nodes,
        "env": dict(env),
        "python": job.python,
        "mark": hashlib.sha256(name.encode()).hexdigest()[:32],
        "ports": random_ports(),
        "interface": job.cluster.interface or "",
    }


def job_programs() -> dict[str, str]:
    """Return the programs of a job by file name."""
    places = {
        PROGRAM: "machines.ray",
        "driver_program.py": "machines.ray",
        "host_facts.py": "machines.node",
        "temporary_locks.py": "files",
    }
    return {
        name: (resources.files(f"paceline.{package}") / name).read_text("utf-8")
        for name, package in places.items()
    }


def packed_job(job: Job, folder: Path) -> bytes:
    """Return the working directory of the job as a ZIP file."""
    package = io.BytesIO()
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as files:
        for name, text in job_programs().items():
            files.writestr(name, text)
        files.writestr(REQUEST_FILE, json.dumps(job_request(job, folder.name, job.env)))
        files.writestr("run.tar.gz", packed_run(job, folder, (RUN_FILE, RECORD_FILE, SCRIPT_FILE)))
    return package.getvalue()


def _run_of(job: Job, folder: Path, dashboard: Dashboard, name: str) -> SubmittedRun:
    return SubmittedRun(SubmittedJob(dashboard, name, folder), job, folder, f".{name}")


def _record_end(folder: Path, code: int) -> None:
    record = read_record(folder)
    if record is not None:
        final = record.model_copy(update={"exit_code": code})
        write_value(folder / RECORD_FILE, final)


def _remedy(answer: httpx2.Response) -> str | None:
    """Return what to do if the dashboard refuses the user; None for another error."""
    return f"set {TOKEN_VARIABLE}" if answer.status_code in (401, 403) else None


def _end_text(about: Mapping[str, Any]) -> str:
    """Return the state of a job that has ended, Ray's explanation and the last line of its log."""
    lines = [line.strip() for line in str(about.get("message") or "").splitlines() if line.strip()]
    first, _, _ = lines[0].partition(", last available logs") if lines else ("", "", "")
    last = f": {lines[-1]}" if len(lines) > 1 else ""
    return f"is {about['status']}: {first}{last}"[:MAX_MESSAGE]


def _event(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None for the text of a library."""
    if not line.startswith('{"event": '):
        return None
    with contextlib.suppress(ValueError):
        message = parse_json(line)
        return message if isinstance(message, dict) else None
    return None
