"""Training over SSH that is disturbed in the middle: the cause is named, the steps are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.files.run_folder import REPORT_FILE, STEPS_FOLDER
from tests.clusters.bed import Bed, BedError
from tests.runs.test_flow import SMALL, only_run, result_of
from tests.surroundings import own_folders
from tests.waiting import wait_until

STEPS = 5
FOREVER = ("--set", "steps=1000000", "--set", "compile=none")
PAUSES = {"sleep 0.1", "sleep 0.2"}
"""Of the shell that has ended a job's processes: it may be in the last between two looks."""


class Run(NamedTuple):
    """A run that has ended."""

    runs: Path
    code: int
    errors: str
    left: dict[int, str]
    """What its hosts still ran a while later."""

    @property
    def result(self) -> dict[str, Any]:
        return result_of(self.runs)


def cluster_file(bed: Bed, hosts: Sequence[str], folder: Path) -> Path:
    """A cluster of two hosts that are given up on soon, though not by a busy machine."""
    limits = f"{{config: {bed.ssh_config}, alive_interval_s: 2, connect_timeout_s: 10}}"
    file = folder / "cluster.yaml"
    file.write_text(
        f"name: bed\ndevice: cpu\ndevices_per_node: 1\nthreads_per_device: 1\nnodes: {len(hosts)}\n"
        f"launcher: ssh\nhosts: [{', '.join(hosts)}]\nssh: {limits}\n"
    )
    return file


def train(bed: Bed, hosts: Sequence[str], runs: Path, *arguments: str) -> subprocess.Popen[str]:
    """`paceline run` on two hosts, in the background."""
    environment = {**os.environ, **own_folders(runs)}
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "tiny-llama",
        "--no-probe",
        *SMALL,
        "--cluster",
        str(cluster_file(bed, hosts, runs)),
        *arguments,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def has_steps(runs: Path) -> bool:
    """Whether both ranks have made some steps."""
    files = list(runs.glob(f"*/{STEPS_FOLDER}/rank-*.jsonl"))
    return len(files) == 2 and all(f.read_text().count('{"event": "step"') > STEPS for f in files)


def disturb_one(bed: Bed, runs: Path, disturb: Callable[[], object], *arguments: str) -> Run:
    """A run on the first two hosts that is let be until `disturb` returns, and its end."""
    hosts = bed.names[:2]
    process = train(bed, hosts, runs, *FOREVER, *arguments)
    try:
        wait_until(lambda: has_steps(runs) or process.poll() is not None, "the first steps", 240)
        disturb()
        errors = process.communicate(timeout=120)[1]
    finally:
        process.kill()

    def left() -> dict[int, str]:
        return {pid: line for name in hosts for pid, line in bed.hosts[name].leftovers().items()}

    found = left()
    if found and set(found.values()) <= PAUSES:
        with suppress(BedError):
            wait_until(lambda: not left(), "the end of the last pause", 2)
        found = left()
    return Run(runs, process.returncode, errors, found)


@pytest.fixture(scope="module")
def disturbed(ssh_hosts: Bed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Four runs at the same time on two hosts each, each disturbed in its own way."""
    names = ("crash", "kill", "interrupt", "hang")
    hosts = {name: ssh_hosts.names[2 * i : 2 * i + 2] for i, name in enumerate(names)}
    runs = {name: tmp_path_factory.mktemp(name) for name in names}
    forever = (*FOREVER, "--set", "hang_limit_s=8")
    started = {name: train(ssh_hosts, hosts[name], runs[name], *forever) for name in names}
    try:
        wait_until(lambda: all(map(has_steps, runs.values())), "the first steps of all runs", 300)
    except TimeoutError:
        for process in started.values():
            process.send_signal(signal.SIGINT)
        raise AssertionError([process.communicate()[1] for process in started.values()]) from None
    ssh_hosts.hosts[hosts["crash"][1]].crash()
    started["kill"].kill()
    started["interrupt"].send_signal(signal.SIGINT)
    ssh_hosts.hosts[hosts["hang"][1]].call("pkill", "-STOP", "-f", "trainer trainer.json")
    errors = {name: process.communicate(timeout=240)[1] for name, process in started.items()}
    deadline = time.monotonic() + 30
    left: dict[str, dict[int, str]] = {}
    for name in names:
        while time.monotonic() < deadline:
            both = (ssh_hosts.hosts[host].leftovers() for host in hosts[name])
            left[name] = {pid: line for processes in both for pid, line in processes.items()}
            if not left[name]:
                break
            time.sleep(0.2)
    ssh_hosts.boot(hosts["crash"][1])
    return {
        name: Run(runs[name], started[name].returncode, errors[name], left[name]) for name in names
    }


@pytest.mark.parametrize(
    ("how", "status", "code", "reason"),
    [
        ("crash", "failed", 2, "node-002: the connection was lost"),
        ("kill", "incomplete", -signal.SIGKILL, ""),
        ("interrupt", "cancelled", 4, "interrupted by the user"),
        ("hang", "failed", 2, "rank 1"),
    ],
)
def test_a_disturbed_run_names_the_cause_keeps_its_steps_and_leaves_nothing(
    disturbed: dict[str, Run], how: str, status: str, code: int, reason: str
) -> None:
    run = disturbed[how]
    assert (run.code, run.result["status"]) == (code, status)
    assert reason in (run.result["reason"] or "")
    assert run.result["steps_done"] > STEPS
    assert run.left == {}
    assert "Traceback" not in run.errors


def test_a_report_is_written_whatever_happened_to_a_host(disturbed: dict[str, Run]) -> None:
    page = only_run(disturbed["crash"].runs) / REPORT_FILE
    assert "node-002" in page.read_text()
