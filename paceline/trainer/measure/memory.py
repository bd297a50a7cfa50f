"""A rank's memory by part and its peaks by kind.

Weights, gradients, optimizer state and buffers are sums over this rank's tensors. Everything else
that is alive at the peak is measured in one early step: on a CPU with torch's memory tracker, on
CUDA with the allocator's statistics. The tracked step is slower, so its record has `tracked` and
its time is not used.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.trainer.measure.allocator import AllocatorCounters, AllocatorStep
from paceline.trainer.measure.machine import resident_now
from paceline.trainer.parallel.tensor import local

SAMPLE_S = 0.002
STACK_BYTES = 2**18
DEVICE_EVERY = 20
"""Interval of driver queries in calls of `peaks`; they are slower than PyTorch's counters."""
MAX_TRIES = 3
"""Maximum number of tracked steps; steps that fp16 skips have no complete gradient."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's tensors by part; unknown gradients are None."""

    weights: int
    gradients: int | None
    optimizer: int
    buffers: int
    buckets: int
    """Bytes of gradient storages that outlive the step (DDP's buckets)."""


class WatchedStep(Protocol):
    """A context that measures what is alive at the peak of a step."""

    kind: str
    tracker: str
    why: str | None
    """Reason why some parts cannot be separated; None if all can."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> Any: ...

    def at_peak(self, state: StateBytes) -> dict[str, int]:
        """Return bytes by part at the peak; they add up to it."""
        ...


class MemoryWatch:
    """Tracks one step and the peaks; create it before the model and after the process group.

    `untracked_reason` is why the tensors of a CPU step cannot be tracked; None when they can. With
    `limited`, memory will be limited later, so the tracker is imported now.
    """

    def __init__(
        self,
        device: torch.device,
        parts: bool = True,
        untracked_reason: str | None = None,
        limited: bool = False,
    ) -> None:
        self.device, self.untracked_reason = device, untracked_reason
        if parts and limited and untracked_reason is None:
            with suppress(ImportError):
                from paceline.trainer.measure import memory_tracker  # noqa: F401  # pyright: ignore[reportUnusedImport]
        self._tries = MAX_TRIES if parts else 0
        self._before_model = resident_now()
        self._counters = AllocatorCounters(device) if device.type == "cuda" else None
        self._record: dict[str, Any] = {}
        self._watcher: int | None = None
        self._calls = 0

    @contextmanager
    def step(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[bool]:
        """Enclose a training step; yield whether it is tracked, in which case `record` has data.

        The first step with existing optimizer state is tracked, that is the second step.
        """
        if not self._tries or not any(optimizer_tensors(optimizer) for optimizer in optimizers):
            yield False
            return
        self._tries -= 1
        gradients: list[Gradients] = []
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: gradients.append(Gradients(modules)))
            for optimizer in optimizers
        ]
        before = resident_now()
        tracker = self._step_tracker(modules, optimizers)
        self._watcher = resident_growth(before)
        try:
            with ResidentSampler() as resident, tracker or nullcontext():
                yield True
        finally:
            for hook in hooks:
                hook.remove()
        whole = gradients[0] if gradients else None
        if whole is not None:
            self._tries = 0
        self._record = self._fields(state_bytes(modules, optimizers, whole), tracker, resident)

    def record(self) -> dict[str, Any]:
        """Return the fields of the memory event after a tracked step."""
        return self._record

    def peaks(self, ask_device: bool = False) -> dict[str, int | None]:
        """Return peaks so far: the CUDA allocator's, and the device's memory used by all programs.

        The latter is queried if `ask_device`, and else in every DEVICE_EVERY-th call.
        """
        if self._counters is None:
            return {"allocated": None, "reserved": None, "device_used": None}
        ask_device = ask_device or self._calls % DEVICE_EVERY == 0
        self._calls += 1
        return self._counters.peaks(ask_device)

    def _step_tracker(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> WatchedStep | None:
        if self._counters is not None:
            return AllocatorStep(modules, self._counters)
        if self.untracked_reason is not None:
            return None
        try:
            # The import takes up to a second, so it is not done at every start.
            from paceline.trainer.measure.memory_tracker import TrackedStep

            return TrackedStep(modules, optimizers, tables(modules))
        except (ImportError, AttributeError, TypeError) as error:
            # The tracker is private to PyTorch; a change of it must not end a training.
            self.untracked_reason = f"PyTorch's memory tracker has changed: {error}"
            return None

    def _fields(
        self, state: StateBytes, tracker: WatchedStep | None, resident: ResidentSampler
    ) -> dict[str, Any]:
        at_peak = tracker.at_peak(state) if tracker is not None else None
        peak = sum(at_peak.values()) if at_peak is not None else None
        parts = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "buffers": state.buffers,
            **{
                part: at_peak.get(part) if at_peak else None
                for part in ("gathered", "activations", "other")
            },
            "context": self._context_bytes(),
        }
        return {
            "kind": tracker.kind if tracker is not None else None,
            "tracker": tracker.tracker if tracker is not None else None,
            "why": self.untracked_reason if tracker is None else tracker.why,
            "watcher_bytes": self._watcher,
            "parts_bytes": parts,
            "at_peak_bytes": at_peak,
            "peak_bytes": {
                **self.peaks(ask_device=True),
                "resident": resident.peak_bytes,
                "tracked": peak if self._counters is None else None,
            },
        }

    def _context_bytes(self) -> int | None:
        """Return memory in use without any tensor: libraries on a CPU, the context on CUDA.

        On CUDA it is all memory outside PyTorch's pool, including that of other programs.
        """
        return self._before_model if self._counters is None else self._counters.outside()


class ResidentSampler:
    """A context that records this process's peak resident memory, sampled every 2 ms."""

    peak_bytes: int | None = None

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident-sampler", daemon=True)

    def __enter__(self) -> ResidentSampler:
        self._sample()
        # A thread's whole stack (8 MiB by default) counts towards a memory limit.
        default = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(default)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        now = resident_now()
        if now is not None:
            self.peak_bytes = max(now, self.peak_bytes or 0)


