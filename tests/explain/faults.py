"""Faults injected into real small trainings, and their diagnosis by `paceline explain`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from paceline.explain.diagnosis import explain
from paceline.explain.explanation import CauseName, Explanation
from paceline.files.run_folder import find_run

SETTINGS = (
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.num_heads=4",
    "seq_len=64",
    "batch_per_device=32",
    "layout.micro_batch=32",
    "steps=30",
    "dtype=fp32",
    "data.source=synthetic",
    "memory_parts=false",
)
LIMIT_S = 150.0
QUOTA = Path(f"/sys/fs/cgroup/cpu/paceline-{os.getpid()}")
SLOW_LOADER = """
import sys, threading, time

def patch():
    while "paceline.trainer.data.batches" not in sys.modules:
        time.sleep(0.01)
    module = sys.modules["paceline.trainer.data.batches"]
    while not hasattr(module, "Loader"):
        time.sleep(0.01)
    usual = module.Loader.batch
    def batch(self, step):
        time.sleep({seconds})
        return usual(self, step)
    module.Loader.batch = batch

threading.Thread(target=patch, daemon=True).start()
"""
"""A `sitecustomize` that delays every batch of the trainer's loader, as slow storage does."""

Action = Callable[[list[int]], contextlib.AbstractContextManager[None]]
"""A fault applied to the ranks' processes during training."""


@dataclass(frozen=True)
class Fault:
    """One way to make a training slow."""

    cause: CauseName
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    """Command prefix that starts the training in another environment."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Files to write; {folder} in the options is their folder."""
    action: Action | None = None
    baseline: tuple[str, ...] = ()
    """Settings of the run with which it is compared, where the usual run has other work."""
    needs: Callable[[], bool] = lambda: True
    """True if the fault can be injected on this machine."""


@contextmanager
def stopped_now_and_then(pids: list[int], on_s: float = 0.03, off_s: float = 0.1) -> Iterator[None]:
    """Pause the last rank repeatedly, as a thermally throttled device does."""
    over = threading.Event()

    def pulse() -> None:
        while not over.wait(on_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[-1], signal.SIGSTOP)
                time.sleep(off_s)
                os.kill(pids[-1], signal.SIGCONT)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def with_busy_loops(pids: list[int], count: int = 4) -> Iterator[None]:
    """Run busy loops on the same cores at the ranks' own priority."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    try:
        for process in loops:
            as_urgent(process.pid, os.getpriority(os.PRIO_PROCESS, pids[0]))
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


@contextmanager
def under_quota(pids: list[int], cores: float = 0.8) -> Iterator[None]:
    """Give all ranks together fewer cores than threads, the CPU form of a clock limit."""
    (QUOTA / "cpu.cfs_period_us").write_text("20000")
    (QUOTA / "cpu.cfs_quota_us").write_text(f"{20000 * cores:.0f}")
    try:
        yield
    finally:
        (QUOTA / "cpu.cfs_quota_us").write_text("-1")


IN_GROUP = ("sh", "-c", f'mkdir -p {QUOTA} && echo $$ > {QUOTA}/cgroup.procs && exec "$@"', "sh")
"""Command prefix that starts a process in its own control group, initially without a limit."""


def has_quota() -> bool:
    """Return True if cgroup v1 groups can be created here."""
    return os.access(QUOTA.parent / "cgroup.procs", os.W_OK)


def has_network_spaces() -> bool:
    """Return True if this user may create a network namespace with a slow loopback."""
    return os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "tc")))


def slow_loopback(rate: str) -> tuple[str, ...]:
    """Return a command prefix that limits the loopback to this rate."""
    shape = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 500ms"
    return ("unshare", "-n", "sh", "-c", f'ip link set lo up && {shape} && exec "$@"', "sh")


WITH_EXPERTS = (
    "model.num_experts=4",
    "model.experts_per_token=1",
    "model.ffn_size=1024",
    "layout.ep=2",
    "training.routing=forced",
)
PADDED_EXCHANGE = """
import sys, threading, time

def patch():
    name = "paceline.trainer.parallel.token_exchange"
    while not hasattr(sys.modules.get(name), "_from_experts"):
        time.sleep(0.01)
    module = sys.modules[name]
    usual, filler = module.all_to_all_into, module.torch.zeros({count})
    received = module.torch.empty_like(filler)
    def exchange(out, x, group, *rows):
        usual(received, filler, group)
        return usual(out, x, group, *rows)
    module.all_to_all_into = exchange

