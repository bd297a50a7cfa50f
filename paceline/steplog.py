"""Tells Paceline the steps of any training loop. Standard library alone: import it or copy it.

    for batch in steplog.batches(loader):
        with steplog.step(tokens=batch.numel(), samples=len(batch)) as step:
            step.loss = train(batch)

Every rank appends JSON lines to rank-NNNNN.jsonl in $PACELINE_STEPS, which `paceline run -- ...`
sets, or in the folder given to `begin`; without either nothing is written. A step takes as long as
its block and the marked waits since the one before. On a GPU that is the host's time: end the block
with what waits for the device, as `loss.item()`, or single steps blur (their mean holds).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def begin(folder: str | None = None, first_step: int = 1) -> None:
    """Open this rank's file, in $PACELINE_STEPS without a folder; the first step does so too."""
    _logs.append(_Log(folder or os.environ.get("PACELINE_STEPS"), first_step))


@contextmanager
def step(
    tokens: float | None = None, samples: float | None = None, loss: Any = None
) -> Iterator[SimpleNamespace]:
    """Record one optimizer step of this rank's tokens and samples.

    The yielded object accepts `tokens`, `samples`, `loss` and `grad_norm` until the block ends. A
    block that raises is not recorded.
    """
    log, began_s = _log(), time.perf_counter()
    before_s = sum(log.waits.values())
    line = SimpleNamespace(tokens=tokens, samples=samples, loss=loss, grad_norm=None)
    yield line
    # Inside the step, because reading a tensor on a GPU waits for it.
    values = {name: float(value) for name, value in vars(line).items() if value is not None}
    took_s = time.perf_counter() - began_s + before_s
    waited_s = log.waits.get("comm_wait_s", 0.0 if log.world == 1 else None)
    busy_s = None if waited_s is None else max(0.0, took_s - waited_s)
    log.steps, log.finite = log.steps + 1, math.isfinite(values.get("loss", 0.0))
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    log.write("step", step=log.steps, **finite, step_time_s=took_s, busy_time_s=busy_s,
              **{"comm_wait_s": waited_s, **log.waits}, memory_bytes=_peaks())  # fmt: skip
    log.waits = dict.fromkeys(log.waits, 0.0)


def waiting_for_data() -> Any:
    """Mark a block that waits for input, inside a step or before it."""
    return _waiting("data_wait_s")


def waiting_for_ranks() -> Any:
    """Mark a block that only waits for other ranks.

    Mark every such wait or none. Without them no rank can be identified as slow, because all ranks
    take the time of the slowest one.
    """
    return _waiting("comm_wait_s")


def batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches; the time until each arrives counts as a wait for data."""
    iterator, end = iter(loader), object()
    while True:
        with waiting_for_data():
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


class _Log:
    """One rank's file and the waits since its last step; without a folder it writes nothing."""

    def __init__(self, folder: str | None, first_step: int) -> None:
        self.pid, self.steps, self.finite, self.file = os.getpid(), first_step - 1, True, None
        self.waits: dict[str, float] = {}
        rank, self.world = _number("RANK", "NODE_RANK"), _number("WORLD_SIZE", "NNODES", default=1)
        torch, group = sys.modules.get("torch"), sys.modules.get("torch.distributed")
        if group and group.is_available() and group.is_initialized():
            rank, self.world = group.get_rank(), group.get_world_size()
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = (Path(folder) / f"rank-{rank:05d}.jsonl").open("a", buffering=1)
        self.file.write("\n" if self.file.tell() else "")  # what was killed may leave a torn line
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda} if torch else {}
        self.write("start", schema=1, rank=rank, world_size=self.world, pid=self.pid,
                   local_rank=_number("LOCAL_RANK"),
                   host=os.environ.get("PACELINE_HOST") or platform.node(), time_unix=time.time(),
                   monotonic_s=time.monotonic(), first_step=first_step,
                   python=platform.python_version(), **versions)  # fmt: skip
        atexit.register(self.end)

    def end(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception that ended the program
        if self.pid != os.getpid() or isinstance(error, KeyboardInterrupt):
            return
        status, reason = "ok", None
        if not self.finite:
            status, reason = "nan", f"the loss of step {self.steps} is not finite"
        elif error is not None:  # Paceline takes the cause from the words
            status, reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self.write("end", status=status, reason=reason, steps=self.steps, time_unix=time.time())

    def write(self, event: str, **values: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"event": event, **values}) + "\n")


_logs: list[_Log] = []


def _log() -> _Log:
    if not _logs or _logs[-1].pid != os.getpid():  # a forked process opens the rank's file itself
        begin()
    return _logs[-1]


@contextmanager
def _waiting(kind: str) -> Iterator[None]:
    log, began_s = _log(), time.perf_counter()
    try:
        yield
    finally:
        log.waits[kind] = log.waits.get(kind, 0.0) + time.perf_counter() - began_s


def _number(*variables: str, default: int = 0) -> int:
    return next((int(os.environ[name]) for name in variables if name in os.environ), default)


def _peaks() -> dict[str, int]:
    """Peak bytes so far: the resident set, and what torch's allocator has on a GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda and cuda.is_initialized():
        peaks |= {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}
    return peaks
