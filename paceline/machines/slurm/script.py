"""Scripts that Slurm runs: job.sh for sbatch, its variant for steps, and arrays of such jobs.

The scripts contain no folder, because Slurm starts job.sh in the folder that it was submitted from.
A user's text is put into an #SBATCH line only if it consists of characters that Slurm reads in one
way, and into bash only in quotes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from math import ceil

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER, STEPS_FOLDER
from paceline.machines.node.script import FIRST_PORT, NODE_SCRIPT, NUM_PORTS, rendezvous_port

STATUS_FILE = "slurm.status"
"""File to which job.sh writes lines `start JOB RESTART NODES` and `end JOB RESTART CODE`."""
ATTEMPTS_FOLDER = "attempts"
"""Folder with logs and steps of earlier attempts, in subfolders `JOB.RESTART`."""
OPTIONAL_FOLDERS = ("mlperf", "telemetry")
"""Folders that only some runs create; a restart would overwrite those of the previous start."""

_VALUE = re.compile(r"[A-Za-z0-9_.,:+@&|*()\[\]=/!-]+")
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")

_NODE = (
    f'exec bash {NODE_SCRIPT} "$SLURM_PROCID" "$@" >>"{LOGS_FOLDER}/host-$SLURMD_NODENAME.log" 2>&1'
)
"""Command that srun starts on every node. It is run by bash, which expands the node's own
variables."""


def batch_script(job: Job) -> str:
    """Return job.sh for sbatch.

    Raises UserError for a setting that Slurm could misread.
    """
    cluster = _cluster(job)
    port = f"{FIRST_PORT} + ({rendezvous_port(job.name)} + SLURM_JOB_ID + restart) % {NUM_PORTS}"
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in batch_options(job)),
        "set -uo pipefail",
        *restart_lines(cluster),
        hosts_line(cluster, 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'),
        'echo "start $id $restart $SLURM_JOB_NODELIST" >>' + STATUS_FILE,
        *address_lines(cluster, ""),
        f"port=$(({port}))",
        *step_lines(job, ""),
        "code=$?",
        'echo "end $id $restart $code" >>' + STATUS_FILE,
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def step_script(job: Job, allocation: str) -> str:
    """Return job.sh for a run that is one step of the allocation numbered `allocation`."""
    cluster = _cluster(job)
    number = sbatch_word("allocation", allocation)
    cpus = "" if cluster.slurm.cpus_per_task else "--cpus-per-task=$((cpus / nodes)) "
    all_hosts = f'mapfile -t -n {job.nodes} hosts < <(scontrol show hostnames "$list")'
    lines = [
        "#!/usr/bin/env bash",
        "set -uo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"read -r nodes cpus list < <(squeue -h -j {number} -o '%D %C %N')",
        hosts_line(cluster, all_hosts),
        *address_lines(cluster, f"--jobid={number} "),
        f"port={rendezvous_port('/'.join([job.name, *cluster.hosts]))}",
        *step_lines(job, f"--jobid={number} --exact {cpus}", "exec "),
    ]
    return "\n".join(lines) + "\n"


def array_script(jobs: Sequence[Job], folders: Sequence[str], at_once: int | None = None) -> str:
    """Return a script whose task N runs job.sh in the Nth of `folders`.

    Raises UserError if the jobs do not request the same resources from Slurm.
    """
    requests = {tuple(batch_options(job)[1:]) for job in jobs}
    if len(requests) != 1:
        raise UserError(
            "array",
            "its jobs request different resources from Slurm",
            remedy="submit one array for each kind",
        )
    limit = f"%{at_once}" if at_once else ""
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in batch_options(jobs[0])),
        f"#SBATCH --array=0-{len(jobs) - 1}{limit}",
        "set -euo pipefail",
        "folders=(",
        *(f"  {shlex.quote(folder)}" for folder in folders),
        ")",
        'cd -- "${folders[$SLURM_ARRAY_TASK_ID]}"',
        'exec >>"slurm-$SLURM_JOB_ID.log" 2>&1',
        "exec bash job.sh",
    ]
    return "\n".join(lines) + "\n"


def batch_options(job: Job) -> list[str]:
    """Return the options of sbatch for the job; the first one is its name."""
    cluster = _cluster(job)
    site = cluster.slurm
    nodes = ",".join(cluster.hosts)
    minutes = None if job.timeout_s is None else max(1, ceil(job.timeout_s / 60))
    values: dict[str, object] = {
        "job-name": _NAME.sub("-", job.name).strip("-")[:60] or "paceline",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "mem": 0 if site.mem is None else None,  # 0 is all memory of the node
        "nodelist": nodes or None,
        **_run_gpus(job),
        **site.options(),
        "time": minutes if site.time is None else site.time,
        "export": "ALL",
        "output": "slurm-%j.log",
        "open-mode": "append",  # a requeued job must not truncate its earlier output
    }
    fixed = {"output"}  # its % is intended and would not pass sbatch_word()
    options = [
        f"--{name}={value if name in fixed else sbatch_word(name, str(value))}"
        for name, value in values.items()
        if value is not None
    ]
    return [*options, "--exclusive", "--requeue" if site.requeue else "--no-requeue"]


def hosts_line(cluster: Cluster, otherwise: str) -> str:
    """Return the line that sets `hosts`: the cluster's hosts if it names any, else `otherwise`."""
    if not cluster.hosts:
        return otherwise
    return f"hosts=({' '.join(map(shlex.quote, cluster.hosts))})"


