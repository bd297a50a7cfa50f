"""Cost for the controller of following many SSH hosts.

    python benchmarks/ssh_controller.py [--hosts 512] [--seconds 30] [--real 0]

The hosts stand in for real ones: their `ssh` is a local shell that runs the launcher's own program
on standard input, and their interpreter a script that answers the checks and prints a line every
two seconds. With `--real N` the same job then runs on N hosts with a real sshd each, in namespaces,
and their real ssh clients are measured. Limits: the first line of all hosts within 20 s on two
cores, under 300 MiB and under one core for the controller's own process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _result import Surroundings, keep

from paceline.core.hardware import Cluster, SshSettings
from paceline.core.job import Job
from paceline.machines import ssh

LIMIT_S, LIMIT_BYTES, LIMIT_CORES = 20.0, 300 * 2**20, 1.0
POLL_S = 0.2
SSH = """#!/bin/sh
exec bash --noprofile --norc -s
"""
PYTHON = """#!/bin/sh
if [ "$1" = -c ] && [ "$3" = port ]; then echo '{"port": 23456}'; exit; fi
if [ "$1" = -c ]; then
  echo '{"python": "3.11.2", "torch": "2.13.0", "open_files": 65536, "folder": "shared",
  "free_bytes": 1000000000, "peer_address": "10.0.0.1"}' | tr -d '\\n'
  exit
fi
while :; do echo "a line of node $3"; sleep 2; done
"""


def main() -> int:
    """Print and store what it took; 1 when it is beyond a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--real", type=int, default=0)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        print(json.dumps(follow(options.follow, options.seconds)))
        return 0
    around = Surroundings()
    result: dict[str, Any] = {"fakes": with_fakes(options.hosts, options.seconds)}
    if options.real:
        result["real"] = with_real_hosts(options.real, options.seconds)
    limits = {"first_line_of_all_s": LIMIT_S, "peak_bytes": LIMIT_BYTES, "cores": LIMIT_CORES}
    keep("ssh_controller", "seconds, bytes and cores", around, limits=limits, **result)
    for name, row in result.items():
        print(name, json.dumps(row))
    return int(any(row[key] > limit for row in result.values() for key, limit in limits.items()))


def with_fakes(hosts: int, seconds: float) -> dict[str, Any]:
    """The figures of one controller whose hosts are local shells."""
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder, "bin")
        programs.mkdir()
        for name, text in (("ssh", SSH), ("fake-python", PYTHON)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        job = {
            "names": [f"node-{i:04}" for i in range(hosts)],
            "config": None,
            "python": str(programs / "fake-python"),
            "folder": folder,
        }
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return controller(job, seconds, {**os.environ, "PATH": path})


def with_real_hosts(hosts: int, seconds: float) -> dict[str, Any]:
    """The figures of one controller whose hosts each have an sshd."""
    from tests.clusters.bed import Bed, Plan

    bed = Bed.up(f"controller-{os.getpid()}", Plan(hosts=hosts), tied=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder, "fake-python")
            python.write_text(PYTHON)
            python.chmod(0o755)
            job = {
                "names": list(bed.names),
                "config": str(bed.ssh_config),
                "python": str(python),
                "folder": folder,
            }
            return controller(job, seconds, dict(os.environ))
    finally:
        bed.down()


def controller(job: dict[str, Any], seconds: float, env: dict[str, str]) -> dict[str, Any]:
    """Return the measurements of a separate process that follows the job."""
    command = [sys.executable, __file__, "--seconds", f"{seconds:g}", "--follow", json.dumps(job)]
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return {"hosts": len(job["names"]), **json.loads(result.stdout)}


def follow(text: str, seconds: float) -> dict[str, Any]:
    """Start the job, follow it for some seconds as a run does, and end it."""
    order = json.loads(text)
    folder, names = Path(order["folder"], "run"), tuple(order["names"])
    folder.mkdir()
    cluster = Cluster(
        name="bench",
        device="cpu",
        devices_per_node=1,
        nodes=len(names),
        hosts=names,
        ssh=SshSettings(config=order["config"]),
    )
    job = Job(
        name="bench", python=order["python"], program=("x.py",), nodes=len(names), cluster=cluster
    )
    ssh.prepare(job, folder)
    began, first_s, threads = time.monotonic(), None, 0
    run = ssh.submit(job, folder)
    submitted_s = time.monotonic() - began
    clients: dict[str, float] = {}
    while (passed_s := time.monotonic() - began) < seconds or first_s is None:
        if (code := run.poll()) is not None:
            raise SystemExit(f"the job ended with {code}: {run.verdict()}")
        if first_s is None and all(host.session.last_output for host in run.hosts):
            first_s, clients = passed_s, client_memory(run)
        threads = max(threads, psutil.Process().num_threads())
        time.sleep(POLL_S)
    used, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    run.stop()
    return {
        "submitted_s": submitted_s,
        "first_line_of_all_s": first_s,
        "cores": (used.ru_utime + used.ru_stime) / wall_s,
        "followed_s": wall_s,
        "peak_bytes": used.ru_maxrss * 1024,
        "threads": threads,
        **clients,
        "ended_s": time.monotonic() - began - wall_s,
    }


def client_memory(run: ssh.SshRun) -> dict[str, float]:
    """Memory of the local ssh processes, shared pages divided among those that share them."""
    pids = [host.session.process.pid for host in run.hosts if host.session.process]
    return {"ssh_clients_bytes": sum(psutil.Process(pid).memory_full_info().pss for pid in pids)}


if __name__ == "__main__":
    sys.exit(main())
