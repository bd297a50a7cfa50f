"""FLOPs of one training step, counted in the conventions of the field.

The same step has different FLOP counts in different conventions. Compare figures of one convention
only. The name of a convention stands for `model` FLOPs: the arithmetic of the model, counted once.
The suffix `+recompute` stands for `hardware` FLOPs, which add the work of activation recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.core.layout import Layout, Recompute
from paceline.core.recompute import RecomputeLevel, block_levels, recomputed_linear_flops
from paceline.core.shape import (
    DecoderShape,
    LoraSpec,
    Shape,
    dense_layers_surplus,
    first_layer,
    latent_weights,
    linear_sizes,
    lora_parameters,
    matrices_per_token,
    num_parameters,
    router_and_shared_weights,
)

RECOMPUTE_SUFFIX = "+recompute"
"""Suffix of a convention that counts recomputation as work (HFU instead of MFU)."""
CONVENTION_ALIASES = {"narayanan-hw": "narayanan+recompute"}
FRAMEWORK_CONVENTIONS = {
    "megatron": ("causal", "Megatron-LM from core 0.12; older ones print full-attention"),
    "megatron-lm": ("causal", "Megatron-LM from core 0.12; older ones print full-attention"),
    "megatron-bridge": ("causal", ""),
    "mlperf": ("causal", ""),
    "maxtext": ("causal", ""),
    "nemo": ("full-attention", "NeMo up to 25.07; newer ones print causal"),
    "torchtitan": ("full-attention", ""),
    "llm-foundry": ("palm", ""),
    "mosaicml": ("palm", ""),
    "bigscience": ("six-n", "the 1.3B study; it counts recomputation: six-n+recompute"),
    "megatron-deepspeed": ("megatron-deepspeed", "with checkpointing it prints +recompute"),
    "deepspeed-chat": ("megatron-deepspeed", "with checkpointing it prints +recompute"),
}
"""Frameworks and publications: the convention of the figures that they print, and a note on it."""


@dataclass(frozen=True)
class FlopsInput:
    """Properties of a run that FLOPs conventions use."""

    shape: Shape
    seq_len: int
    recompute: Recompute = "none"
    lora: LoraSpec | None = None
    nominal_parameters: float | None = None
    attended_share: float = 1.0
    """Share of attention pairs that document masking leaves in a sequence: sum l^2 / seq_len^2 over
    documents of l tokens. With sliding windows it is the mean over layers."""
    levels: tuple[RecomputeLevel, ...] = ()
    """Recomputed part of each block, if `recompute` is `budget`."""

    def with_attended_share(self, share: float | None) -> FlopsInput:
        """Return a copy with a measured `attended_share`; return `self` if `share` is None."""
        return self if share is None else replace(self, attended_share=share)


@dataclass(frozen=True)
class Convention:
    """A convention: its name, its description and its formula for training FLOPs per token."""

    name: str
    describes: str
    per_token: Callable[[FlopsInput], float]
    """Function that returns model FLOPs per token."""
    recomputed: Callable[[FlopsInput], float]
    """Function that returns the FLOPs per token that recomputation adds, selective or full."""
    printed_with_recompute: bool
    """True if publications in this convention count recomputation as work."""


CONVENTIONS: dict[str, Convention] = {}


def recompute_flops(x: FlopsInput) -> float:
    """Return the FLOPs per token of one additional forward pass.

    With full recomputation it covers attention and the blocks, otherwise attention alone. The head
    is not recomputed, and flash attention's own recomputation is not counted.
    """
    return _forward_flops_again(x, attention_per_token(x) / 3)


def _convention(
    name: str,
    describes: str,
    recomputed: Callable[[FlopsInput], float] = recompute_flops,
    printed_with_recompute: bool = False,
) -> Callable[[Callable[[FlopsInput], float]], Callable[[FlopsInput], float]]:
    def register(per_token: Callable[[FlopsInput], float]) -> Callable[[FlopsInput], float]:
        kind = Convention(name, describes, per_token, recomputed, printed_with_recompute)
        CONVENTIONS[name] = kind
        return per_token

    return register


@_convention("full-attention", "every query attends to every key; causal mask ignored")
def full_attention(x: FlopsInput) -> float:
    """FLOPs per token: 6 per weight of each GEMM + 12 L (a d) s.

    For Llama this is 12 L h^2 (1 + g/a + s/h) + 18 L f h + 6 V h. Used by NVIDIA's Llama 3.1
    recipe, Megatron-LM up to core 0.11, NeMo up to 25.07. The embedding look-up counts nothing.
    """
    return linear_per_token(x) + attention_per_token(x)


def _causal_recompute_flops(x: FlopsInput) -> float:
    # 1/3 of attention's 12 L (a d) s is the forward pass. The causal mask leaves half of that.
    return _forward_flops_again(x, attention_per_token(x) / 6)


@_convention("causal", "the masked half of attention is not counted", _causal_recompute_flops)
def causal(x: FlopsInput) -> float:
    """FLOPs per token as full-attention, with attention halved: 6 L (a d) s.

    Used by Megatron-LM from core 0.12, Megatron-Bridge and MLPerf.
    """
    return linear_per_token(x) + 0.5 * attention_per_token(x)


@_convention("palm", "6 per parameter, embeddings included, and full attention")
def palm(x: FlopsInput) -> float:
    """FLOPs per token: 6 P + 12 L (a d) s, P the exact count of all parameters.

    Chowdhery et al., arXiv:2204.02311, appendix B. Counted so by LLM Foundry.
    """
    return 6.0 * num_parameters(x.shape) + attention_per_token(x)


def _six_n_recompute_flops(x: FlopsInput) -> float:
    # 6 P counts three passes; recomputation adds one more forward pass.
    return 2.0 * _counted_parameters(x) if x.recompute == "full" else 0.0


@_convention("six-n", "2 P per token and pass, 3 passes", _six_n_recompute_flops, True)
def six_n(x: FlopsInput) -> float:
    """FLOPs per token: 6 P; with full recompute counted (six-n+recompute) 8 P.

    P is the nominal count if one is given, else the exact count. BigScience's 1.3B study counts
    so, with 1.3e9 for P: 8 P with --checkpoint-activations, 6 P without.
    """
    return 6.0 * _counted_parameters(x)


def _counted_parameters(x: FlopsInput) -> float:
    return x.nominal_parameters or num_parameters(x.shape)


def _narayanan_recompute_flops(x: FlopsInput) -> float:
    layers, h = x.shape.num_layers, x.shape.hidden_size
    # Forward pass of attention's two GEMMs: 2 GEMMs x 2 FLOPs x s x h, ignoring the mask.
    attention = 4.0 * layers * h * x.seq_len * x.attended_share
    # 24 l h^2 is the forward pass of a GPT block's 12 h^2 weights at 2 FLOPs each.
    return attention + 24 * layers * h**2 if x.recompute == "full" else attention


@_convention("narayanan", "Megatron's closed form for GPT", _narayanan_recompute_flops, True)
def narayanan(x: FlopsInput) -> float:
    """FLOPs per token: 72 l h^2 (1 + s/6h + V/12lh); with full recompute counted 96 (...V/16lh).

    Narayanan et al., arXiv:2104.04473, section 5.1, whose tables count recompute. The head is not
    recomputed, hence V/16 of 96 and V/12 of 72 are the same 6 V h.
    """
    return _narayanan(x, 72, 12)


def _megatron_deepspeed_recompute_flops(x: FlopsInput) -> float:
    # f = 4 instead of 3 in 24 f l h^2 (...): the difference is one forward pass.
    return _narayanan(x, 24, 16) if x.recompute == "full" else 0.0


@_convention(
    "megatron-deepspeed", "narayanan's form with V/16", _megatron_deepspeed_recompute_flops, True
)
def megatron_deepspeed(x: FlopsInput) -> float:
    """FLOPs per token: 24 f l h^2 (1 + s/6h + V/16lh), f = 3; with full recompute counted f = 4.

    Printed by Megatron-DeepSpeed and DeepSpeed-Chat; without recompute it undercounts the head.
    """
    return _narayanan(x, 72, 16)


def _narayanan(x: FlopsInput, coefficient: int, head: int) -> float:
    layers, h, vocab = x.shape.num_layers, x.shape.hidden_size, x.shape.padded_vocab()
    # Relative to the weights of the blocks: attention GEMMs are s / 6h, the head is V / (head l h).
    bracket = 1 + x.seq_len * x.attended_share / (6 * h) + vocab / (head * layers * h)
    return coefficient * layers * h**2 * bracket


def linear_per_token(x: FlopsInput) -> float:
    """FLOPs per token of all weight matrices: 6 for every weight that a token meets.

    2 are the forward pass, 2 the input's gradient and 2 the weight's. A token passes as many
    matrices of an ffn as it has experts. With LoRA a frozen matrix has no weight gradient (4 for 6)
    and its adapters of rank r add 6 r (in + out). Projections and a tied head count like others. A
    layer that predicts one more token is a block, a product of 2 h x h and the head once more.
    """
    shape, lora = x.shape, x.lora
    if shape.kind == "mmdit":
        return shape.linear_flops / x.seq_len
    per_block = 0.0
    for name, (rows, columns) in linear_sizes(shape).items():
        has_adapter = lora is not None and name in lora.targets
        frozen = lora is not None and (has_adapter or not lora.train_rest)
        per_block += (4 if frozen else 6) * rows * columns * matrices_per_token(shape, name)
        if has_adapter and lora is not None:
            per_block += 6 * lora.rank * (rows + columns) * matrices_per_token(shape, name)
    head_factor = 4 if lora is not None and not lora.train_rest else 6
    per_block += head_factor * (router_and_shared_weights(shape) + latent_weights(shape))
    head = (1 + shape.mtp_layers) * shape.padded_vocab() * shape.embed_dim
    if shape.embed_dim != shape.hidden_size:
        head += 2 * shape.embed_dim * shape.hidden_size
    outside = dense_layers_surplus(shape, shape.experts_per_token)
    outside += shape.mtp_layers * 2 * shape.hidden_size**2
    return (shape.num_layers + shape.mtp_layers) * per_block + head_factor * (head + outside)


def attention_per_token(x: FlopsInput) -> float:
    """FLOPs per token of both attention products without a causal mask: 3 passes x 4 L (a d) k.

    d is the mean of both products' widths where they differ (latent attention).

    k is the number of keys that a query attends to: s, or less in layers with a window and where
    packed documents are masked from each other.
    """
    keys = attended_keys(x.shape, x.seq_len) * x.attended_share
    if x.shape.kind == "mmdit":
        return 12.0 * x.shape.num_layers * x.shape.attention_size * keys
    latent, layers = x.shape.latent_attention, x.shape.num_layers + x.shape.mtp_layers
    head_dim = x.shape.head_dim if latent is None else latent.mean_head_dim
    return 12.0 * layers * x.shape.num_heads * head_dim * keys


def attended_keys(shape: Shape, seq_len: int) -> float:
    """Return the number of keys per query without a causal mask, averaged over queries and layers.

    It is s. In a layer with a window of w < s tokens, a query attends to keys less than w tokens
    before or after it: 2 w - 1 - w (w - 1) / s keys. A causal mask leaves the diagonal and one side
    of that band. The causal convention counts half of the band, with or without a window.
    """
    if shape.kind != "decoder" or shape.sliding_window is None:
        return seq_len
    local = shape.num_local_layers / shape.num_layers
    return (1 - local) * seq_len + local * _keys_in_window(shape.sliding_window, seq_len)


def _keys_in_window(window: int, seq_len: int) -> float:
    w = min(window, seq_len)
    return 2 * w - 1 - w * (w - 1) / seq_len


def _layer_keys(shape: DecoderShape, seq_len: int, layer: int) -> float:
    """Return `attended_keys` of one layer, counted from 0."""
    window, pattern = shape.sliding_window, shape.sliding_window_pattern
    if window is None or (pattern and (layer + 1) % pattern == 0):
        return seq_len
    return _keys_in_window(window, seq_len)


def without_recompute(name: str) -> str:
    """Return the name of the convention without `+recompute`, with aliases resolved."""
    return CONVENTION_ALIASES.get(name, name).removesuffix(RECOMPUTE_SUFFIX)


def convention_of(name: str) -> tuple[str, str]:
    """Return the convention of a name that may be a framework's, and a note on the choice."""
    framework = name.lower().removesuffix(RECOMPUTE_SUFFIX)
    if framework in CONVENTIONS or framework not in FRAMEWORK_CONVENTIONS:
        return name, ""
    convention, note = FRAMEWORK_CONVENTIONS[framework]
    suffix = RECOMPUTE_SUFFIX if name.lower().endswith(RECOMPUTE_SUFFIX) else ""
    return convention + suffix, f"{name} is read as {convention}{f' ({note})' if note else ''}"


