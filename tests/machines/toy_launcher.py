"""A launcher for tests: a background process of this machine stands for each node of a job."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.files.documents import write_text
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER, SCRIPT_FILE
from paceline.machines import Handle, JobEnd, UnfitHost
from paceline.machines.node.script import (
    NODE_SCRIPT,
    prepare_node,
    rendezvous_port,
    secret_variables,
)


@dataclass
class ToyRun(Handle):
    """The processes of a job, one for each node."""

    nodes: list[subprocess.Popen[bytes]]
    deadline: float

    @property
    def timed_out(self) -> bool:
        return time.monotonic() > self.deadline

    def poll(self) -> int | None:
        codes = [node.poll() for node in self.nodes]
        return None if None in codes else max(code or 0 for code in codes)

    def stop(self) -> int:
        for node in self.nodes:
            node.terminate()
        return max(node.wait() for node in self.nodes)

    def sweep(self) -> None:
        for node in self.nodes:
            if node.stdin:
                node.stdin.close()

    def verdict(self) -> JobEnd | None:
        return None


def render(job: Job) -> str:
    """Return the script that starts one node.sh for each node, and waits for all."""
    port = rendezvous_port(job.name)
    starts = [f"bash {NODE_SCRIPT} {node} 127.0.0.1 {port} &" for node in range(job.nodes)]
    return "\n".join(["#!/usr/bin/env bash", *starts, "wait"]) + "\n"


def prepare(job: Job, folder: Path) -> None:
    prepare_node(job, folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path) -> ToyRun:
    starts = [line[: -len(" &")] for line in render(job).splitlines() if line.endswith(" &")]
    with (folder / LOGS_FOLDER / LAUNCHER_LOG).open("wb") as log:
        nodes = [
            subprocess.Popen(
                line.split(), cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
            for line in starts
        ]
    assert not secret_variables(job.env)
    return ToyRun(nodes, time.monotonic() + (job.timeout_s or 600.0))


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    return {}
