"""Model shapes and exact parameter counts: decoders, and functions for all models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from paceline.core.mmdit import MMDiTShape
from paceline.core.value import BlockCount, MoreBlocks, NonNegativeInt, PositiveInt, Value

LoraTarget = Literal["q", "k", "v", "o", "up", "gate", "down"]
Share = Annotated[float, Field(ge=0, lt=1)]
FFN: frozenset[LoraTarget] = frozenset({"up", "gate", "down"})
ATTENTION_INPUTS: frozenset[LoraTarget] = frozenset({"q", "k", "v"})


class LatentAttentionShape(Value):
    """Multi-head latent attention: all keys and values come from one compressed vector per token.

    Source: arXiv:2405.04434, section 2.1. Names follow DeepSeek's configurations. A head's query
    and key have a part from compressed vectors and a rotary part, whose key all heads share.
    """

    q_lora_rank: PositiveInt | None = None
    """Width of the compressed queries. Unset projects queries from the hidden state."""
    kv_lora_rank: PositiveInt
    """Width of the compressed keys and values."""
    qk_nope_head_dim: PositiveInt
    """Features per head of queries and keys without rotary embedding."""
    qk_rope_head_dim: PositiveInt
    """Features per head of queries and keys with rotary embedding; all heads share their key."""
    v_head_dim: PositiveInt
    """Width of the values of one head."""

    @property
    def qk_head_dim(self) -> int:
        """Width of queries and keys of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mean_head_dim(self) -> float:
        """Mean width of a head in the two GEMMs of attention."""
        return (self.qk_head_dim + self.v_head_dim) / 2

    @property
    def norm_weights(self) -> int:
        """Number of weights of the norms of both compressed vectors."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    def weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights of a block's query, key and value projections, without the output."""
        queries = num_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            of_queries = hidden_size * queries
        else:
            of_queries = self.q_lora_rank * (hidden_size + queries)
        down = hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_queries + down + up

    @property
    def saved_latents(self) -> int:
        """Numbers per token that a block saves of the compressed vectors.

        They are saved before and after the norms.
        """
        return 2 * self.norm_weights


