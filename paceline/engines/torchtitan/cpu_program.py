# pyright: reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportUnknownLambdaType=false
"""Runs torchtitan 0.2 on a CPU, which it does not know: `torchtitan.train` behind a few stand-ins.

Takes torchtitan's own arguments. On GPUs torchtitan is started without it.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch._utils
from torch.distributed.fsdp import FSDPModule


class CpuModule(types.ModuleType):
    """What torchtitan asks of torch.cuda, answered for a CPU; memory it does not know."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: object) -> None:
        """There is one."""

    def current_device(self) -> int:
        """The one that there is."""
        return 0

    def get_device_name(self, device: object = None) -> str:
        """What torchtitan prints."""
        return "CPU"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        """Memory of the whole machine, bytes."""
        pages = os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=pages * os.sysconf("SC_PAGE_SIZE"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Nothing reserved, since nothing counts it."""
        return {"active_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """There is no peak."""

    def empty_cache(self) -> None:
        """There is no cache."""


def main() -> None:
    """Train."""
    # Every process has the one device, whose index gloo and torch.device take for a GPU's.
    os.environ["LOCAL_RANK"] = "0"
    sum_gradients()
    # Kernels for experts, which no dense model calls; they need triton.
    sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()
    with on_cpu():
        from torchtitan.tools import utils
    # No data sheet states a peak, and torchtitan would take an A100's.
    utils.get_peak_flops = lambda _: float("nan")
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    train(Trainer)


def on_cpu() -> AbstractContextManager[Any]:
    """Have torchtitan find a CPU when it is imported, instead of a GPU."""
    return mock.patch.multiple(
        torch._utils,
        _get_available_device_type=lambda: "cpu",
        _get_device_module=lambda _: CpuModule("cpu"),
    )


def sum_gradients() -> None:
    """Have FSDP sum and divide apart: gloo has no reduction that does both."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_a_sum(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_factor_of_a_sum


if __name__ == "__main__":
    main()
