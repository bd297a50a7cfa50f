"""What kind of work a kernel is, by its name."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

Kind = Literal["gemm", "attention", "optimizer", "memory_bound", "other"]
KINDS: tuple[Kind, ...] = ("gemm", "attention", "optimizer", "memory_bound", "other")
"""Where two kinds compute at the same moment, it belongs to the first of these."""

_COMMUNICATION = re.compile(r"nccl|rccl|mscclpp|nvshmem|deep_?ep|custom_all_?reduce", re.I)
_OF_KIND: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa|\bmha_|_attn_|attn_(?:fwd|bwd)", re.I)),
    (
        "optimizer",
        re.compile(r"adam|lamb_|_sgd|fused_?optimizer|muon|multi_tensor_apply", re.I),
    ),
    (
        "gemm",
        # cuBLAS 12.8 and later (nvjet), Tensile on AMD (Cijk), Inductor's templates (triton_mm).
        re.compile(
            r"gemm|gemv|nvjet|cutlass(?!.*elementwise)|wgmma|xmma|Cijk_|split_?k_?reduce"
            r"|triton_(?:tem_fused_)?\w*(?:mm|matmul|dot)\b|triton_mm|dot_kernel|matmul|cublas|conv",
            re.I,
        ),
    ),
    (
        "memory_bound",
        re.compile(
            r"elementwise|reduce|norm|softmax|copy|memcpy|memset|fill|cat_?array|index|gather"
            r"|scatter|embedding|dropout|triton_(?:poi|red|per)|transpose|rotary|rope|swiglu|silu"
            r"|gelu|relu|cross_?entropy|nll_loss|cast|quantize|amax|permute|arange|cub::|cpp_fused",
            re.I,
        ),
    ),
)


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Whether a kernel moves data between devices."""
    return _COMMUNICATION.search(name) is not None


@lru_cache(maxsize=65536)
def kind_of(name: str) -> Kind:
    """The kind of a kernel that computes."""
    for kind, pattern in _OF_KIND:
        if pattern.search(name):
            return kind
    return "other"


_AXES: tuple[tuple[str, re.Pattern[str]], ...] = (
    # Before the others: DATA_PARALLEL_GROUP_WITH_CP, EXPERT_DATA_PARALLEL_GROUP.
    ("dp", re.compile(r"data_parallel|shard|replicate|fsdp|(?:^|_)dp(?:_|$)", re.I)),
    ("ep", re.compile(r"expert|(?:^|_)ep(?:_|$)", re.I)),
    ("tp", re.compile(r"tensor|(?:^|_)tp(?:_|$)", re.I)),
    ("cp", re.compile(r"context|(?:^|_)cp(?:_|$)", re.I)),
    ("pp", re.compile(r"pipeline|(?:^|_)pp(?:_|$)|embedding_group", re.I)),
)


@lru_cache(maxsize=4096)
def axis_of(description: str) -> str:
    """The layout's axis of a process group, by what the framework calls it; else `unknown`.

    Megatron's groups are called as TENSOR_MODEL_PARALLEL_GROUP, those of a device mesh as mesh_tp.
    """
    return next((axis for axis, pattern in _AXES if pattern.search(description)), "unknown")
