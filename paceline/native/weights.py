"""Initial weights that depend on the seed and a parameter's name alone, whatever the layout."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from model import Decoder, Norm

INIT_STD = 0.02


def mixed_seed(seed: int, part: int) -> int:
    """A seed for one part of a run that differs from the other parts'."""
    return (seed * 1_000_000_007 + part) % 2**63


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Fill all parameters and tables: matrices from N(0, 0.02), norm weights with 1, biases with 0.

    A sharded parameter takes its part of the very matrix that a single process would hold, which is
    made whole for a moment.
    """
    ones = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Norm)}
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
        if name in ones:
            whole.fill_(1)
        elif name.endswith(".bias"):
            whole.zero_()
        else:
            generator = torch.Generator(whole.device)
            generator.manual_seed(mixed_seed(seed, zlib.crc32(name.encode())))
            whole.normal_(0, INIT_STD, generator=generator)
        _assign(parameter, whole)
    model.make_tables(model.embedding.weight.device)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assign(parameter: Tensor, whole: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # src_data_rank=None cuts the local tensor without sending anything.
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()
    local(parameter).copy_(whole)
