"""Memory constants of training frameworks: bytes by kind of parameter and activation.

The formulas are the same for all frameworks (states.py, activations.py). This module has the
constants that differ. Six constants follow from no formula: they start at PRIORS and are fitted to
published memory figures (benchmarks/_memory_fit.py). The medians in FRAMEWORKS come from these
rows, and benchmarks/memory_estimate.py fits them again:

  softmax  Megatron-DeepSpeed in 2021 and 2022, used memory as nvidia-smi shows it: the 1.3B study,
           the 104B experiments and the 176B study's chronicles (rows seed4-, bsx- and bs200-)
  fused    Megatron core's functional tests on A100, H100 and GB200, the allocator's largest
           allocated bytes (rows mcgold-)
  torch    torchtitan, the allocator's reserved peak (rows titan-)

`native` is Paceline's own trainer. The activations of its blocks are counted from its operations
and confirmed by its memory tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from paceline.estimate.model.case import Cases, Floats

MIB = 2**20
EVERYTHING = 1e18
"""Number of bytes beyond any device's memory: no limit."""


@dataclass(frozen=True)
class Framework:
    """Memory constants of one framework; sizes in bytes."""

    weight: float
    """Bytes of a trained parameter: 2 for 16-bit weights with fp32 masters, else 4."""
    gradient: float
    """Bytes of a gradient per trained parameter."""
    master: float
    """Bytes of a parameter's fp32 master copy in the optimizer, 0 if the weights are fp32."""
    shards_weights_at: float = 3
    """ZeRO stage from which weights are sharded; 2 for FSDP, whose stage 2 keeps them gathered."""
    keeps_gradients: float = 1
    """0 if gradients are freed before a forward pass. A step of one micro-batch then never holds
    all gradients and all activations together."""
    vocab_multiple: float = 1
    """Multiple, times tp, to which the rows of the embedding are padded."""
    masks: float = 0
    """Bytes of dropout masks per token and hidden feature of a block."""
    noise: float = 0
    """1 if a dropout mask is as wide as its input, and scores with dropout are stored, as by
    PyTorch's CPU operators. Otherwise a mask takes one byte, and attention draws it again. Compiled
    for a CPU, dropout in the residual stream has no mask (activations.py)."""
    wide_norm: float = 0
    """Number of fp32 tensors that an RMSNorm saves instead of its input if no kernel fuses it."""
    narrow_norm: float = 0
    """Number of additional 16-bit tensors that a LayerNorm saves."""
    ffn_gated: float = 0
    """Number of additional tensors of the ffn's width if neither a kernel nor a compiler fuses the
    gate with its activation."""
    drops_norms: float = 0
    """1 if a compiled block with 8-bit GEMMs recomputes the outputs of its norms."""
    gathers_inputs: float = 0
    """1 if sequence parallelism saves the gathered inputs of GEMMs, not only the rank's part."""
    backward: float = 0
    """1 if the gradients of one block's residual stream and ffn add to the peak."""
    keeps_transfers: float = 0
    """1 if a stage's sent outputs are kept until their gradient arrives."""
    joins_parts: float = 0
    """1 if context parallelism saves attention's output twice: in parts, and joined."""
    splits_transfers: float = 0
    """1 if each tensor rank keeps only its part of the sent outputs."""
    embedding_kept: float = 0
    """Bytes per feature and token of each micro-batch in flight, on the first rank, that the
    embedding saves outside of the blocks: a norm's input and a dropout mask."""
    makes_buckets: float = 0
    """1 if the end of a step allocates new buckets and new gradients of the updated shard
    (states.py)."""
    copies_gradients: float = 0
    """1 if DDP's buckets exist in addition to the gradients that accumulate micro-batches."""
    scores: float = 5
    """Bytes of attention's stored scores, per head and pair of tokens, in 16 bit: softmax 2,
    dropout's mask 1 and its output 2 (Korthikanti et al., arXiv:2205.05198)."""
    scores_within: float = 0
    """Sequence length up to which attention stores its scores although it could avoid that."""
    logits: float = 10
    """Bytes per logit: 16 bit, fp32, and fp32 again in the loss."""
    chunk: float = EVERYTHING
    """Maximum bytes of fp32 logits at once if the loss goes through chunks of tokens. The bytes per
    logit then follow from the loss's operations."""
    head_gradient: float = 0
    """Bytes per weight of the head for a gradient in addition to the accumulated one: the loss
    computes it in the forward pass, or there is a second one."""
    keeps_copies: float = 0
    """1 if 16-bit copies of fp32 weights, including the head's, stay allocated between steps on a
    single replica. The head's gradient then accumulates in the parameter's own."""
    activation_scale: float = 1
    """Ratio of actual to counted activation bytes."""
    saves_every_second_gemm: float = 0
    """1 if selective activation checkpointing saves attention and the output of every second GEMM,
    instead of all but the scores."""
    fixed: float = 0
    """Bytes of workspaces and of buckets that are not counted, for any model."""
    per_parameter: float = 0
    """Bytes per parameter of a rank for buffers such as fp32 copies of gradients."""
    narrow_copies: float = 0
    """Bytes per 8-bit weight kept over a step's micro-batches, in addition to 16-bit weights."""
    per_shard: float = 0
    """Bytes of an optimizer step's temporaries per parameter whose moments the rank holds."""
    fragmentation: float = 0
    """Reserved over allocated memory, minus 1, without a step's buffers."""
    communicator: float = 0
    """Bytes of each communicator (process group), outside the allocator."""
    log_sd: float = 0.12
    """Standard deviation of the logarithm of the total's error on memory figures that were not
    fitted: the held-out error of the implementation's sources. For the native trainer on GPUs it is
    that of all implementations, because no published row measures it."""