def validate_convention(name: str) -> str:
    """Return `name`; raise ValueError if it is not the name of a convention."""
    if without_recompute(name) not in CONVENTIONS:
        raise ValueError(f"must be one of {', '.join(CONVENTIONS)}")
    return name


def with_recompute(name: str) -> str:
    """Return the name under which the convention of `name` counts recomputation as work."""
    return without_recompute(name) + RECOMPUTE_SUFFIX


def flops_input(
    shape: Shape,
    seq_len: int,
    layout: Layout | None = None,
    lora: LoraSpec | None = None,
    nominal_parameters: float | None = None,
) -> FlopsInput:
    """Return the input of the conventions for a run.

    Without a layout, nothing is recomputed.
    """
    x = FlopsInput(shape, seq_len, lora=lora, nominal_parameters=nominal_parameters)
    if layout is None:
        return x
    levels = block_levels(shape, layout) if layout.recompute == "budget" else ()
    return replace(x, recompute=layout.recompute, levels=levels)


def flops_per_token(convention: str, x: FlopsInput) -> float:
    """Training FLOPs of one token in `convention`, hardware FLOPs where it ends in `+recompute`.

    Raises KeyError for an unknown name.
    """
    model = model_flops_per_token(convention, x)
    return model if convention in CONVENTIONS else model + _recomputed_per_token(convention, x)


