"""How FSDP2 shards a model: what is gathered together, in which dtype, and when it is freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.trainer.model.decoder import Decoder
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.mesh import Mesh


def shard(part: Network, mesh: Mesh, reshard: bool) -> None:
    """FSDP2 over the shard axis, copied over the replicate axis; `reshard` frees used blocks.

    Embedding, every block, and last norm with head are units of their own, so that blocks run
    beside the gathering of the head and the reduction of its gradient. The root has what is left.
    """
    assert mesh.device_mesh is not None
    names = ("replicate", "shard") if mesh.replicate.size > 1 else "shard"
    dtype = part.setting.dtype
    mixed = dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,  # blocks get their dtype already, and targets keep theirs
    )
    settings: dict[str, Any] = {"mesh": mesh.device_mesh[names], "mp_policy": policy}
    for block in part.blocks.values():
        fully_shard(block, **settings, reshard_after_forward=reshard)
    # The head is needed again as soon as the forward pass ends.
    for modules in ends_of(part):
        fully_shard(modules, **settings, reshard_after_forward=False)
    fully_shard(part, **settings, reshard_after_forward=False)


def ends_of(part: Network) -> list[list[nn.Module]]:
    """What is gathered at once before the blocks, and what behind them.

    A table that embeds and is the head as well is needed at both ends, so the root keeps it.
    """
    if not isinstance(part, Decoder) or part.model.tied_embeddings:
        return []
    behind = (part.final_norm, part.project_out, part.head) if part.part.last else ()
    units = ((part.embedding,), behind)
    return [[m for m in unit if m is not None] for unit in units if any(unit)]


def reshard(part: Network) -> None:
    """Free what FSDP has gathered: without a backward pass nothing else does."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
