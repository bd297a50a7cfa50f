"""What a rank's memory is used for, by part, and its peaks by kind.

Weights, gradients, optimizer state and buffers are sums over the tensors that this rank holds. What
else is alive at the peak is watched in one early step: on a CPU by torch's memory tracker, on CUDA
by the allocator's statistics. The watched step is slower, so its line says `tracked` and its time
is no figure of the training.
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
"""One of so many reads of the peaks asks the driver, which is slower than PyTorch's counters."""
MOST_TRIES = 3
"""At most so many steps are watched: those that fp16 skips at first have no whole gradient."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the tensors that a rank holds, by part; unknown gradients are None."""

    weights: int
    gradients: int | None
    optimizer: int
    buffers: int
    buckets: int
    """Size of the gradients' storages that outlive the step: DDP's buckets."""


class WatchedStep(Protocol):
    """Finds what is alive at the peak of the step that runs inside its context."""

    kind: str
    tracker: str
    why: str | None
    """What cannot be told apart, if anything."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> Any: ...

    def at_peak(self, state: StateBytes) -> dict[str, int]:
        """Bytes by part at the moment of the peak; they add up to it."""
        ...


class MemoryWatch:
    """Watches one step, and keeps the peaks; made before the model and after the process group.

    `untracked` is why the tensors of a CPU step cannot be followed, None when they can. `limited`:
    memory will be limited, so what watching needs itself is loaded now.
    """

    def __init__(
        self,
        device: torch.device,
        parts: bool = True,
        untracked: str | None = None,
        limited: bool = False,
    ) -> None:
        self.device, self.untracked = device, untracked
        if parts and limited and untracked is None:
            with suppress(ImportError):
                from paceline.trainer.measure import memory_tracker  # noqa: F401  # pyright: ignore[reportUnusedImport]
        self._tries = MOST_TRIES if parts else 0
        self._before_model = resident_now()
        self._counters = AllocatorCounters(device) if device.type == "cuda" else None
        self._record: dict[str, Any] = {}
        self._watcher: int | None = None
        self._calls = 0

    @contextmanager
    def step(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[bool]:
        """Around a training step: yields whether it is watched, which `record` then tells of.

        The first step whose optimizer already has state is watched, that is the second one.
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
        watched = self._watched(modules, optimizers)
        self._watcher = grown(before)
        try:
            with ResidentSampler() as resident, watched or nullcontext():
                yield True
        finally:
            for hook in hooks:
                hook.remove()
        whole = gradients[0] if gradients else None
        if whole is not None:
            self._tries = 0
        self._record = self._fields(state_bytes(modules, optimizers, whole), watched, resident)

    def record(self) -> dict[str, Any]:
        """The memory event's fields, after a watched step."""
        return self._record

    def peaks(self, ask_device: bool = False) -> dict[str, int | None]:
        """Peaks so far by kind: a CUDA allocator's, and the device's used memory, of all programs.

        The latter is looked at now if `ask_device`, and else in every DEVICE_EVERY-th call.
        """
        if self._counters is None:
            return {"allocated": None, "reserved": None, "device_used": None}
        ask_device = ask_device or self._calls % DEVICE_EVERY == 0
        self._calls += 1
        return self._counters.peaks(ask_device)

    def _watched(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> WatchedStep | None:
        if self._counters is not None:
            return AllocatorStep(modules, self._counters)
        if self.untracked is not None:
            return None
        try:
            # Importing it takes up to a second, which the watched step pays and not every start.
            from paceline.trainer.measure.memory_tracker import TrackedStep

            return TrackedStep(modules, optimizers, tables(modules))
        except (ImportError, AttributeError, TypeError) as error:
            # The tracker is private to PyTorch; another version's must not end a training.
            self.untracked = f"this PyTorch's memory tracker is not the one that is known: {error}"
            return None

    def _fields(
        self, state: StateBytes, watched: WatchedStep | None, resident: ResidentSampler
    ) -> dict[str, Any]:
        at_peak = watched.at_peak(state) if watched is not None else None
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
            "kind": watched.kind if watched is not None else None,
            "tracker": watched.tracker if watched is not None else None,
            "why": self.untracked if watched is None else watched.why,
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
        """What is lost to the run before any tensor: libraries on a CPU, the driver's on CUDA.

        On CUDA it is what the device has in use beyond PyTorch's own pool, other programs included.
        """
        return self._before_model if self._counters is None else self._counters.outside()


class ResidentSampler:
    """The largest resident set of this process while the context lasts, looked at every 2 ms."""

    peak_bytes: int | None = None

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident-sampler", daemon=True)

    def __enter__(self) -> ResidentSampler:
        self._look()
        # A thread's whole stack counts against a memory limit, 8 MiB by default.
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        now = resident_now()
        if now is not None:
            self.peak_bytes = max(now, self.peak_bytes or 0)


class Gradients:
    """What is known of complete gradients after they are gone: nothing here keeps them alive."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tensors = [local(p.grad) for p in parameters(modules) if p.grad is not None]
        self.num_bytes = tensor_bytes(tensors)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [(weakref.ref(s), s.nbytes()) for s in storages.values()]

    def lasting(self) -> int:
        """Bytes of their storages that are still there."""
        return sum(size for storage, size in self._storages if storage() is not None)


def grown(before: int | None) -> int | None:
    """By how much the resident set has grown, in bytes; None where the system does not say."""
    now = resident_now()
    return None if before is None or now is None else max(0, now - before)


def state_bytes(
    modules: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    whole: Gradients | None,
) -> StateBytes:
    """Bytes by part of what the rank holds after a step; `whole` are its gradients, if known."""
    modules = list(modules)
    return StateBytes(
        weights=tensor_bytes(parameters(modules)),
        gradients=whole.num_bytes if whole is not None else None,
        optimizer=tensor_bytes(t for o in optimizers for t in optimizer_tensors(o)),
        buffers=tensor_bytes(tables(modules)),
        buckets=whole.lasting() if whole is not None else 0,
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's part of some tensors, each counted once."""
    once = {id(tensor): tensor for tensor in tensors}
    return sum(t.numel() * t.element_size() for t in map(local, once.values()))


def parameters(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Every parameter once, tied ones included once."""
    return list({id(p): p for module in modules for p in module.parameters()}.values())


def tables(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Registered buffers, and tensors in modules' plain attributes, such as rotary tables."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        tensors |= {id(buffer): buffer for buffer in module.buffers()}
        for part in module.modules():
            for value in vars(part).values():
                kept = value if isinstance(value, tuple | list) else (value,)
                tensors |= {id(t): t for t in kept if isinstance(t, Tensor)}
    for parameter in parameters(modules):
        tensors.pop(id(parameter), None)
    return list(tensors.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, step counters included; none before its first step."""
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