class Gradients:
    """Sizes of complete gradients, without keeping them alive."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = [local(p.grad) for p in parameters(modules) if p.grad is not None]
        self.num_bytes = tensor_bytes(tensors)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [(weakref.ref(s), s.nbytes()) for s in storages.values()]

    def lasting(self) -> int:
        """Return the bytes of their storages that still exist."""
        return sum(size for storage, size in self._storages if storage() is not None)


def resident_growth(before: int | None) -> int | None:
    """Return the growth of resident memory in bytes; None where it is unknown."""
    now = resident_now()
    return None if before is None or now is None else max(0, now - before)


def state_bytes(
    modules: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    whole: Gradients | None,
) -> StateBytes:
    """Return the bytes by part after a step; `whole` are its gradients, if known."""
    modules = list(modules)
    return StateBytes(
        weights=tensor_bytes(parameters(modules)),
        gradients=whole.num_bytes if whole is not None else None,
        optimizer=tensor_bytes(t for o in optimizers for t in optimizer_tensors(o)),
        buffers=tensor_bytes(tables(modules)),
        buckets=whole.lasting() if whole is not None else 0,
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's part of some tensors, each counted once."""
    once = {id(tensor): tensor for tensor in tensors}
    return sum(t.numel() * t.element_size() for t in map(local, once.values()))


def parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return every parameter once."""
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def tables(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return registered buffers and tensors in plain attributes, such as rotary tables."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        tensors |= {id(buffer): buffer for buffer in module.buffers()}
        for part in module.modules():
            for value in vars(part).values():
                items = value if isinstance(value, tuple | list) else (value,)
                tensors |= {id(t): t for t in items if isinstance(t, Tensor)}
    for parameter in parameters(modules):
        tensors.pop(id(parameter), None)
    return list(tensors.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, including step counters."""
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