class DecoderShape(Value):
    """A decoder-only transformer. Its settings cover GPT-2/Megatron, OPT and Llama."""

    kind: Literal["decoder"] = "decoder"
    """Kind of model: `decoder`, or `mmdit` for a Flux diffusion transformer."""
    num_layers: BlockCount
    """Transformer blocks."""
    hidden_size: PositiveInt
    """Width of the model."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key/value heads (grouped-query attention). Unset is `num_heads`."""
    head_size: PositiveInt | None = None
    """Width of one head. Unset is `hidden_size` / `num_heads`."""
    ffn_size: PositiveInt
    """Width of the MLP, or of each expert."""
    num_experts: PositiveInt = 1
    """Experts per block (mixture of experts)."""
    experts_per_token: PositiveInt = 1
    """Experts that each token is routed to."""
    expert_groups: PositiveInt = 1
    """Groups of experts (group-limited routing)."""
    groups_per_token: PositiveInt = 1
    """Groups that a token's experts are in."""
    shared_ffn_size: NonNegativeInt = 0
    """Width of the shared expert. 0 is none."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    router_normalize: bool = True
    """Divide the weights of a token's experts by their sum."""
    router_scale: PositiveFloat = 1.0
    """Factor of the weights of a token's experts."""
    router_choice_bias: bool = False
    """Choose experts by score plus a bias that balances them without a loss (DeepSeek V3)."""
    vocab_size: PositiveInt
    """Size of the vocabulary."""
    vocab_multiple: PositiveInt = 1
    """The embedding is padded to a multiple of this times `tp` (Megatron: 128)."""
    gated_ffn: bool = False
    """Use a gated MLP with three matrices (SwiGLU or GeGLU)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"] = "gelu"
    """Activation function of the MLP. `quick_gelu` is x sigmoid(1.702 x)."""
    activation_limit: PositiveFloat | None = None
    """Clamp the inputs of a gated MLP's product at this number: the gate above, the other input on
    both sides (gpt-oss: 7)."""
    up_offset: float = 0.0
    """Number added to the input of a gated MLP that has no activation (gpt-oss: 1)."""
    norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    """Kind of normalization."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Position of the norms: before attention and MLP, after the residual sum, or before and
    after both (Gemma)."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    norm_zero_centered: bool = False
    """Multiply by 1 + weight in norms (Gemma)."""
    qk_norm: bool = False
    """Normalize queries and keys per head before the rotary embedding."""
    final_norm: bool = True
    """Apply a norm before the output head."""
    embedding_norm: bool = False
    """Apply a norm after the embedding (BigScience's `--embed-layernorm`)."""
    positions: Literal["rope", "learned"] = "learned"
    """Kind of position embedding."""
    max_positions: PositiveInt = 2048
    """Longest sequence of learned positions."""
    position_offset: NonNegativeInt = 0
    """Unused leading rows of the position table (OPT: 2)."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary embedding."""
    rope_local_theta: PositiveFloat | None = None
    """Base in sliding-window layers. Unset is `rope_theta`."""
    rope_scaling_factor: PositiveFloat = 1.0
    """Positions are divided by this factor (linear scaling, or YaRN)."""
    rope_original_positions: PositiveInt | None = None
    """Longest sequence before YaRN extends it by `rope_scaling_factor` (arXiv:2309.00071). Unset
    scales linearly."""
    rope_attention_factor: PositiveFloat = 1.0
    """Factor of the rotated queries and keys (LongRoPE, YaRN)."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the features of a head that rotate."""
    sliding_window: PositiveInt | None = None
    """Tokens that each token attends to, including itself. Unset is all."""
    sliding_window_pattern: PositiveInt | None = None
    """Every N-th layer has full attention (Gemma 3: 6). Unset is none."""
    attention_sinks: bool = False
    """Learn a logit per head that takes a share of its attention without a value (gpt-oss)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by the square root of this number. Unset is the head width."""
    scale_embedding: bool = False
    """Multiply token embeddings by the square root of `hidden_size` (Gemma)."""
    bias: bool = True
    """Use biases in linear layers."""
    qkv_bias: bool = False
    """Use biases in query, key and value projections even without `bias` (Qwen 2)."""
    tied_embeddings: bool = True
    """Share the weights of embedding and output head."""
    embedding_size: PositiveInt | None = None
    """Width of the token embedding if it differs from `hidden_size` (OPT-350M: 512)."""
    latent_attention: LatentAttentionShape | None = None
    """Multi-head latent attention (DeepSeek). Unset uses standard attention."""
    first_dense_layers: NonNegativeInt = 0
    """Leading layers with a dense MLP instead of experts."""
    dense_ffn_size: PositiveInt | None = None
    """Width of the MLP of those leading layers."""
    mtp_layers: MoreBlocks = 0
    """Multi-token prediction layers (arXiv:2412.19437, section 2.2)."""
    dropout: Share = 0.0
    """Dropout of the embedding and of the outputs of attention and MLP."""
    attention_dropout: Share | None = None
    """Dropout of attention probabilities. Unset is the same as `dropout`."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than "
                f"num_experts {self.num_experts}"
            )
        groups = self.expert_groups
        if self.num_experts > 1 and (self.num_experts % groups or self.groups_per_token > groups):
            raise ValueError(
                f"expert_groups {self.expert_groups} must divide num_experts {self.num_experts} "
                f"and be at least groups_per_token {self.groups_per_token}"
            )
        if self.positions == "rope" and self.rotary_dim % 2:
            raise ValueError(f"rope needs an even head size, not {self.rotary_dim}")
        return self

    @model_validator(mode="after")
    def _layers_agree(self) -> Self:
        dense, most = self.first_dense_layers, self.num_layers if self.num_experts > 1 else 0
        if dense > most:
            limit = f"the number of layers that may have experts, {most}"
            raise ValueError(f"first_dense_layers {dense} is more than {limit}")
        if bool(dense) != bool(self.dense_ffn_size):
            raise ValueError("first_dense_layers and dense_ffn_size must be set together")
        if self.latent_attention and (
            self.num_kv_heads or self.head_size or self.qk_norm or self.attention_sinks
        ):
            raise ValueError(
                "latent_attention cannot be combined with num_kv_heads, head_size, qk_norm and "
                "attention_sinks"
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        rotates = self.positions == "rope"
        local = self.rope_local_theta or self.sliding_window_pattern
        if self.sliding_window is None and local:
            raise ValueError(
                "rope_local_theta and sliding_window_pattern are of layers with a window: state "
                "sliding_window as well"
            )
        factors = (
            self.rope_scaling_factor,
            self.rope_attention_factor,
            self.partial_rotary_factor,
        )
        if not rotates and (self.rope_local_theta or set(factors) != {1.0}):
            raise ValueError(
                "rope_local_theta, rope_scaling_factor, rope_attention_factor and "
                "partial_rotary_factor need positions rope"
            )
        if self.rope_original_positions and self.rope_scaling_factor <= 1:
            raise ValueError("rope_original_positions needs rope_scaling_factor above 1")
        if not self.gated_ffn and (self.activation_limit or self.up_offset):
            raise ValueError("activation_limit and up_offset need gated_ffn")
        if self.norm_zero_centered and self.norm != "rmsnorm":
            raise ValueError("norm_zero_centered needs norm rmsnorm")
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default applied."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head, with the default applied."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Number of features per head with rotary embedding."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_local_layers(self) -> int:
        """Number of layers with a sliding window.

        It is none, all, or all but every sliding_window_pattern-th.
        """
        if self.sliding_window is None:
            return 0
        pattern = self.sliding_window_pattern
        return self.num_layers - (self.num_layers // pattern if pattern else 0)

    @property
    def dropped_probabilities(self) -> float:
        """Dropout of attention probabilities, with the default applied."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def attention_size(self) -> int:
        """Width of queries and of the attention output, num_heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of keys and of values, num_kv_heads x head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def embed_dim(self) -> int:
        """Width of the token embedding, with the default applied."""
        return self.embedding_size or self.hidden_size

    @property
    def num_ffn_matrices(self) -> int:
        """Number of MLP matrices: 3 with a gate (SwiGLU), else 2."""
        return 3 if self.gated_ffn else 2

    @property
    def saved_ffn_tensors(self) -> int:
        """Number of MLP-width tensors that the backward pass needs. ReLU needs only its output."""
        plain_relu = self.activation == "relu" and not self.gated_ffn
        return 1 if plain_relu else self.num_ffn_matrices

    @property
    def saved_stream_tensors(self) -> float:
        """Number of stream-width tensors that a block saves: inputs and outputs of both norms.

        Norms after a layer save only their input.
        """
        return 6.0 if self.norm_position == "both" else 4.0

    @property
    def saved_head_size(self) -> int:
        """Width of the tensors that attention saves: queries, keys, values and output.

        With `qk_norm`, it includes queries and keys before the norm.
        """
        if self.latent_attention is not None:
            return round(4 * self.num_heads * self.latent_attention.mean_head_dim)
        before_norms = self.attention_size + self.kv_size if self.qk_norm else 0
        return 2 * self.attention_size + 2 * self.kv_size + before_norms

    @property
    def causal(self) -> bool:
        """True, because tokens do not attend to later tokens."""
        return True

    @property
    def conventions(self) -> tuple[str, ...]:
        """FLOPs conventions that apply to the model; empty means all."""
        return ()

    @property
    def loss_unit(self) -> str:
        """Unit of the mean loss."""
        return "nats/token"

    def has_bias(self, name: LoraTarget) -> bool:
        """Return whether the linear layer of this name has a bias."""
        return self.bias or (self.qkv_bias and name in ATTENTION_INPUTS)

    def padded_vocab(self, tp: int = 1) -> int:
        """Return the rows of the embedding.

        This is vocab_size rounded up to a multiple of vocab_multiple x tp.
        """
        multiple = self.vocab_multiple * tp if self.vocab_multiple > 1 else 1
        return -(-self.vocab_size // multiple) * multiple


def _kind(model: Any) -> str:
    """Return the kind of a model, given as a mapping or as a shape. The default is decoder."""
    if isinstance(model, dict):
        return str(model.get("kind", "decoder"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return str(getattr(model, "kind", "decoder"))


Shape = Annotated[
    Annotated[DecoderShape, Tag("decoder")] | Annotated[MMDiTShape, Tag("mmdit")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message="kind is neither decoder nor mmdit",
    ),
]
"""Shape of any model, discriminated by `kind`."""


class LoraSpec(Value):
    """Low-rank adapters on linear layers (Hu et al., arXiv:2106.09685)."""

    rank: PositiveInt
    """Rank of the adapters."""
    alpha: PositiveFloat
    """Numerator of the adapters' scale, alpha / rank."""
    targets: tuple[LoraTarget, ...]
    """Linear layers that get an adapter."""
    dropout: Share = 0.0
    """Dropout of the adapters' inputs."""
    lr: PositiveFloat | None = None
    """Highest learning rate of the adapters. Unset is `training.lr`."""
    train_rest: bool = False
    """Train embeddings, biases and norms in addition to the adapters."""


