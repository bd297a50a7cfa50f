"""Sizes and options of a model as in trainer.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LatentConfig:
    """Widths of multi-head latent attention, as DeepSeek's configurations name them."""

    q_lora_rank: int | None
    """Width of compressed queries; None projects queries from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape; the properties resolve sizes that are None."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_size: int | None
    ffn_size: int
    vocab_size: int
    padded_vocab: int
    gated_ffn: bool
    activation: str
    norm: str
    norm_position: str
    norm_eps: float
    final_norm: bool
    embedding_norm: bool
    positions: str
    max_positions: int
    position_offset: int
    rope_theta: float
    bias: bool
    tied_embeddings: bool
    embedding_size: int | None
    kind: Literal["decoder"] = "decoder"
    dropout: float = 0.0
    """Dropout probability of the outputs of embedding, attention and MLP."""
    attention_dropout: float | None = None
    """Dropout probability of the attention weights; None for `dropout`."""
    norm_zero_centered: bool = False
    """True if norms multiply by 1 + weight."""
    qkv_bias: bool = False
    """True if query, key and value projections have biases even without `bias`."""
    qk_norm: bool = False
    """True if every query and key head is normalized."""
    rope_local_theta: float | None = None
    """RoPE base in layers with a window, with unscaled positions; None for `rope_theta`."""
    rope_scaling_factor: float = 1.0
    """Divisor of positions."""
    rope_original_positions: int | None = None
    """Longest sequence before YaRN extends it; None scales linearly."""
    rope_attention_factor: float = 1.0
    """Factor of the rotary tables."""
    partial_rotary_factor: float = 1.0
    """Fraction of a head's features that rotate."""
    sliding_window: int | None = None
    """Maximum number of tokens that a token attends to, including itself."""
    sliding_window_pattern: int | None = None
    """Interval of layers without a window."""
    attention_sinks: bool = False
    """True if each head has a logit that takes a share of its attention without a value."""
    activation_limit: float | None = None
    """Limit of the inputs of a gated MLP's product: of the gate above, of the other both ways."""
    up_offset: float = 0.0
    """Number added to the input of a gated MLP that has no activation."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root; None for the head width."""
    scale_embedding: bool = False
    """True if token embeddings are multiplied by sqrt(hidden_size)."""
    latent_attention: LatentConfig | None = None
    """Widths of latent attention; None for standard attention."""

    num_experts: int = 1
    """Experts per block; 1 for a dense MLP."""
    experts_per_token: int = 1
    """Experts that each token is routed to."""
    expert_groups: int = 1
    """Groups of experts."""
    groups_per_token: int = 1
    """Groups that a token's experts are in."""
    shared_ffn_size: int = 0
    """Width of the shared expert; 0 for none."""
    first_dense_layers: int = 0
    """Leading layers with a dense MLP instead of experts."""
    dense_ffn_size: int | None = None
    """Width of the MLP of those layers."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    router_normalize: bool = True
    """True if the weights of a token's experts are divided by their sum."""
    router_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    router_choice_bias: bool = False
    """True if experts are chosen by score plus a balancing bias."""
    mtp_layers: int = 0
    """Modules of multi-token prediction."""

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer (from 0) has experts instead of a dense MLP."""
        return self.num_experts > 1 and layer >= self.first_dense_layers

    def window(self, layer: int) -> int | None:
        """Return the window of a layer (from 0); None for full causal attention."""
        pattern = self.sliding_window_pattern
        return None if pattern and (layer + 1) % pattern == 0 else self.sliding_window

    @property
    def rotary_dim(self) -> int:
        """Number of a head's features that rotate."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_scale(self) -> float:
        """Factor of queries in addition to attention's 1 / sqrt(head_dim)."""
        scalar = self.query_pre_attn_scalar
        return 1.0 if scalar is None else (self.head_dim / scalar) ** 0.5

    @property
    def rounds_yarn(self) -> bool:
        """True if YaRN mixes rates between whole features, as code with latent attention does."""
        return self.latent_attention is not None

    @property
    def attention_dropout_p(self) -> float:
        """Dropout probability of the attention weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head; in latent attention that of its query and key."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_head_dim
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def embed_dim(self) -> int:
        """Width of the token embedding."""
        return self.embedding_size or self.hidden_size


@dataclass(frozen=True)
class FluxConfig:
    """The sizes of a multimodal diffusion transformer, of its latents and of its text."""

    kind: Literal["mmdit"]
    hidden_size: int
    num_heads: int
    num_double_blocks: int
    num_single_blocks: int
    mlp_ratio: int
    latent_channels: int
    latent_size: int
    patch_size: int
    text_len: int
    text_width: int
    pooled_width: int
    rope_axes: tuple[int, int, int]
    rope_theta: float
    text_dropout: float
    tied_embeddings: bool = False
    positions: str = "rope"

    @property
    def num_layers(self) -> int:
        """Blocks of both kinds."""
        return self.num_double_blocks + self.num_single_blocks

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def in_channels(self) -> int:
        """Width of an image token before the first layer and after the last one."""
        return self.latent_channels * self.patch_size**2

    @property
    def patches(self) -> int:
        """Rows and columns of image tokens."""
        return self.latent_size // self.patch_size


Model = ModelConfig | FluxConfig
