# pyright: reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportUnknownLambdaType=false
"""Program that runs torchtitan 0.2 on a CPU, which it does not support, with a few mocks.

Accepts the arguments of `torchtitan.train`. On GPUs, torchtitan starts without it.
"""

from __future__ import annotations

import os
import sys
import types
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


class CpuModule(types.ModuleType):
    """Replacement of torch.cuda for a CPU; memory use is unknown."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: object) -> None:
        """Do nothing: there is only one device."""

    def current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_device_name(self, device: object = None) -> str:
        """Return the device name that torchtitan prints."""
        return "CPU"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        """Return the memory of the whole machine in bytes."""
        pages = os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=pages * os.sysconf("SC_PAGE_SIZE"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Return zero, because no allocator counts memory."""
        return {"active_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Do nothing: there is no peak."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""


def main() -> None:
    """Train."""
    # Every process uses the only device; gloo and torch.device interpret its index as that of a
    # GPU.
    os.environ["LOCAL_RANK"] = "0"
    sum_gradients()
    count_integers()
    # They need triton. Only the grouped GEMM and expert parallelism call them.
    sys.modules["torchtitan.models.moe.kernels"] = mock.MagicMock()
    with on_cpu():
        from torchtitan.tools import utils
    # No data sheet states a peak, and torchtitan would use an A100's.
    utils.get_peak_flops = lambda _: float("nan")
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    train(Trainer)


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which torchtitan detects a CPU instead of a GPU at import."""
    return mock.patch.multiple(
        torch._utils,
        _get_available_device_type=lambda: "cpu",
        _get_device_module=lambda _: CpuModule("cpu"),
    )


def count_integers() -> None:
    """Make torch.histc accept integers, as it does on GPUs; routers count tokens with it."""
    count = torch.histc

    def count_any(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return count(values.float(), *args, **options).to(values.dtype)

    torch.histc = count_any


def sum_gradients() -> None:
    """Make FSDP sum and divide separately: gloo has no reduction for both."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_a_sum(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_factor_of_a_sum


if __name__ == "__main__":
    main()
