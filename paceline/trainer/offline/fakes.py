"""Stand-ins for what cannot run on tensors without memory: DDP, and the kernels of a GPU.

Each keeps as many bytes, for as long, as what it stands for. They compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional


class BucketedGradients(nn.Module):
    """DistributedDataParallel with gradients as views of its buckets, which outlive every step."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self._exchanges = True
        self._buckets: dict[nn.Parameter, Tensor] = {}
        self._trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Nothing is exchanged."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A micro-batch whose gradients stay where autograd puts them."""
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def forward(self, *arguments: Tensor) -> Any:
        """The module's; DDP lays its buckets out anew in the second step, which is followed."""
        if self._exchanges:
            self._buckets = {p: torch.zeros_like(p, requires_grad=False) for p in self._trained}
        return self.module(*arguments)

    def _take(self, parameter: Tensor) -> None:
        if self._exchanges and isinstance(parameter, nn.Parameter):
            parameter.grad = self._buckets[parameter]


class FusedAttention(torch.autograd.Function):
    """Flash attention: (B, N, Tq, D) over (B, K, Tk, D); keeps inputs, output and a sum a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel: keeps its input, its weight and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        row = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, row)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class FusedDropout(torch.autograd.Function):
    """Dropout in one kernel: keeps a byte for each number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.empty_like(grad)


def dropout(x: Tensor, p: float = 0.5, *_: Any) -> Tensor:
    """dropout of a share of x."""
    return FusedDropout.apply(x)  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """scaled_dot_product_attention."""
    return FusedAttention.apply(q, k, v)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """rms_norm over the last dimension."""
    return FusedNorm.apply(x, weight)  # type: ignore[no-any-return]


def materialised(module: nn.Module, *, device: torch.device) -> nn.Module:
    """`nn.Module.to_empty`, which cannot exchange a fake tensor that something refers to."""
    if any(isinstance(p, DTensor) for p in module.parameters()):
        return _to_empty(module, device=device)
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            setattr(part, name, made[id(parameter)])
    return module


_to_empty, _item = nn.Module.to_empty, Tensor.item
_concatenate: Any = getattr(DeviceMesh, "_concatenate", None)


def item_or_one(tensor: Tensor) -> bool | float | int:
    """`Tensor.item`; a tensor without memory holds a 1."""
    return 1.0 if isinstance(tensor, FakeTensor) else _item(tensor)


def concatenated(*meshes: Any) -> Any:
    """`DeviceMesh._concatenate`, which looks its rank up in a tensor of ranks."""
    with unset_fake_temporarily():
        return _concatenate(*meshes)


@contextmanager
def substitutes(as_cuda: bool) -> Iterator[None]:
    """What trains inside can do so on tensors without memory; `as_cuda` with a GPU's kernels."""
    from paceline.trainer.replica import replica

    with (
        patch.object(replica, "DistributedDataParallel", BucketedGradients),
        patch.object(nn.Module, "to_empty", materialised),
        patch.object(Tensor, "item", item_or_one),
        patch.object(DeviceMesh, "_concatenate", concatenated, create=True),
    ):
        if not as_cuda:
            yield
            return
        with _kernels_of_cuda():
            yield


@contextmanager
def _kernels_of_cuda() -> Iterator[None]:
    from paceline.trainer.model import attention as model_attention
    from paceline.trainer.model import loss, norm
    from paceline.trainer.replica import assembly

    with (
        patch.object(assembly, "COPIED_ON", ("cpu",)),
        patch.object(functional, "scaled_dot_product_attention", attention),
        patch.object(functional, "rms_norm", rms_norm),
        patch.object(functional, "dropout", dropout),
        patch.object(norm, "SUMMED_NARROW", ()),
        patch.object(model_attention, "LONGEST_BLOCKED", 0),
        patch.object(model_attention, "LONGEST_PLAIN", 0),
        patch.object(model_attention, "LateAttention", _Late),
        patch.object(model_attention, "_for_kernel", lambda _, x: x),
        patch.dict(loss.CHUNK_BYTES, {"cpu": loss.CHUNK_BYTES["cuda"]}),
    ):
        yield


class _Late:
    """Queries that are the end of a sequence, by the same kernel: (B, T, N, D)."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