def step_lines(job: Job, where: str, first: str = "") -> list[str]:
    """Return the srun command that starts one agent per node, rank 0's on the first of `hosts`."""
    cluster = _cluster(job)
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        *cpu_words(cluster),
    ]
    if where:
        options = {**_run_gpus(job), **cluster.slurm.options(steps=True)}
        words += [f"--{name}={sbatch_word(name, value)}" for name, value in options.items()]
    if where and job.timeout_s is not None:
        words.append(f"--time={max(1, ceil(job.timeout_s / 60))}")
    names = '"$(IFS=,; echo "${hosts[*]}")"'
    # --distribution=arbitrary makes srun place tasks in the order of --nodelist.
    placement = f"--nodelist={names} " + ("--distribution=arbitrary " if cluster.hosts else "")
    log = f"{LOGS_FOLDER}/{LAUNCHER_LOG}"
    return [
        f"{first}srun {where}{shlex.join(words)} {placement}{_container(cluster)}\\",
        f'  bash -c {shlex.quote(_NODE)} node "$address" "$port" >>{log} 2>&1',
    ]


def cpu_words(cluster: Cluster) -> list[str]:
    """Return the CPU options of a step.

    Since Slurm 22.05, srun does not inherit the job's `--cpus-per-task`. `--hint` replaces
    `--cpu-bind`, and srun then binds to the given number of CPUs, or to a single one without a
    number. The hint is therefore passed only if the number is known.
    """
    site = cluster.slurm
    if site.cpus_per_task is None:
        return ["--cpu-bind=none"]
    bind = f"--hint={sbatch_word('hint', site.hint)}" if site.hint else "--cpu-bind=none"
    return [f"--cpus-per-task={site.cpus_per_task}", bind]


def address_lines(cluster: Cluster, where: str) -> list[str]:
    """Return lines that set the address of rank 0: its host's name, or its address on an interface.

    If a host's own name resolves to a loopback address, it uses PACELINE_PEER to find its route to
    the others.
    """
    if cluster.interface is None:
        return ['address="${hosts[0]}"', 'export PACELINE_PEER="${hosts[1]:-}"']
    name = shlex.quote(cluster.interface)
    complain = f'echo "error: ${{hosts[0]}} has no address on "{name} >&2'
    return [
        "read -r _ _ _ address _ < <(",
        f'  srun {where}--overlap --nodes=1 --ntasks=1 --nodelist="${{hosts[0]}}" --export=ALL \\',
        f"    ip -4 -o addr show dev {name})",
        'address="${address%%/*}"',
        f'if [ -z "$address" ]; then {complain}; exit 1; fi',
    ]


def restart_lines(cluster: Cluster) -> list[str]:
    """Return the first lines of job.sh.

    They enforce the limit on restarts, and move the logs of the previous start to a folder of its
    own.
    """
    retries = cluster.slurm.retries
    bound = f"""\
if [ "$restart" -gt {retries} ]; then
  echo "restarted $restart times; cluster.slurm.retries is {retries}" >&2
  exit 1
fi
"""
    optional = " ".join(OPTIONAL_FOLDERS)
    text = f"""\
restart=${{SLURM_RESTART_COUNT:-0}}
id=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
{bound if cluster.slurm.requeue else ""}earlier={ATTEMPTS_FOLDER}/$id.$((restart - 1))
if [ "$restart" -gt 0 ] && mkdir -p {ATTEMPTS_FOLDER} && mkdir "$earlier" 2>/dev/null; then
  mv {LOGS_FOLDER} {STEPS_FOLDER} "$earlier"
  for name in {optional}; do if [ -d "$name" ]; then mv "$name" "$earlier"; fi; done
fi
mkdir -p {LOGS_FOLDER} {STEPS_FOLDER}"""
    return text.splitlines()


def sbatch_word(name: str, value: str) -> str:
    """Return `value` if Slurm reads it as exactly one word; raises UserError otherwise."""
    if _VALUE.fullmatch(value):
        return value
    raise UserError(
        f"cluster.slurm.{name}",
        f"{value!r} cannot be used in an #SBATCH line",
        allowed="letters, digits and _ . , : + @ & | * ( ) [ ] = / ! -",
    )


def _container(cluster: Cluster) -> str:
    site = cluster.slurm
    if site.container_image is None:
        return ""
    for text in (site.container_image, *site.container_mounts):
        if not text.isprintable():
            raise UserError("cluster.slurm.container_image", f"{text!r} is not a valid image name")
    mounts = "".join(shlex.quote(f",{mount}") for mount in site.container_mounts)
    return (
        f"--container-image={shlex.quote(site.container_image)} "
        f'--container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD" '
    )


def _run_gpus(job: Job) -> dict[str, str]:
    """Return the GPU option of the run, if the site's settings leave it to the job."""
    cluster = _cluster(job)
    if cluster.slurm.gres is not None or cluster.device == "cpu":
        return {}
    return {"gres": f"gpu:{job.devices_per_node}"}


def _cluster(job: Job) -> Cluster:
    return job.cluster or Cluster(
        name="slurm", device="cpu", nodes=job.nodes, devices_per_node=job.devices_per_node
    )
