"""Shape of a multimodal diffusion transformer (Flux): exact parameters and FLOPs.

Text tokens and image patches form two streams. In the double blocks, the streams share only
attention. They are then joined into one stream for the single blocks, which run attention and MLP
in parallel. A vector of the time and the pooled text modulates every block. Attention has no mask.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from paceline.core.value import BlockCount, PositiveInt, Value

TIME_WIDTH = 256
"""Number of sines and cosines that encode the time before its first layer."""
DOUBLE_CHUNKS, SINGLE_CHUNKS, FINAL_CHUNKS = 6, 3, 2
"""Vectors that modulate one stream of a double block, a single block, and the last layer."""


class MMDiTShape(Value):
    """A Flux transformer without guidance: sizes of the blocks, the latents and the text."""

    kind: Literal["mmdit"]
    """Kind of model."""
    hidden_size: PositiveInt
    """Width of the model."""
    num_heads: PositiveInt
    """Number of attention heads."""
    num_double_blocks: BlockCount
    """Blocks with separate weights for text and image."""
    num_single_blocks: BlockCount
    """Blocks that process text and image as one sequence."""
    mlp_ratio: PositiveInt = 4
    """Width of the MLP relative to the model."""
    latent_channels: PositiveInt = 16
    """Channels of the autoencoder's latents."""
    latent_size: PositiveInt
    """Height and width of the latents, an eighth of the image."""
    patch_size: PositiveInt = 2
    """Height and width of the patches that become one token each."""
    text_len: PositiveInt
    """Tokens of the encoded text."""
    text_width: PositiveInt
    """Width of the encoded text."""
    pooled_width: PositiveInt
    """Width of the pooled text vector."""
    rope_axes: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    """Features of a head that rotate with index, row and column."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary embedding."""
    text_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of samples whose text is replaced by the empty text."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if sum(self.rope_axes) != self.head_dim or any(axis % 2 for axis in self.rope_axes):
            raise ValueError(
                f"rope_axes {list(self.rope_axes)} are not even numbers that add up to the head's "
                f"{self.head_dim}"
            )
        if self.latent_size % self.patch_size:
            raise ValueError(
                f"latent_size {self.latent_size} is not a multiple of patch_size {self.patch_size}"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def in_channels(self) -> int:
        """Width of an image token before the first layer and after the last one."""
        return self.latent_channels * self.patch_size**2

    @property
    def image_tokens(self) -> int:
        """Number of patches per sample."""
        return (self.latent_size // self.patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """Number of tokens per sample, text and image."""
        return self.text_len + self.image_tokens

    @property
    def num_layers(self) -> int:
        """Number of blocks of both kinds. Each applies equally many weights to a token."""
        return self.num_double_blocks + self.num_single_blocks

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return self.mlp_ratio * self.hidden_size

    @property
    def attention_size(self) -> int:
        """Width of the attention output, num_heads x head_dim."""
        return self.hidden_size

    @property
    def kv_size(self) -> int:
        """Width of keys and of values. Every head has its own."""
        return self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads

    @property
    def saved_head_size(self) -> int:
        """Width of the tensors that attention saves per token: queries, keys, values, output."""
        return 2 * self.attention_size + 2 * self.kv_size

    @property
    def saved_ffn_tensors(self) -> int:
        """Number of tensors of the MLP's width that the backward pass needs."""
        return 2

    @property
    def saved_stream_tensors(self) -> float:
        """Number of stream-width tensors that the norms of a block save, averaged over blocks."""
        return (4 * self.num_double_blocks + 2 * self.num_single_blocks) / self.num_layers

    @property
    def tied_embeddings(self) -> bool:
        """False, because the first layers and the last layer share no weights."""
        return False

    @property
    def causal(self) -> bool:
        """False, because every token attends to all tokens."""
        return False

    @property
    def conventions(self) -> tuple[str, ...]:
        """FLOPs conventions that apply to the model."""
        return ("full-attention",)

    @property
    def loss_unit(self) -> str:
        """Unit of the mean loss: squared error of the velocity, per element of the latents."""
        return "squared error"

    def padded_vocab(self, tp: int = 1) -> int:
        """Return 0, because the model has no vocabulary."""
        return 0

    def parameter_parts(self, tp: int = 1) -> dict[str, int]:
        """Return the parameters by part: layers before the blocks, blocks, last layer."""
        h = self.hidden_size
        before = [
            (self.in_channels, h),
            (self.text_width, h),
            (TIME_WIDTH, h),
            (h, h),
            (self.pooled_width, h),
            (h, h),
        ]
        last = [(h, FINAL_CHUNKS * h), (h, self.in_channels)]
        return {
            "embedding": _linears(before),
            "blocks": self.num_double_blocks * self._double_block()
            + self.num_single_blocks * self._single_block(),
            "head": _linears(last),
            "positions": 0,
            "norms": 0,
            "projections": 0,
        }

    def _double_block(self) -> int:
        """Return the parameters of a double block.

        Each of the two streams has modulation, queries, keys, values, output, MLP, and the norms of
        q and k.
        """
        h, f = self.hidden_size, self.ffn_size
        stream = [(h, DOUBLE_CHUNKS * h), (h, 3 * h), (h, h), (h, f), (f, h)]
        return 2 * (_linears(stream) + 2 * self.head_dim)

    def _single_block(self) -> int:
        """Return the parameters of a single block.

        One layer computes q, k, v and the MLP input, and another one combines both outputs.
        """
        h, f = self.hidden_size, self.ffn_size
        return _linears([(h, SINGLE_CHUNKS * h), (h, 3 * h + f), (h + f, h)]) + 2 * self.head_dim

    @property
    def block_forward_flops(self) -> int:
        """FLOPs of one sample's forward pass through the weights of all blocks, without attention.

        The tokens take 2 (4 + 2 r) h^2 S L (24 h^2 S L for r = 4). The modulation takes 2 (12 D + 3
        s) h^2 and is computed once per sample. D is the number of double blocks, s of single blocks
        and L of both.
        """
        tokens = (4 + 2 * self.mlp_ratio) * self.seq_len * self.num_layers
        chunks = 2 * DOUBLE_CHUNKS * self.num_double_blocks + SINGLE_CHUNKS * self.num_single_blocks
        return 2 * self.hidden_size**2 * (tokens + chunks)

    @property
    def linear_flops(self) -> int:
        """Training FLOPs of one sample in all weights: 6 per weight and use.

        The four layers that read the data take 4, because their input needs no gradient.
        """
        h, image, text = self.hidden_size, self.image_tokens, self.text_len
        readers = image * self.in_channels + text * self.text_width + TIME_WIDTH + self.pooled_width
        others = 2 * h + FINAL_CHUNKS * h + image * self.in_channels
        return 3 * self.block_forward_flops + 4 * h * readers + 6 * h * others


def _linears(sizes: list[tuple[int, int]]) -> int:
    """Return the number of weights and biases of layers with these (in, out) features."""
    return sum(rows * columns + columns for rows, columns in sizes)
