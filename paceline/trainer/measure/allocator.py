"""Live memory at the peak of one training step, from the CUDA allocator's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

WHOLE_GRADIENTS = (
    "activations include whole gradients, "
    "which ZeRO-2 and 3 hold until a pipeline's last micro-batch"
)


class AllocatorCounters:
    """Memory counters of a device; the allocator's peaks are kept over resets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peaks = {"allocated": 0, "reserved": 0, "device_used": 0}

    def allocated(self) -> int:
        """Return the current bytes of live tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the peak bytes of live tensors since `reset`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        """Start a new peak; the previous one is kept for `peaks`."""
        self.peaks(ask_device=False)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self, ask_device: bool = True) -> dict[str, int | None]:
        """Return the peak allocated, reserved and used bytes so far; used counts all programs.

        Without `ask_device` the used bytes are the largest that an earlier call found.
        """
        now = {
            "allocated": self.peak(),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }
        if ask_device:
            free, total = torch.cuda.mem_get_info(self.device)
            now["device_used"] = total - free
        self._peaks |= {kind: max(value, self._peaks[kind]) for kind, value in now.items()}
        return dict(self._peaks)

    def outside(self) -> int:
        """Return the device memory outside PyTorch's pool in bytes: contexts and other programs."""
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, total - free - torch.cuda.memory_reserved(self.device))


def reduces_late(module: nn.Module) -> bool:
    """Return whether FSDP keeps full gradients until the step's end, as in a pipeline stage."""
    part = getattr(module, "part", None)
    return isinstance(module, FSDPModule) and part is not None and not (part.first and part.last)


class AllocatorStep:
    """One step whose peak is divided into earlier memory, gradients, and the rest.

    The allocator knows no parts, so its peak is read whenever a gradient is added: between two
    readings the gradients' bytes are known.

    FSDP adds a parameter's gradient after reducing it. In a pipeline (ZeRO-2 and 3) that is after
    the last micro-batch. Until then full gradients live in FSDP's own tensors, which no counter can
    distinguish from activations; `why` then reports this.
    """

    kind = "allocated"
    tracker = "allocator"

    def __init__(self, modules: Sequence[nn.Module], counters: AllocatorCounters) -> None:
        self._parameters = list({id(p): p for m in modules for p in m.parameters()}.values())
        self._counters = counters
        self.why = WHOLE_GRADIENTS if any(map(reduces_late, modules)) else None
        self._hooks: list[Any] = []
        self._added: dict[int, int] = {}
        self._before = self._peak = self._gradients = 0

    def __enter__(self) -> None:
        self._before = self._counters.allocated()
        self._counters.reset()
        trainable = (p for p in self._parameters if p.requires_grad)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._record_gradient) for p in trainable
        ]

    def __exit__(self, *error: object) -> None:
        self._read_peak()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def at_peak(self, state: Any) -> dict[str, int]:
        """Return bytes by part at the peak; they add up to it.

        Activations include gathered weights, kernel workspaces and, in a pipeline, the full
        gradients that FSDP has not reduced yet. `other` existed before the step and is not a tensor
        of model or optimizer.
        """
        persistent = state.weights + state.optimizer + state.buffers + state.buckets
        gradients = state.buckets or min(self._gradients, self._peak - self._before)
        during = gradients if not state.buckets else 0
        return {
            "weights": state.weights,
            "gradients": gradients,
            "optimizer": state.optimizer,
            "buffers": state.buffers,
            "activations": self._peak - self._before - during,
            "other": self._before - persistent,
        }

    def _record_gradient(self, parameter: Tensor) -> None:
        self._read_peak()
        grad = parameter.grad
        if grad is not None:
            part = getattr(grad, "_local_tensor", grad)
            self._added[id(parameter)] = part.numel() * part.element_size()

    def _read_peak(self) -> None:
        """Read the peak since the last reading, when the gradients were those added before it."""
        peak = self._counters.peak()
        if peak > self._peak:
            self._peak, self._gradients = peak, sum(self._added.values())
        self._counters.reset()
