"""Live memory at the peak of one training step, from torch's memory tracker.

The tracker sees every tensor that an operation creates. It does not see what libraries allocate
inside an operation: kernel workspaces and gloo's buffers show only in the resident set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook

PARAMETER, BUFFER, GRADIENT = "Parameter", "Buffer", "Gradient"
ACTIVATION, TEMPORARY, OPTIMIZER, OTHER = "Activation", "Temp", "Optstate", "Other"


class ForwardPasses:
    """Callback before each module's forward pass, which replaces the tracker's own module hooks.

    Those hooks also mark the backward passes of modules, by hooks on tensors. This fails if a
    backward pass has two parts, as in the zero-bubble schedule. They also reject a second forward
    pass of the root module, which every further micro-batch is.
    """

    def __init__(self) -> None:
        self._before: Callable[[nn.Module, Any], None] | None = None
        self._handle: Any = None

    @property
    def is_bw(self) -> bool:
        """True inside a backward pass."""
        return torch._C._current_graph_task_id() != -1

    def register_user_hooks(self, before: Callable[[nn.Module, Any], None], *_: object) -> None:
        """Keep the first of the tracker's hooks."""
        self._before = before

    def clear_user_hooks(self) -> None:
        """Drop the hook."""
        self._before = None

    def __enter__(self) -> None:
        self._handle = register_module_forward_pre_hook(self._call)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _call(self, module: nn.Module, inputs: Any) -> None:
        # A recomputed forward pass runs inside the backward pass and adds nothing new.
        if self._before is not None and not self.is_bw:
            self._before(module, inputs)


class OneStepTracker(MemTracker):
    """PyTorch's tracker for an optimizer step of any number of micro-batches, not by module."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = ForwardPasses()  # pyright: ignore[reportAttributeAccessIssue]

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        """Track the module's current parameters, which FSDP has gathered."""
        self._track_module_params_and_buffers(module, install_grad_hooks=False)
        # The tracker would also add its hooks to frozen parameters, which PyTorch rejects.
        trainable = nn.ParameterList(p for p in module.parameters() if p.requires_grad)
        self._track_module_params_and_buffers(trainable)


class TrackedStep:
    """Tracker for one step, and its result at the peak."""

    kind = "tracked"
    tracker = "MemTracker"
    why: str | None = None

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Tensor],
    ) -> None:
        self._tracker = OneStepTracker()
        self._tracker.track_external(*modules, *optimizers, *tables)
        self._at_end: dict[str, int] = {}

    def __enter__(self) -> None:
        self._tracker.__enter__()

    def __exit__(self, *error: object) -> None:
        self._at_end = self._snapshot("current")
        self._tracker.__exit__(*error)

    def at_peak(self, state: Any) -> dict[str, int]:
        """Return bytes by part at the peak; they add up to it.

        Weights beyond the rank's own are gathered ones. DDP's buckets are created by an operation,
        like activations, but outlive the step and hold the gradients: they count as gradients.
        """
        peak = self._snapshot("peak")
        activations = peak[ACTIVATION] + peak[TEMPORARY]
        buckets = min(
            self._at_end[ACTIVATION] + self._at_end[TEMPORARY], state.buckets, activations
        )
        weights = min(peak[PARAMETER], state.weights)
        other = peak[OTHER] + peak[BUFFER]
        buffers = min(other, state.buffers)
        return {
            "weights": weights,
            "gradients": peak[GRADIENT] + buckets,
            "optimizer": peak[OPTIMIZER],
            "buffers": buffers,
            "gathered": peak[PARAMETER] - weights,
            "activations": activations - buckets,
            "other": other - buffers,
        }

    def _snapshot(self, which: str) -> dict[str, int]:
        """Return the tracker's bytes by its own names, over all devices."""
        names = (PARAMETER, BUFFER, GRADIENT, ACTIVATION, TEMPORARY, OPTIMIZER, OTHER)
        total: dict[str, int] = dict.fromkeys(names, 0)
        for device in self._tracker.get_tracker_snapshot(which).values():
            for name, value in device.items():
                label = getattr(name, "value", name)
                if label in total:
                    total[label] += value
        return total
