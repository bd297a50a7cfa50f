"""Emulation of CUDA on the CPU, so that Megatron-Core runs without a GPU.

Megatron-Core uses device "cuda" and torch.cuda throughout. Here its tensors are on the CPU, types
report their CUDA names, and the random states per tensor-parallel rank are states of the CPU's
generator. Only two functions of Megatron-Core are replaced: those that read and write CUDA's random
state.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging

import torch
from torch.overrides import TorchFunctionMode


class CudaOnCpu(TorchFunctionMode):
    """Mode in which `device="cuda"` means the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def switch_on() -> None:
    """Enable the emulation; call it before creating `parallel_state` and models."""
    from megatron.core.tensor_parallel import random

    CudaOnCpu().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # It warns when the CPU's random state changes instead of CUDA's; here they are the same.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