def model_flops_per_token(convention: str, x: FlopsInput) -> float:
    """FLOPs per token of the mathematics alone, as if nothing were recomputed: MFU's numerator."""
    return CONVENTIONS[without_recompute(convention)].per_token(x)


def flops_per_sample(convention: str, x: FlopsInput) -> float:
    """Return the training FLOPs of one sequence of `seq_len` tokens."""
    return x.seq_len * flops_per_token(convention, x)


def hardware_flops_per_token(convention: str, x: FlopsInput) -> float:
    """FLOPs per token that the device executes, the input's recomputation counted: HFU's."""
    return model_flops_per_token(convention, x) + _recomputed_per_token(convention, x)


def _recomputed_per_token(convention: str, x: FlopsInput) -> float:
    if x.recompute == "none":
        return 0.0
    kind = CONVENTIONS[without_recompute(convention)]
    if x.recompute == "budget":
        masked = 2 if kind.name == "causal" else 1
        whole = kind.recomputed(replace(x, recompute="full"))
        return whole * _recomputed_share(x, attention_per_token(x) / 3 / masked)
    return kind.recomputed(x)


def _recomputed_share(x: FlopsInput, attention: float) -> float:
    """Return the recomputed share of a forward pass of all blocks.

    `attention` is the number of FLOPs per token of attention.
    """
    shape, whole = x.shape, attention + _block_forward_per_token(x)
    full = [i for i, level in enumerate(x.levels) if level == "full"]
    if shape.kind == "mmdit":
        return len(full) / shape.num_layers
    keys = sum(_layer_keys(shape, x.seq_len, i) for i in full)
    all_keys = shape.num_layers * attended_keys(shape, x.seq_len)
    dense, num_dense = first_layer(shape), shape.first_dense_layers
    linear = sum(
        recomputed_linear_flops(dense if i < num_dense else shape, level, x.lora)
        for i, level in enumerate(x.levels)
    )
    return (attention * keys / all_keys + linear) / whole


def _forward_flops_again(x: FlopsInput, attention: float) -> float:
    return attention + (_block_forward_per_token(x) if x.recompute == "full" else 0.0)


def _block_forward_per_token(x: FlopsInput) -> float:
    """FLOPs per token of one forward pass through the weights of all blocks, adapters included."""
    if x.shape.kind == "mmdit":
        return x.shape.block_forward_flops / x.seq_len
    shape, sizes = x.shape, linear_sizes(x.shape).items()
    each = sum(i * o * matrices_per_token(shape, name) for name, (i, o) in sizes)
    each += router_and_shared_weights(shape) + latent_weights(shape)
    weights = (shape.num_layers + shape.mtp_layers) * each
    weights += dense_layers_surplus(shape, shape.experts_per_token)
    adapters = lora_parameters(x.shape, x.lora) if x.lora else 0
    return 2.0 * (weights + adapters)
