"""What a training framework keeps in memory: bytes by kind of parameter and activation.

The formulas are the same for all (states.py, activations.py). What differs is stated here; what no
formula tells (FITTED) begins at PRIORS and is moved by published memories. The medians in
FRAMEWORKS come from these rows, and benchmarks/memory_estimate.py fits them again:

softmax  Megatron-DeepSpeed in 2021 and 2022, used memory as nvidia-smi shows it: the 1.3B study,
         the 104B experiments and the 176B study's chronicles (rows seed4-, bsx- and bs200-)
fused    Megatron core's functional tests on A100, H100 and GB200, the allocator's largest allocated
         bytes (rows mcgold-)
torch    torchtitan, the allocator's reserved peak (rows titan-)

`native` is this project's own trainer. What its blocks keep is counted from its operations, and its
memory tracker confirms it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from paceline.estimate.model.case import Cases, Floats

MIB = 2**20
EVERYTHING = 1e18
"""More than any device has."""


@dataclass(frozen=True)
class Framework:
    """How a framework keeps states and activations; sizes in bytes."""

    weight: float
    """Of a trained parameter: 2 where 16-bit weights stand beside fp32 masters, else 4."""
    gradient: float
    master: float
    """Of a parameter's fp32 copy in the optimizer, 0 where the weights are it."""
    shards_weights_at: float = 3
    """The ZeRO stage from which weights are cut; 2 for FSDP, whose stage 2 keeps them gathered."""
    keeps_gradients: float = 1
    """0 where gradients are freed before a forward pass, so that a step of one micro-batch never
    holds all of them beside all activations."""
    vocab_multiple: float = 1
    """Rows of the embedding are padded to a multiple of this x tp."""
    masks: float = 0
    """Of dropout masks, per token and hidden feature of a block."""
    noise: float = 0
    """1 where a mask that drops is as wide as what it drops, and scores that are dropped from are
    stored, as by PyTorch's CPU operators; else it takes a byte, and attention draws it again.
    Compiled for a CPU the stream's dropout has none (activations.py)."""
    wide_norm: float = 0
    """fp32 tensors that an RMSNorm keeps instead of its input where no kernel fuses it."""
    narrow_norm: float = 0
    """More 16-bit tensors that a LayerNorm keeps."""
    ffn_gated: float = 0
    """More tensors of the ffn's width where neither a kernel nor a compiler joins the gate with
    its activation."""
    drops_norms: float = 0
    """1 where a compiled block of 8-bit products makes what its norms gave again."""
    gathers_inputs: float = 0
    """1 where sequence parallelism keeps all that it gathered for products, not a rank's part."""
    backward: float = 0
    """1 where the gradients of one block's stream and ffn come on top."""
    keeps_transfers: float = 0
    """1 where what stages hand on is kept until its gradient comes."""
    joins_parts: float = 0
    """1 where context parallelism keeps attention's output twice: in its parts, and joined."""
    splits_transfers: float = 0
    """1 where tensor ranks keep a part each of what they hand on, and not all of it."""
    embedding_kept: float = 0
    """Of a feature and token of each micro-batch in flight, on the first rank: what embedding keeps
    outside of the blocks, a norm's input and dropout's mask."""
    makes_buckets: float = 0
    """1 where a step makes buckets, and gradients of the shard it updates, anew (states.py)."""
    copies_gradients: float = 0
    """1 where DDP's buckets stand beside the gradients that micro-batches are summed up in."""
    scores: float = 5
    """Of attention's stored scores, per head and pair of tokens, in 16 bit: softmax 2, dropout's
    mask 1 and output 2 (Korthikanti et al., arXiv:2205.05198)."""
    scores_within: float = 0
    """Sequences up to which attention stores its scores although it could do without."""
    logits: float = 10
    """Of a logit: 16 bit, fp32, and fp32 again in the loss."""
    chunk: float = EVERYTHING
    """Most bytes of fp32 logits at a time where the loss goes through chunks of tokens; what it
    holds of a logit follows then from its operations."""
    head_gradient: float = 0
    """Of a weight of the head: its gradient, where the loss makes it in the forward pass or another
    one stands beside it that is summed up."""
    keeps_copies: float = 0
    """1 where 16-bit copies of fp32 weights, the head's too, live from step to step on one replica,
    whose head's gradient is then summed up in the parameter's own."""
    activation_scale: float = 1
    """What activations take over what is counted."""
    saves_products: float = 0
    """1 where selective recomputation keeps what every second product gives, and attention, instead
    of all but the scores."""
    fixed: float = 0
    """Of workspaces, and of buckets that are not counted, whatever the model."""
    per_parameter: float = 0
    """Of buffers that grow with the parameters of a rank, such as fp32 copies of gradients."""
    narrow_copies: float = 0
    """Of 8-bit weights that are kept over a step's micro-batches beside the 16-bit ones."""
    per_shard: float = 0
    """Of an optimizer step's temporaries, per parameter whose moments the rank holds."""
    fragmentation: float = 0
    """Reserved over allocated, minus 1, a step's buffers aside."""
    communicator: float = 0
    """Of each group of ranks that exchanges, outside the allocator."""
    log_sd: float = 0.12
    """What the whole misses of memories that no constant was fitted to, as a deviation of its
    logarithm: the held-out error of the stack's sources, on GPUs the native trainer has that of all
    stacks, as no GPU's memory is among its rows."""


FITTED = (
    "activation_scale", "logits", "fixed", "per_parameter", "per_shard", "fragmentation",
)  # fmt: skip
"""What published memories move, where a prior has it at all."""
SPREADS: Mapping[str, float] = {
    "activation_scale": 0.08, "logits": 0.30, "fixed": 0.70, "per_parameter": 0.70,
    "per_shard": 0.70, "fragmentation": 0.50,
}  # fmt: skip
"""Deviation of each prior's logarithm."""