PRIORS: Mapping[str, Framework] = {
    # DeepSpeed's pipeline keeps a stage's sent output until its gradient arrives, one part on each
    # tensor rank (microsoft/DeepSpeed: deepspeed/runtime/pipe/engine.py). The embedding has a norm
    # (2 bytes) and dropout (1), and is not recomputed. The loss holds 10 bytes per logit. Another 4
    # belong to the previous micro-batch: the last stage never clears its outputs and has two
    # buffers.
    "softmax": Framework(
        weight=2, gradient=2, master=4, vocab_multiple=128, masks=2, keeps_transfers=1,
        splits_transfers=1, embedding_kept=3, makes_buckets=1, logits=14,
        fixed=100 * MIB, fragmentation=0.05, communicator=200 * MIB,
    ),
    # `fixed`: workspaces of cuBLAS and Transformer Engine. `narrow_copies`: Transformer Engine
    # caches 8-bit weights and their transposes. `logits`: 16-bit logits, and fp32 ones that softmax
    # and gradient overwrite (megatron/core/tensor_parallel/cross_entropy.py).
    "fused": Framework(
        weight=2, gradient=4, master=4, vocab_multiple=128, masks=2, logits=6, narrow_copies=2,
        fixed=100 * MIB,
        per_parameter=0.2, per_shard=0.2, fragmentation=0.05, communicator=300 * MIB,
    ),
    # FSDP2 over fp32 parameters. `logits` (14): 16-bit logits, which their 16-bit gradient
    # overwrites (2); fp32 logits, which the loss's gradient overwrites (4); their log-softmax (4);
    # its gradient (4).
    "torch": Framework(
        weight=4, gradient=4, master=0, keeps_gradients=0, ffn_gated=1, logits=14,
        saves_every_second_gemm=1, fixed=500 * MIB, per_parameter=0.2, per_shard=0.2,
        fragmentation=0.05, communicator=300 * MIB,
    ),
}  # fmt: skip
FRAMEWORKS: Mapping[str, Framework] = {
    # Fitted to 92 BigScience figures (V100, A100): median error 1.2 to 3.2% by source
    # (docs/dev/evidence/estimator.md, Memory).
    "softmax": replace(
        PRIORS["softmax"], activation_scale=0.981, logits=15.4, fixed=105e6, fragmentation=0.055,
        log_sd=0.114,
    ),
    # Fitted to 29 figures of Megatron core's tests: median error 0.4% (same page).
    "fused": replace(
        PRIORS["fused"], activation_scale=1.003, logits=5.99, fixed=101e6, log_sd=0.079,
    ),
    # Fitted to 9 figures of torchtitan: median error 1.7% (same page).
    "torch": replace(
        PRIORS["torch"], activation_scale=1.008, logits=14.1, fixed=527e6, log_sd=0.132,
    ),
}  # fmt: skip
"""Constants after the fit. Constants that are not listed kept their prior, because no row
determines them. `log_sd` is the error on unseen sources of the formulas before these rows' errors
were examined. It was not reduced afterwards (0.050, 0.016 and 0.028 now)."""
_NATIVE = Framework(
    weight=4, gradient=4, master=0, shards_weights_at=2, keeps_gradients=0, ffn_gated=1,
    gathers_inputs=1, backward=1, keeps_transfers=1, joins_parts=1, drops_norms=1,
    copies_gradients=1, head_gradient=4,
)  # fmt: skip
NATIVE_CPU = replace(
    _NATIVE, noise=1, wide_norm=2, narrow_norm=1, scores=2 * 0.59, scores_within=1024,
    chunk=16 * MIB, log_sd=0.05,
)  # fmt: skip
"""Native trainer on CPUs, where no kernel fuses norms. Attention stores the scores of the blocks up
to the diagonal (36 of 64, or 10 of 16 in short sequences). Logits come in chunks of 16 MiB of fp32.
"""
NATIVE_CUDA = replace(
    _NATIVE, chunk=1024 * MIB, keeps_copies=1, fixed=64 * MIB,
    fragmentation=0.05, communicator=300 * MIB, log_sd=0.127,
)  # fmt: skip
"""Native trainer on GPUs: flash attention, fused norms, logits in chunks of 1 GiB of fp32."""

