"""Multi-head latent attention: sizes of a block's products for queries, keys and values."""

from __future__ import annotations

from paceline.core.value import PositiveInt, Value


class LatentAttention(Value):
    """Keys and values of all heads from one narrow vector a token (arXiv:2405.04434, section 2.1).

    Names are those of DeepSeek's configurations. Beside the part of a head's query and key that
    comes from narrow vectors, a part rotates, whose key all heads share.
    """

    q_lora_rank: PositiveInt | None = None
    """Width of the vector that queries come from; None means the stream itself."""
    kv_lora_rank: PositiveInt
    """Width of the vector that keys and values come from."""
    qk_nope_head_dim: PositiveInt
    """Features of a head's query and key that do not rotate."""
    qk_rope_head_dim: PositiveInt
    """Features that do."""
    v_head_dim: PositiveInt
    """Width of a head's values."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mean_head_dim(self) -> float:
        """Width of a head in attention's two products, their mean."""
        return (self.qk_head_dim + self.v_head_dim) / 2

    @property
    def norm_weights(self) -> int:
        """Weights of the norms of both narrow vectors."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    def weights(self, hidden_size: int, num_heads: int) -> int:
        """Weights of a block's products for queries, keys and values, without the output's."""
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
        """Numbers a token that a block keeps of the narrow vectors, before and behind norms."""
        return 2 * self.norm_weights
