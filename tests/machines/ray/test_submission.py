"""Logs of submitted jobs, whose content is not trusted."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import write_value
from paceline.machines.ray import submission
from paceline.machines.ray.submission import Dashboard, RayJobRecord, SubmittedJob, SubmittedRun
from tests.machines.kubernetes.clusters import job_on

NAME = "paceline-0123456789abcdef"
PLACED = '{"event": "placed", "nodes": [{"name": "a", "address": "1"}]}'


class Recorded(Dashboard):
    """A dashboard with one job, whose log and state are given."""

    about: dict[str, Any]
    log: str

    def get(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Return the answer of the API; a job that is stopped has ended."""
        if path.endswith("/stop"):
            object.__setattr__(self, "about", {"status": "STOPPED"})
        return {"logs": self.log} if path.endswith("/logs") else self.about


def run_of(folder: Path, *lines: str, **about: str) -> SubmittedRun:
    dashboard = Recorded("http://127.0.0.1:1")
    object.__setattr__(dashboard, "log", "".join(f"{line}\n" for line in lines))
    object.__setattr__(dashboard, "about", {"status": "RUNNING", **about})
    (folder / "logs").mkdir()
    job = SubmittedJob(dashboard, NAME, folder)
    return SubmittedRun(job, job_on({}, nodes=1), folder, ".paceline-x")


def test_files_arrive_and_other_text_is_kept_in_the_log(tmp_path: Path) -> None:
    data = base64.b64encode(zlib.compress(b"text")).decode()
    run = run_of(tmp_path, PLACED, f"@file 0 steps/a 0 {data}", f"@file 0 ../b 0 {data}", "words")
    assert run.poll() is None and run.phase == "running on a"
    assert (tmp_path / "steps/a").read_text() == "text" and not (tmp_path.parent / "b").exists()
    assert (tmp_path / "logs/ray-driver.log").read_text() == "words\n"


def test_a_job_that_fails_without_a_node_is_explained_by_ray(tmp_path: Path) -> None:
    message = "Job entrypoint command failed with exit code 1, last available logs:\nNameError: x"
    run = run_of(tmp_path, PLACED, status="FAILED", message=message)
    with pytest.raises(SystemFaultError, match=r"is FAILED: .* exit code 1: NameError: x"):
        run.poll()


@pytest.mark.parametrize(
    "event",
    [
        {"event": "placed", "nodes": [{"name": "a"}]},
        {"event": "placed", "nodes": 1},
        {"event": "end", "node": 7, "code": 1},
        {"event": "error"},
    ],
)
def test_an_invalid_event_is_an_error(tmp_path: Path, event: dict[str, Any]) -> None:
    with pytest.raises(SystemFaultError):
        run_of(tmp_path, json.dumps(event)).poll()


@pytest.mark.parametrize(("can_stop", "recorded"), [(True, 255), (False, None)])
def test_only_a_confirmed_end_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_stop: bool, recorded: int | None
) -> None:
    monkeypatch.setattr(submission, "STOP_LIMIT_S", 0.1)
    if not can_stop:
        monkeypatch.setattr(Recorded, "get", Dashboard.get)  # nothing listens at its address
    run = run_of(tmp_path, PLACED)
    job = RayJobRecord(address="http://127.0.0.1:1", submission_id=NAME)
    write_value(tmp_path / submission.RECORD_FILE, job)
    run.stop()
    record = submission.read_record(tmp_path)
    assert record is not None and record.exit_code == recorded


def test_headers_of_the_user_must_be_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_HEADERS", "[1]")
    with pytest.raises(UserError, match="RAY_JOB_HEADERS: is not a JSON object"):
        Dashboard("http://127.0.0.1:1").ask("GET", "/")


@pytest.mark.parametrize(
    ("refusals", "text", "num_asked"),
    [
        (2, "No available agent to submit job, please try again later.", 3),
        (9, "No available agent to submit job, please try again later.", None),
        (1, "Runtime environment is not a valid one", None),
    ],
    ids=["agent comes", "no agent", "refused"],
)
def test_a_job_waits_for_an_agent_of_a_cluster_that_has_just_started(
    monkeypatch: pytest.MonkeyPatch, refusals: int, text: str, num_asked: int | None
) -> None:
    answers = [httpx2.Response(500, text=text)] * refusals + [httpx2.Response(200, text="{}")]
    asked: list[str] = []

    def ask(_: Dashboard, method: str, path: str, **content: Any) -> httpx2.Response:
        asked.append(f"{method} {path} {content['json']}")
        return answers[len(asked) - 1]

    monkeypatch.setattr(Dashboard, "ask", ask)
    monkeypatch.setattr(submission, "POLL_S", 0.01)
    monkeypatch.setattr(submission, "AGENT_LIMIT_S", 0.5 if num_asked else 0.03)
    dashboard = Dashboard("http://127.0.0.1:1")
    if num_asked is None:
        with pytest.raises(SystemFaultError, match=f"POST /api/jobs/: 500 {text}"):
            submission._post_job(dashboard, {"submission_id": NAME})
        return
    submission._post_job(dashboard, {"submission_id": NAME})
    assert asked == [f"POST /api/jobs/ {{'submission_id': '{NAME}'}}"] * num_asked