def linear_sizes(shape: Shape) -> dict[LoraTarget, tuple[int, int]]:
    """Return (in, out) features of the linear layers of one block that can have adapters."""
    if shape.kind == "mmdit":
        return {}
    h, a, kv, f = shape.hidden_size, shape.attention_size, shape.kv_size, shape.ffn_size
    latent = shape.latent_attention
    sizes: dict[LoraTarget, tuple[int, int]] = {"q": (h, a), "k": (h, kv), "v": (h, kv)}
    if latent is not None:
        sizes, a = {}, shape.num_heads * latent.v_head_dim
    sizes |= {"o": (a, h), "up": (h, f), "down": (f, h)}
    if shape.gated_ffn:
        sizes["gate"] = (h, f)
    return sizes


def norm_parameters(shape: DecoderShape) -> int:
    """Return the parameters of one norm: a weight per feature, and a bias for layernorm."""
    return shape.hidden_size * vectors_of_norm(shape)


def vectors_of_norm(shape: DecoderShape) -> int:
    """Return 1 for RMSNorm (weight only) or 2 for LayerNorm (weight and bias)."""
    return 2 if shape.norm == "layernorm" else 1


def block_parameters(shape: DecoderShape) -> int:
    """Return the parameters of one block: linear layers, biases, attention sinks and norms."""
    sizes = linear_sizes(shape).items()
    weights = sum(
        rows * columns * matrices_per_block(shape, name) for name, (rows, columns) in sizes
    )
    biases = sum(
        columns * matrices_per_block(shape, name)
        for name, (_, columns) in sizes
        if shape.has_bias(name)
    )
    if shape.bias and shape.num_experts > 1:
        biases += shape.num_experts  # the router's
    biases += shape.num_heads if shape.attention_sinks else 0
    num_norms = 4 if shape.norm_position == "both" else 2
    of_heads = 2 * shape.head_dim * vectors_of_norm(shape) if shape.qk_norm else 0
    latent = shape.latent_attention
    of_latents = latent.norm_weights if latent is not None else 0
    norms = num_norms * norm_parameters(shape) + of_heads + of_latents
    return weights + biases + norms + router_and_shared_weights(shape) + latent_weights(shape)