PRIORS: Mapping[str, Framework] = {
    # DeepSpeed's pipeline keeps what a stage hands on until its gradient comes, a part on each
    # tensor rank (microsoft/DeepSpeed: deepspeed/runtime/pipe/engine.py). The embedding has a norm
    # (2 bytes) and drops (1), and is not computed again. Of a logit the loss holds 10 bytes; 4 are
    # the micro-batch's before: the last stage never clears its outputs, and has two buffers.
    "softmax": Framework(
        weight=2, gradient=2, master=4, vocab_multiple=128, masks=2, keeps_transfers=1,
        splits_transfers=1, embedding_kept=3, makes_buckets=1, logits=14,
        fixed=100 * MIB, fragmentation=0.05, communicator=200 * MIB,
    ),
    # Workspaces of cuBLAS and Transformer Engine, which caches 8-bit weights and their transposes.
    # Logits in 16 bit, and in fp32, which softmax and gradient take the place of
    # (megatron/core/tensor_parallel/cross_entropy.py).
    "fused": Framework(
        weight=2, gradient=4, master=4, vocab_multiple=128, masks=2, logits=6, narrow_copies=2,
        fixed=100 * MIB,
        per_parameter=0.2, per_shard=0.2, fragmentation=0.05, communicator=300 * MIB,
    ),
    # FSDP2 over fp32 parameters. Blocks of logits: 16 bit, whose place their 16-bit gradient takes;
    # fp32, whose place the loss's gradient takes; their log-softmax; its gradient.
    "torch": Framework(
        weight=4, gradient=4, master=0, keeps_gradients=0, ffn_gated=1, logits=14,
        saves_products=1, fixed=500 * MIB, per_parameter=0.2, per_shard=0.2,
        fragmentation=0.05, communicator=300 * MIB,
    ),
}  # fmt: skip
FRAMEWORKS: Mapping[str, Framework] = {
    "softmax": replace(
        PRIORS["softmax"], activation_scale=0.981, logits=15.4, fixed=105e6, fragmentation=0.055,
        log_sd=0.114,
    ),
    "fused": replace(
        PRIORS["fused"], activation_scale=1.003, logits=5.99, fixed=101e6, log_sd=0.079,
    ),
    "torch": replace(
        PRIORS["torch"], activation_scale=1.008, logits=14.1, fixed=527e6, log_sd=0.132,
    ),
}  # fmt: skip
"""After the fit. Figures that are not stated here stayed put: no row tells them apart. `log_sd` is
what formulas from before these rows' misses were looked into missed unseen sources by: it was not
made smaller after the misses had been seen (0.050, 0.016 and 0.028 now)."""
_NATIVE = Framework(
    weight=4, gradient=4, master=0, shards_weights_at=2, keeps_gradients=0, ffn_gated=1,
    gathers_inputs=1, backward=1, keeps_transfers=1, joins_parts=1, drops_norms=1,
    copies_gradients=1, head_gradient=4,
)  # fmt: skip
NATIVE_CPU = replace(
    _NATIVE, noise=1, wide_norm=2, narrow_norm=1, scores=2 * 0.59, scores_within=1024,
    chunk=16 * MIB, log_sd=0.05,
)  # fmt: skip
"""The native trainer on CPUs, where no kernel fuses norms: scores of the blocks up to the diagonal
(36 of 64, or 10 of 16 in short sequences), logits in chunks of 16 MiB of fp32."""
NATIVE_CUDA = replace(
    _NATIVE, chunk=1024 * MIB, keeps_copies=1, fixed=64 * MIB,
    fragmentation=0.05, communicator=300 * MIB, log_sd=0.127,
)  # fmt: skip
"""The same on GPUs: flash attention, fused norms, logits in chunks of 1 GiB of fp32."""

DEEPSPEED = replace(
    PRIORS["torch"],
    weight=2,
    gradient=2,
    master=4,
    keeps_gradients=1,
    saves_products=0,
    log_sd=0.29,
)
"""DeepSpeed around PyTorch's modules: its 16-bit weights and gradients, and masters in fp32. No
published memory is of it; `log_sd` is what FSDP's prior missed by."""
BY_SOFTWARE = ("deepspeed",)
"""Frameworks that cases have by the name of their software, whatever their stack."""


def frameworks_of(generation: str, native: bool) -> Mapping[str, Framework] | Framework:
    """The constants on a generation of devices: the native trainer's on CPUs, each stack's on GPUs.

    `native`: what computes by PyTorch's modules is the native trainer, not FSDP of torchtitan.
    """
    if generation == "cpu":
        return NATIVE_CPU
    known = {"deepspeed": DEEPSPEED, **FRAMEWORKS}
    return {**known, "torch": NATIVE_CUDA} if native else known


class Constants:
    """The frameworks' constants as arrays, one value a case."""

    def __init__(self, columns: Mapping[str, Floats]) -> None:
        self._columns = columns

    def __getattr__(self, name: str) -> Floats:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._columns[name]


def constants(x: Cases, frameworks: Mapping[str, Framework] | Framework) -> Constants:
    """One framework's for all cases, or by each case's stack.

    Raises ValueError for a stack without a framework.
    """
    if isinstance(frameworks, Framework):
        return Constants(
            {f.name: np.full(x.size, getattr(frameworks, f.name)) for f in fields(Framework)}
        )
    missing = set(np.unique(x.categories["implementation"]).tolist()) - set(frameworks)
    if missing:
        raise ValueError(f"no constants for the stack {', '.join(sorted(missing))}")
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
