"""Buffers that DeepSpeed's ZeRO-1 makes at the end of a step, as arrays over many cases, in bytes.

With P parameters on a rank before ZeRO, of which it updates P / N, and t of the largest tensor:

    table     2 t                 the gradient of one micro-batch, before it is added to the others'
    bucket    2 min(P, 5e8)       gradients joined to be reduced
    check     4 t', 8 t'          for overflow in fp32, for the norm in fp64; t' at most P / N
    shard     2 P / N + 4 P / N   the gradients that a rank updates by, joined, and in fp32
    gathered  2 P / floor(P / 5e8)  what all-gather gives, before it is copied to the weights (5e9
                                  where gradients are summed up in fp32)

The allocator keeps what is freed. A buffer fits into one that was there before if it is no larger.
But what was handed to NCCL's stream is free only after the device has got there, and the host is
far ahead of it: the buckets of all parameters exist at once, as do all that is gathered, 4 P
together. Where the host waits for each kernel, there is one at a time.

microsoft/DeepSpeed (2021, 2022): deepspeed/runtime/zero/stage_1_and_2.py (allreduce_bucket, step,
get_grad_norm_direct, has_overflow), deepspeed/runtime/fp16/fused_optimizer.py (ZeRO-0),
deepspeed/runtime/bf16_optimizer.py (update_hp_grads). PyTorch: ProcessGroupNCCL.cpp (recordStream).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.estimate.model.case import Cases, Floats

BUCKET = 5e8
"""DeepSpeed's reduce_bucket_size and allgather_bucket_size unless they are set, in elements."""
SUMMED_BUCKET = 5e9
"""What BF16_Optimizer gathers at once unless it is told the size, in elements: in most cases all.
That the engine of early 2022 did not tell it is inferred: with BUCKET five rows are missed by 8 to
11 %, with this by -0.3 to +5."""


def step_buffers(x: Cases, parameters: Floats, share: Floats, largest: Floats) -> Floats:
    """Bytes that stay with the allocator, beyond those of the passes.

    `parameters` of a rank, the `share` of them that it updates, and those of its `largest` tensor.
    Gradients that are summed up in fp32 (BF16_Optimizer) lie in one piece: of them one tensor's
    16-bit gradient is made fp32 to be added, and there is neither bucket nor shard.
    """
    table, piece = 2 * largest, np.minimum(largest, share)
    bucket = 2 * np.minimum(parameters, BUCKET)
    at_once = np.where(x.summed_gradient_bytes > 0, SUMMED_BUCKET, BUCKET)
    gathered = 2 * parameters / np.maximum(1, np.floor(parameters / at_once))
    gathered = np.where(x.zero_stage >= 1, gathered, 0.0)
    # Without ZeRO every gradient is made fp32 by itself before they are joined.
    shard = np.where(x.zero_stage >= 1, 2 + 4, 4 + 4) * share
    one_by_one = _kept([table, bucket, 4 * piece, 8 * piece, gathered])
    waiting = np.maximum(one_by_one, table + shard)
    ahead = np.where(x.zero_stage >= 1, 2 + 2, 2) * parameters + shard
    summed = _kept([4 * largest, gathered])
    some = np.where(x.blocking_launches > 0, waiting, ahead)
    return np.where(x.summed_gradient_bytes > 0, summed, some)


def beyond_logits(buffers: Floats, parameters: Floats, logits: Floats) -> Floats:
    """Bytes of a step's buffers that find no room where the `logits` of a micro-batch were.

    Their gradients, in fp32 and in 16 bit, are freed blocks that hold whole buckets.
    """
    bucket = np.maximum(1.0, 2 * np.minimum(parameters, BUCKET))
    room = bucket * (np.floor(4 * logits / bucket) + np.floor(2 * logits / bucket))
    return np.maximum(0.0, buffers - room)


def _kept(buffers: Sequence[Floats]) -> Floats:
    """Bytes of buffers that come one after another: each is new that is larger than all before."""
    largest = total = np.zeros_like(buffers[0])
    for buffer in buffers:
        total = total + np.where(buffer > largest, buffer, 0.0)
        largest = np.maximum(largest, buffer)
    return total