def matrices_per_block(shape: Shape, name: LoraTarget) -> int:
    """Return the number of matrices of this name in a block: one, or one per expert."""
    return shape.num_experts if shape.kind == "decoder" and name in FFN else 1


def matrices_per_token(shape: Shape, name: LoraTarget) -> int:
    """Return the number of matrices of this name that are applied to a token."""
    return shape.experts_per_token if shape.kind == "decoder" and name in FFN else 1


def has_experts(shape: Shape) -> bool:
    """Return whether blocks of the model have experts."""
    return shape.kind == "decoder" and shape.num_experts > 1


def expert_weights(shape: DecoderShape) -> int:
    """Return the weights and biases of all experts of a block; 0 for a dense MLP."""
    if shape.num_experts == 1:
        return 0
    matrices, width, hidden = shape.num_ffn_matrices, shape.ffn_size, shape.hidden_size
    biases = (matrices - 1) * width + hidden if shape.bias else 0
    return shape.num_experts * (matrices * hidden * width + biases)


def latent_weights(shape: DecoderShape) -> int:
    """Return the weights of a block's latent attention without the output projection, or 0."""
    latent = shape.latent_attention
    return latent.weights(shape.hidden_size, shape.num_heads) if latent is not None else 0


def dense_layers_surplus(shape: DecoderShape, experts: int) -> int:
    """Return the weights of the first dense layers minus those of as many layers with experts.

    `experts` is the number of experts per layer.
    """
    of_width = shape.num_ffn_matrices * shape.hidden_size
    wider = (shape.dense_ffn_size or 0) - experts * shape.ffn_size
    return shape.first_dense_layers * (of_width * wider - router_and_shared_weights(shape))


