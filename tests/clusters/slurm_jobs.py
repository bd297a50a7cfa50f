"""Runs on a Slurm bed whose ranks stand in for the trainer: its event lines without its work."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core.hardware import Cluster, SlurmSettings
from paceline.core.job import Job
from paceline.core.layout import Layout
from paceline.core.run_report import RunReport
from paceline.machines import slurm
from paceline.machines.slurm.batch import BatchRun
from paceline.machines.slurm.steps import StepRun
from paceline.runs import flow
from paceline.runs.plan import Plan
from tests.example import make_spec
from tests.files.test_events import END, START, STEP
from tests.machines.ranks import exit_code
from tests.waiting import wait_until

RANK = """
import json, os, pathlib, socket, sys, time
steps, step_s, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if pathlib.Path("attempts").exists():
    step_s = 0.001
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start, step, end = json.loads(pathlib.Path("lines.json").read_text())
place = {"rank": rank, "world_size": world, "host": socket.gethostname(), "pid": os.getpid()}
times = {"step_time_s": step_s, "busy_time_s": step_s}
print("rank", rank, "at", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
with open(f"steps/rank-{rank:05d}.jsonl", "w", buffering=1) as file:
    print(json.dumps({**start, **place, "time_unix": time.time()}), file=file)
    for number in range(1, steps + 1):
        time.sleep(step_s)
        print(json.dumps({**step, "step": number, **times}), file=file)
    if code and rank == world - 1:
        sys.exit(code)
    if code:
        time.sleep(600)
    print(json.dumps({**end, "steps": steps, "time_unix": time.time()}), file=file)
"""


def make_job(
    *,
    nodes: int = 2,
    steps: int = 8,
    step_s: float = 0.02,
    code: int = 0,
    hosts: tuple[str, ...] = (),
    interface: str | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float | None = None,
    name: str = "example",
    program: str = RANK,
    **site: Any,
) -> Job:
    """A job of one rank a node; the last ends with `code`, and the others wait, if it is not 0."""
    cluster = Cluster(
        name="bed",
        device="cpu",
        nodes=nodes,
        devices_per_node=1,
        launcher="slurm",
        hosts=hosts,
        interface=interface,
        slurm=SlurmSettings(**site),
    )
    training = make_spec().training
    samples = training.global_batch / nodes
    step = {
        **STEP,
        "samples": samples,
        "tokens": samples * training.seq_len,
        "seq_len": training.seq_len,
        "global_batch": training.global_batch,
    }
    return Job(
        name=name,
        python=sys.executable,
        program=("rank.py", str(steps), str(step_s), str(code)),
        files={"rank.py": program, "lines.json": json.dumps([START, step, END])},
        env=env or {},
        nodes=nodes,
        cluster=cluster,
        timeout_s=timeout_s,
    )


def train(runs: Path, job: Job, stopped: Callable[[], bool] = bool) -> RunReport:
    """What `paceline run` does with such a job."""
    assert job.cluster
    spec = make_spec(cluster=job.cluster, layout=Layout(micro_batch=1), time_limit_s=job.timeout_s)
    return flow.run(
        Plan(spec, job, {}), runs, ["test"], lambda _: None, probe=False, is_cancelled=stopped
    )


def start(job: Job, folder: Path, **options: Any) -> BatchRun | StepRun:
    """Prepare and submit in a new folder."""
    folder.mkdir(parents=True)
    slurm.prepare(job, folder)
    run = slurm.submit(job, folder, **options)
    assert isinstance(run, BatchRun | StepRun)
    return run


def wait(run: BatchRun | StepRun, limit_s: float = 180) -> int:
    """The exit code, once the run has ended."""
    return exit_code(run, limit_s)


def until_ranks_run(folder: Path, ranks: int = 2) -> None:
    """Wait until `count` ranks have made a step, in `folder` or its only run folder."""

    def enough() -> bool:
        files = [*folder.glob("steps/rank-*.jsonl"), *folder.glob("*/steps/rank-*.jsonl")]
        return len([path for path in files if '"step"' in path.read_text()]) >= ranks

    wait_until(enough, "the ranks", 120)


class Background(threading.Thread):
    """A function that runs in another thread; `result()` waits for its return value."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.call = lambda: function(*arguments)
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:
            self.error = error

    def result(self, limit_s: float = 120) -> Any:
        self.join(limit_s)
        assert not self.is_alive(), "it did not end"
        if self.error:
            raise self.error
        return self.value