DEEPSPEED = replace(
    PRIORS["torch"],
    weight=2,
    gradient=2,
    master=4,
    keeps_gradients=1,
    saves_every_second_gemm=0,
    log_sd=0.29,
)
"""DeepSpeed with PyTorch modules: 16-bit weights and gradients, fp32 masters. No published memory
figure measures it; `log_sd` is the error of FSDP's prior."""
HAI_LLM = replace(FRAMEWORKS["fused"], masks=0, narrow_copies=1, log_sd=0.2)
"""DeepSeek's software: no dropout, and 8-bit weights scaled by blocks of 128 x 128, of which one
copy serves both passes (arXiv:2412.19437, section 3.3.2). No published figure measures its memory,
so `log_sd` is wide."""
BY_SOFTWARE: Mapping[str, Framework] = {"deepspeed": DEEPSPEED, "hai-llm": HAI_LLM}
"""Frameworks selected by the name of the software, whatever the implementation."""


def frameworks_of(generation: str, native: bool) -> Mapping[str, Framework] | Framework:
    """Return the constants for a device generation, by implementation on GPUs.

    On CPUs these are the native trainer's. `native` selects the native trainer for PyTorch modules,
    instead of torchtitan's FSDP.
    """
    if generation == "cpu":
        return NATIVE_CPU
    frameworks = {**BY_SOFTWARE, **FRAMEWORKS}
    return {**frameworks, "torch": NATIVE_CUDA} if native else frameworks


class Constants:
    """Constants of frameworks as arrays of shape (cases,)."""

    def __init__(self, columns: Mapping[str, Floats]) -> None:
        self._columns = columns

    def __getattr__(self, name: str) -> Floats:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._columns[name]


def constants(x: Cases, frameworks: Mapping[str, Framework] | Framework) -> Constants:
    """Return the constants of one framework for all cases, or by each case's implementation.

    Raises ValueError for an implementation without constants.
    """
    if isinstance(frameworks, Framework):
        return Constants(
            {f.name: np.full(x.size, getattr(frameworks, f.name)) for f in fields(Framework)}
        )
    missing = set(np.unique(x.categories["implementation"]).tolist()) - set(frameworks)
    if missing:
        raise ValueError(f"no memory constants for {', '.join(sorted(missing))}")
    stacks = [
        x.is_category("software" if n in BY_SOFTWARE else "implementation", n) for n in frameworks
    ]
    return Constants(
        {
            f.name: np.select(
                stacks, [getattr(framework, f.name) for framework in frameworks.values()]
            )
            for f in fields(Framework)
        }
    )