threading.Thread(target=patch, daemon=True).start()
"""
"""A `sitecustomize` that adds numbers to every exchange of tokens, as a fixed capacity does."""

FAULTS: dict[str, Fault] = {
    "expert imbalance": Fault(
        "expert imbalance",
        settings=(*WITH_EXPERTS, "training.routing=pattern:9,1"),
        baseline=WITH_EXPERTS,
    ),
    "dispatch": Fault(
        "dispatch",
        settings=WITH_EXPERTS,
        baseline=WITH_EXPERTS,
        files={"sitecustomize.py": PADDED_EXCHANGE.format(count=16 * 2**20)},
    ),
    "slow rank": Fault("slow rank", action=stopped_now_and_then),
    "slow link": Fault("slow link", launcher=slow_loopback("300mbit"), needs=has_network_spaces),
    "data starvation": Fault(
        "data starvation", files={"sitecustomize.py": SLOW_LOADER.format(seconds=0.6)}
    ),
    "small micro-batch": Fault("small micro-batch", settings=("layout.micro_batch=1",)),
    "clock limit": Fault("clock limit", launcher=IN_GROUP, action=under_quota, needs=has_quota),
    "other load": Fault("other load", action=with_busy_loops),
    "pipeline bubble": Fault("pipeline bubble", settings=("layout.pp=2",)),
    "recompute": Fault("recompute", settings=("layout.recompute=full",)),
    "thread binding": Fault(
        "thread binding",
        options=("--bind", "{folder}/bind.txt"),
        files={"bind.txt": "0 0\n1 0\n"},
    ),
    "checkpoint stalls": Fault(
        "checkpoint stalls", settings=("checkpoint.every=1", "checkpoint.asynchronous=false")
    ),
}


def train(
    root: Path,
    tag: str,
    fault: Fault | None = None,
    *,
    urgent: int = 0,
    settings: tuple[str, ...] = (),
) -> Path:
    """Run a real training of two ranks with the fault and return its folder.

    `urgent` raises the ranks' scheduling priority (0-20, needs root).
    Raises RuntimeError if the run fails.
    """
    injected = fault or Fault("other load")
    folder = root / f"{tag}-files"
    folder.mkdir(parents=True)
    for name, text in injected.files.items():
        (folder / name).write_text(text)
    changes = (*SETTINGS, *injected.settings, *settings)
    options = [word.format(folder=folder) for word in injected.options]
    command = [
        *injected.launcher, sys.executable, "-m", "paceline", "run", "tiny-llama", "--no-probe",
        "--devices", "2", "--json", "--tag", tag, "--runs-dir", str(root), *options,
        *(word for change in changes for word in ("--set", change)),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        run = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=out, stderr=err
        )
        try:
            _accompany(run, root, tag, injected, urgent)
            code = run.wait(LIMIT_S)
        finally:
            run.terminate()
            run.wait()
            with contextlib.suppress(OSError):
                QUOTA.rmdir()
    if code:
        raise RuntimeError((folder / "err").read_text()[-2000:])
    return find_run(root, tag)


def _accompany(
    run: subprocess.Popen[bytes], root: Path, tag: str, fault: Fault, urgent: int
) -> None:
    """Apply the fault to the ranks from their start until the run has ended."""
    if fault.action is None and not urgent:
        return
    pids = _ranks(run, root, tag, urgent)
    if fault.action is not None and pids:
        with fault.action(pids):
            _await_end(run, root, tag)


def as_urgent(pid: int, priority: int) -> None:
    """Set the priority (-20 to 19) of a process and its session as far as the system allows."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, priority)
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), priority)
        Path(f"/proc/{pid}/autogroup").write_text(str(priority))
        (QUOTA / "cpu.shares").write_text("80000")


def _ranks(run: subprocess.Popen[bytes], root: Path, tag: str, urgent: int) -> list[int]:
    """Return the process ids of both ranks once they train; empty if the run ends first."""
    prioritised: set[int] = set()
    while run.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            starter = psutil.Process(run.pid)
            family = [starter, *starter.children(recursive=True)] if urgent else []
            for process in [p for p in family if p.pid not in prioritised]:
                as_urgent(process.pid, -urgent)
                prioritised.add(process.pid)
        files = sorted(root.glob(f"*-{tag}-*/steps/rank-*.jsonl"))
        starts = [path.read_text().partition("\n") for path in files]
        if len(starts) == 2 and all(newline for _, newline, _ in starts):
            return [json.loads(line)["pid"] for line, _, _ in starts]
        time.sleep(0.05)
    return []


def _await_end(run: subprocess.Popen[bytes], root: Path, tag: str) -> None:
    """Wait until all ranks have written their end events."""
    while run.poll() is None:
        files = sorted(root.glob(f"*-{tag}-*/steps/rank-*.jsonl"))
        if all('"event": "end"' in path.read_text()[-500:] for path in files):
            return
        time.sleep(0.02)


def explain_tagged_run(root: Path, tag: str, against: str | None) -> Explanation:
    """Return the explanation of the run with a tag."""
    return explain(find_run(root, tag), against, root)
