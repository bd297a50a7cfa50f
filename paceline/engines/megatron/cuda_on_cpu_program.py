"""Megatron-Core without a GPU: what it asks of CUDA is answered by the CPU.

Megatron-Core names the device "cuda" and asks torch.cuda throughout. Tensors that it would make
there are made on the CPU, types are told by their CUDA names, and the random states that it keeps
by tensor rank are states of the CPU's generator. Nothing of Megatron-Core itself is replaced but
the two functions that read and write CUDA's random state.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging

import torch
from torch.overrides import TorchFunctionMode


class CudaOnCpu(TorchFunctionMode):
    """Within it `device="cuda"` is the CPU."""

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
    """Answer for CUDA from now on; `parallel_state` and models are made afterwards."""
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
    # It warns when the CPU's random state changes where only CUDA's should, and they are one here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
