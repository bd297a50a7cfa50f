"""Rendering of node.sh, which every node of a job runs, and of the files next to it."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path
from zlib import crc32

from paceline.core.hardware import ENVIRONMENT_NAME
from paceline.core.job import COLLECTIVE_LIMIT, Job
from paceline.core.secrets import is_secret
from paceline.files.documents import write_text
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.files.staged import CONTENT_FOLDER, MANIFEST_FILE, stage_root
from paceline.machines.node.agent import FIRST_PORT, NUM_PORTS


def on_node_disks(job: Job) -> Job:
    """Return `job` with paths on the nodes' own disks (`cluster.stage`).

    Every path below this machine's stage folder in its program, variables and files is replaced.
    The folders of the assets have the same names on both sides. The job is unchanged if the cluster
    has no stage folder.
    """
    local = job.cluster.stage if job.cluster else None
    if local is None:
        return job
    local_root, node_root = str(stage_root()), local.rstrip("/")
    # In a JSON file a path may be escaped.
    moves = {local_root: node_root, json.dumps(local_root)[1:-1]: json.dumps(node_root)[1:-1]}

    def with_node_paths(text: str) -> str:
        for old, new in moves.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(old)}/", lambda _, to=new: f"{to}/", text)
        return text

    return replace(
        job,
        program=tuple(with_node_paths(word) for word in job.program),
        env={name: with_node_paths(value) for name, value in job.env.items()},
        files={name: with_node_paths(text) for name, text in job.files.items()},
    )


def presence_lines(job: Job) -> list[str]:
    """Return bash lines that exit with an error on a node where a staged asset is missing."""
    local = job.cluster.stage if job.cluster else None
    if local is None:
        return []
    folder = local.rstrip("/")
    pattern = re.compile(rf"{re.escape(folder)}/([a-z0-9][a-z0-9.-]*)/{CONTENT_FOLDER}\b")
    texts = (*job.program, *job.env.values(), *job.files.values())
    names = sorted({name for text in texts for name in pattern.findall(text)})
    problem = (
        f"is not staged in {folder}; run `paceline recipes stage RECIPE` with --cluster or --local"
    )
    return [
        f"[ -f {shlex.quote(f'{folder}/{name}/{MANIFEST_FILE}')} ] ||"
        f' {{ echo "error: $(hostname): {name} "{shlex.quote(problem)} >&2; exit 66; }}'
        for name in names
    ]


NODE_SCRIPT, AGENT_FILE = "node.sh", "agent.py"
RANK0_STORE = "PACELINE_STORE"
"""Variable that has rank 0 of the trainer create the rendezvous store, if it is `rank0`."""
SAMPLER_FILE = "telemetry_program.py"
"""Program that the agent starts along with the ranks, if it is in the agent's folder."""
ANY_PORT = "0"
"""Has the agent of a job on a single node choose a free port."""
PORTS_TRIED = 16


def render_node(job: Job) -> str:
    """Return the bash script that every node runs: `bash node.sh NODE ADDRESS PORT`.

    NODE is the node's number, ADDRESS and PORT are where rank 0 listens. The script contains no
    secrets; they are expected in the environment. Raises ValueError for a variable name that bash
    would misread.
    """
    return _node_script(on_node_disks(job))


def _node_script(job: Job) -> str:
    cluster = job.cluster
    interface = cluster.interface if cluster else None
    settings = {
        RANK0_STORE: "rank0",
        COLLECTIVE_LIMIT: f"{job.collective_limit_s:g}",
        # Without = NCCL matches every interface with this prefix: ib0 and ib01.
        **(
            {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            if interface
            else {}
        ),
        **open_variables(job.env),
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(settings.items())]
    title = shlex.quote(" ".join(job.name.split()))
    start = [job.python, AGENT_FILE, str(job.nodes)]
    lines = [
        "#!/usr/bin/env bash",
        f"# {title} on one of {job.nodes} nodes: NODE ADDRESS PORT",
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        *exports,
        *presence_lines(job),
        f'exec {shlex.join(start)} "$1" {job.ranks_per_node} "$2" "$3" {shlex.join(job.program)}',
    ]
    return "\n".join(lines) + "\n"


def agent_text() -> str:
    """Return the text of the agent, which runs from a file next to the program of a job."""
    return (resources.files("paceline.machines.node") / AGENT_FILE).read_text(encoding="utf-8")


def agent_command(ranks: int) -> tuple[str, ...]:
    """Return the arguments of Python that start all ranks of a job on this machine alone.

    They meet at loopback: a container may be unable to resolve the machine's own name.
    """
    return AGENT_FILE, "1", "0", str(ranks), "127.0.0.1", ANY_PORT


def prepare_node(job: Job, folder: Path) -> None:
    """Write the job's files, node.sh, the agent and the sampler into the run folder."""
    job = on_node_disks(job)
    programs = {AGENT_FILE: "paceline.machines.node"}
    if job.sampled:
        programs[SAMPLER_FILE] = "paceline.machines.probe"
    files = {
        name: (resources.files(package) / name).read_text(encoding="utf-8")
        for name, package in programs.items()
    }
    for name, text in {**job.files, **files, NODE_SCRIPT: _node_script(job)}.items():
        write_text(folder / name, text)
    for name in (LOGS_FOLDER, STEPS_FOLDER):
        (folder / name).mkdir(exist_ok=True)


def open_variables(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that are not secrets.

    Raises ValueError for a name that bash does not accept.
    """
    for name in env:
        if not ENVIRONMENT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name an environment variable")
    return {name: value for name, value in env.items() if not is_secret(name, value)}


def secret_variables(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that are secrets and so must not be written into scripts."""
    return {name: value for name, value in env.items() if is_secret(name, value)}


def rendezvous_port(name: str) -> int:
    """Return a port derived from a job's name, for scripts written before the hosts are known.

    Jobs of different names are thus likely to use different ports.
    """
    return FIRST_PORT + crc32(name.encode()) % NUM_PORTS


def random_ports() -> list[int]:
    """Return ports to try in turn on a host that is asked for a free one.

    They are random because names of runs are not unique: two users who start the same benchmark
    at the same time would find the same port free.
    """
    return random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), PORTS_TRIED)