def first_layer(shape: DecoderShape) -> DecoderShape:
    """Return the shape of a model whose layers are all as the first one, which may be dense."""
    if not shape.first_dense_layers:
        return shape
    sizes = {"num_experts": 1, "experts_per_token": 1, "shared_ffn_size": 0}
    dense = {"first_dense_layers": 0, "dense_ffn_size": None, "ffn_size": shape.dense_ffn_size}
    return shape.model_copy(update={**sizes, **dense})


def mtp_parameters(shape: DecoderShape) -> int:
    """Return the parameters of the multi-token prediction layers.

    Each has a block, a projection and three norms. It shares the embedding and the head of the
    model.
    """
    projection_and_norms = 2 * shape.hidden_size**2 + 3 * norm_parameters(shape)
    return shape.mtp_layers * (block_parameters(shape) + projection_and_norms)


def router_and_shared_weights(shape: DecoderShape) -> int:
    """Return the weights of a block's router and shared expert, or 0 without experts."""
    router = shape.hidden_size * shape.num_experts if shape.num_experts > 1 else 0
    return router + shape.num_ffn_matrices * shape.hidden_size * shape.shared_ffn_size


def parameter_parts(shape: Shape, tp: int = 1) -> dict[str, int]:
    """Return the parameters by part: embedding, positions, blocks, mtp, norms and others.

    Adapters are not included.
    """
    if shape.kind == "mmdit":
        return shape.parameter_parts(tp)
    vocab = shape.padded_vocab(tp)
    position_rows = shape.max_positions + shape.position_offset
    has_projections = shape.embed_dim != shape.hidden_size
    return {
        "embedding": vocab * shape.embed_dim,
        "positions": position_rows * shape.hidden_size if shape.positions == "learned" else 0,
        "blocks": shape.num_layers * block_parameters(shape)
        + dense_layers_surplus(shape, shape.num_experts),
        "mtp": mtp_parameters(shape),
        "norms": norm_parameters(shape) * (shape.final_norm + shape.embedding_norm),
        "projections": 2 * shape.embed_dim * shape.hidden_size if has_projections else 0,
        "head": 0 if shape.tied_embeddings else vocab * shape.embed_dim,
    }


def num_parameters(shape: Shape, tp: int = 1) -> int:
    """Return the number of parameters of the whole model, without adapters.

    For a GPT this is l(12h^2+13h) + Vh + sh + 2h (Narayanan et al., arXiv:2104.04473, equation 2).
    """
    return sum(parameter_parts(shape, tp).values())


def lora_parameters(shape: Shape, lora: LoraSpec) -> int:
    """Return the parameters of all adapters: rank x (in + out) for every target of every block."""
    sizes = linear_sizes(shape)
    return shape.num_layers * sum(
        lora.rank * sum(sizes[t]) * matrices_per_block(shape, t) for t in lora.targets if t in sizes
    )


def adapted_weights(shape: Shape, lora: LoraSpec) -> int:
    """Return the weights of all frozen matrices that have an adapter."""
    sizes = linear_sizes(shape)
    return shape.num_layers * sum(
        sizes[t][0] * sizes[t][1] * matrices_per_block(shape, t) for t in lora.targets if t in sizes
    )


def trainable_parameters(shape: Shape, lora: LoraSpec | None = None, tp: int = 1) -> int:
    """Return the number of parameters with a gradient.

    These are all parameters, or with LoRA the adapters and the parameters that `train_rest` adds.
    """
    if lora is None:
        return num_parameters(shape, tp)
    if not lora.train_rest:
        return lora_parameters(shape, lora)
    return num_parameters(shape, tp) - adapted_weights(shape, lora) + lora_parameters(shape, lora)
