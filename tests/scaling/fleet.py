"""A fleet of made-up hosts in the place of a launcher: runs write step files like the trainer's."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

# These take parts of the module in whose place a fleet stands.
import paceline.machines.local
import paceline.machines.ray  # noqa: F401
from paceline.core.errors import SystemFaultError
from paceline.core.job import Job
from paceline.engines.native import SETTINGS_FILE
from paceline.files.documents import write_text
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import Handle, JobEnd
from tests.files.test_events import END, START, STEP, lines

STEP_S = 0.2
NUM_STEPS = 12


@dataclass
class FleetRun(Handle):
    """One started run: its steps are written, its end comes with time."""

    ends: float
    code: int = 0
    told: JobEnd | None = None
    stopped: bool = False
    timed_out: bool = False

    def poll(self) -> int | None:
        return self.code if time.monotonic() >= self.ends else None

    def stop(self) -> int:
        self.stopped = True
        return 143

    def sweep(self) -> None: ...

    def verdict(self) -> JobEnd | None:
        return self.told


@dataclass
class Fleet:
    """Hosts that can be slow, down, or die; stands where the ssh launcher does."""

    slow: dict[str, float] = field(default_factory=dict[str, float])
    """By host, how much longer its steps take, relative."""
    down: set[str] = field(default_factory=set[str])
    """Hosts that answer no start."""
    dying: set[str] = field(default_factory=set[str])
    """Hosts that are lost in the middle of a run."""
    dies_once: bool = False
    """Whether a host that was lost is back for the next run."""
    behind: set[str] = field(default_factory=set[str])
    """Hosts behind a bad link: groups with hosts on both sides of it are slower by a tenth."""
    broken: str | None = None
    """What every run ends with."""
    run_s: float = 0.0
    at_least: int = 1
    """Runs on fewer hosts end at once instead."""
    communication: float = 0.01
    noise: float = 0.0005
    runs: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Hosts of every run that was started, in order."""
    handles: list[FleetRun] = field(default_factory=list[FleetRun])

    def render(self, job: Job) -> str:
        return f"# {job.name}\n"

    def prepare(self, job: Job, folder: Path) -> None:
        for name, text in job.files.items():
            if name == SETTINGS_FILE:
                write_text(folder / name, text)
        write_text(folder / SCRIPT_FILE, self.render(job))

    def submit(self, job: Job, folder: Path) -> FleetRun:
        assert job.cluster is not None
        hosts = job.cluster.hosts
        self.runs.append(hosts)
        if down := sorted(self.down & set(hosts)):
            raise SystemFaultError(", ".join(down), "does not answer", hosts=down)
        lost = sorted(self.dying & set(hosts))
        self.dying = set() if lost and self.dies_once else self.dying
        write_ranks(job, folder, self._step_s(hosts), None if lost else self.broken, bool(lost))
        verdict = (
            JobEnd("failed", f"the connection to {lost[0]} was lost", tuple(lost)) if lost else None
        )
        run_s = self.run_s if len(hosts) >= self.at_least else 0.0
        handle = FleetRun(time.monotonic() + run_s, 1 if lost or self.broken else 0, verdict)
        self.handles.append(handle)
        return handle

    def _step_s(self, hosts: tuple[str, ...]) -> float:
        slowest = max(self.slow.get(host, 0.0) for host in hosts)
        slowest += 0.1 if 0 < len(self.behind & set(hosts)) < len(hosts) else 0.0
        luck = np.random.default_rng([len(self.runs), len(hosts)]).normal(0, self.noise)
        return STEP_S * (1 + slowest) * (1 + self.communication * log2(len(hosts))) * (1 + luck)


def write_ranks(
    job: Job, folder: Path, step_s: float, reason: str | None = None, torn: bool = False
) -> None:
    """The step files of all ranks; `reason` ends them as failed, a `torn` run has no last line."""
    settings: dict[str, Any] = json.loads(job.files[SETTINGS_FILE])
    batch, world = settings["training"]["global_batch"], job.nodes * job.devices_per_node
    facts = {"world_size": world, "num_parameters": settings["expected_parameters"]}
    samples, length = batch / world, settings["training"]["seq_len"]
    counts = {"samples": samples, "tokens": samples * length, "seq_len": length}
    counts["global_batch"] = batch
    scatter = np.linspace(-0.001, 0.001, NUM_STEPS)
    for rank in range(world):
        steps = [
            {
                **STEP,
                "step": at,
                **counts,
                "step_time_s": step_s * (1 + s),
                "busy_time_s": step_s,
                "comm_wait_s": 0.0,
            }
            for at, s in enumerate(scatter, start=1)
        ]
        status = "failed" if reason else "ok"
        end = {**END, "status": status, "reason": reason, "steps": len(steps)}
        ends = [] if torn else [end]
        write_text(
            folder / "steps" / f"rank-{rank:05d}.jsonl",
            "".join(lines({**START, **facts, "rank": rank}, *steps, *ends)),
        )
