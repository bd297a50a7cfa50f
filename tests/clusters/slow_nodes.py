"""Trials on real hosts: one of eight is slowed down, and a scaling campaign has to say which.

A host is slowed by a quota of processor time, and by how much a control step of its own tells,
right before the scaling test: a GEMM that neither Paceline nor torch takes part in. Never
more than two hosts compute at the same time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from tests.clusters.bed import Bed, Host, Plan
from tests.surroundings import own_folders

HOSTS = 8
"""From eight on the nodes judge each other."""
PLAN = Plan(hosts=HOSTS, favoured=True)
AT_ONCE = 2
"""Hosts that compute at the same time: one a core."""
SHARES = (0.4, 0.5, 0.6)
"""Of a core for the slowed host, in slices of 10 ms, far shorter than a step."""
MIN_SLOWDOWN = 1.3
LIMIT_S = 240.0
STEP = """
import sys, time, numpy
a = numpy.random.default_rng(0).standard_normal((640, 640)).astype("float32")
times = []
for _ in range(20):
    began = time.perf_counter()
    for _ in range(3):
        a @ a
    times.append(time.perf_counter() - began)
print(sorted(times[3:])[8])
"""
"""The control step: prints its median time in seconds."""
CHANGES = (
    "num_layers=2",
    "hidden_size=128",
    "ffn_size=512",
    "embedding_size=64",
    "seq_len=64",
    "dtype=fp32",
    "steps=40",
    "memory_parts=false",
)
CLUSTER = """\
name: bed
device: cpu
devices_per_node: 1
threads_per_device: 1
nodes: {nodes}
launcher: ssh
hosts: [{hosts}]
ssh: {{config: {config}, connect_timeout_s: 60}}
"""


@dataclass(frozen=True)
class Fault:
    """What is done to a host: at most this share of a core."""

    host: str
    share: float


@dataclass(frozen=True)
class Trial:
    """What was done, what it really did, and what the campaign said."""

    fault: Fault | None
    slowdowns: dict[str, float]
    """Control step of each host over the median host's, before the campaign."""
    losses: dict[str, float]
    """What each host is below the median of all, as the campaign measured it."""
    suspected: tuple[str, ...]
    """By their runs alone: flagged, or slow enough for a second pass."""
    flagged: tuple[str, ...]
    """Flagged at the end, after the second pass."""
    sentences: tuple[str, ...]
    seconds: float

    @property
    def named(self) -> bool:
        """Whether the slowed host is flagged."""
        return self.fault is not None and self.fault.host in self.flagged

    @property
    def blamed(self) -> tuple[str, ...]:
        """Healthy hosts that are flagged."""
        return tuple(host for host in self.flagged if not self.fault or host != self.fault.host)

    @property
    def true_slowdown(self) -> float | None:
        """Of the slowed host, by the control step."""
        return self.slowdowns[self.fault.host] if self.fault else None


def planned(trials: int, seed: int = 0) -> list[Fault | None]:
    """As many faults as there are trials, a third of them none, in a random order."""
    luck = random.Random(seed)
    healthy = round(trials / 3)
    faults: list[Fault | None] = [None] * healthy
    for _ in range(trials - healthy):
        host = f"node-{luck.randint(1, HOSTS):03}"
        faults.append(Fault(host, luck.choice(SHARES)))
    luck.shuffle(faults)
    return faults


def broken_rules(trials: Sequence[Trial]) -> list[str]:
    """The rules broken: 95% of faults named, healthy hosts blamed in at most one trial."""
    faulty = [trial for trial in trials if trial.fault]
    named = sum(trial.named for trial in faulty)
    blaming = sum(bool(trial.blamed) for trial in trials)
    small = [trial for trial in faulty if (trial.true_slowdown or 0.0) < MIN_SLOWDOWN]
    broken = [f"{trial.fault} slowed its host {trial.true_slowdown:.2f} times" for trial in small]
    if named < 0.95 * len(faulty):
        broken.append(f"{named} of {len(faulty)} slowed hosts were named")
    if blaming > 1:
        broken.append(f"healthy hosts were blamed in {blaming} of {len(trials)} trials")
    return broken


def run_trial(bed: Bed, fault: Fault | None, runs: Path) -> Trial:
    """Slow the host down, measure all hosts' control steps, and let a campaign judge them."""
    began = time.monotonic()
    if fault:
        bed.hosts[fault.host].limit(fault.share)
    try:
        slowdowns = control_steps(list(bed.hosts.values()))
        cluster = runs / "cluster.yaml"
        hosts = ", ".join(bed.names)
        cluster.write_text(CLUSTER.format(nodes=HOSTS, hosts=hosts, config=bed.ssh_config))
        changes = [word for change in CHANGES for word in ("--set", change)]
        new = ["opt-350m-sft-tiny", *changes, "--cluster", str(cluster), "--sizes", "1"]
        first = last = scale(runs, *new, "--name", "trial", _at_once(AT_ONCE), "--extra-rounds=0")
        suspected = (*first["flagged"], *(suspect["host"] for suspect in first["suspects"]))
        if suspected:
            # The second pass takes pairs: one pair after the other, so that no core is shared.
            last = scale(runs, "--resume", "trial", _at_once(AT_ONCE // 2), "--extra-rounds=2")
    finally:
        if fault:
            bed.hosts[fault.host].limit(bed.plan.cores)
    return Trial(
        fault,
        slowdowns,
        {node["host"]: node["loss"] for node in last["nodes"]},
        suspected,
        tuple(last["flagged"]),
        tuple(last["sentences"]),
        time.monotonic() - began,
    )


def control_steps(hosts: Sequence[Host]) -> dict[str, float]:
    """By how much each host's control step is longer than the median host's."""
    threads = ("env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:AT_ONCE]:
        cores.put(core)

    def step_s(host: Host) -> float:
        core = cores.get()  # of its own: the kernel may leave two hosts on one for a second
        try:
            return float(
                host.call("taskset", "-c", str(core), *threads, sys.executable, "-c", STEP)
            )
        finally:
            cores.put(core)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        times = list(pool.map(step_s, hosts))
    usual = median(times)
    return {host.name: step / usual for host, step in zip(hosts, times, strict=True)}


def scale(runs: Path, *arguments: str) -> dict[str, Any]:
    """What `paceline scale` prints as JSON; raises AssertionError with its complaint."""
    environment = {**os.environ, **own_folders(runs)}
    command = [sys.executable, "-m", "paceline", "scale", *arguments, "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: code {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def _at_once(clusters: int) -> str:
    return f"--max-parallel={clusters}"
