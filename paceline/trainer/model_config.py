"""A model's sizes and options as trainer.json has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape; null sizes mean the usual value, which the properties fill in."""

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
    """Share of what embedding, attention and MLP add to the stream that is dropped."""
    attention_dropout: float | None = None
    """The same of attention's probabilities; None is as `dropout`."""
    norm_zero_centered: bool = False
    """Norms multiply by 1 + their weight."""
    qk_norm: bool = False
    """A norm of every query and key head."""
    rope_local_theta: float | None = None
    """Base in the layers with a window, where positions are not scaled; None: as in all others."""
    rope_scaling_factor: float = 1.0
    """What positions are divided by."""
    rope_attention_factor: float = 1.0
    """What rotated queries and keys are multiplied with."""
    partial_rotary_factor: float = 1.0
    """Share of a head that rotates."""
    sliding_window: int | None = None
    """Tokens that a token attends to at most, itself included."""
    sliding_window_pattern: int | None = None
    """Every so many-th layer has no window."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its root; None: by that of a head's width."""
    scale_embedding: bool = False
    """Token vectors are multiplied by the root of hidden_size."""

    def window(self, layer: int) -> int | None:
        """The window of a layer, counted from 0; None where it attends to all of the past."""
        pattern = self.sliding_window_pattern
        return None if pattern and (layer + 1) % pattern == 0 else self.sliding_window

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_scale(self) -> float:
        """What queries are multiplied with beside attention's own 1 / sqrt(head_dim)."""
        scalar = self.query_pre_attn_scalar
        return 1.0 if scalar is None else (self.head_dim / scalar) ** 0.5

    @property
    def attention_dropout_p(self) -> float:
        """Share of attention's probabilities that is dropped."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
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
        """Width of an image token before the first layer and behind the last one."""
        return self.latent_channels * self.patch_size**2

    @property
    def patches(self) -> int:
        """Rows and columns of image tokens."""
        return self.latent_size // self.patch_size


Model = ModelConfig | FluxConfig
