"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1).

Queries come from one compressed vector per token, keys and values from another one. A head's query
and key have a part without and a part with rotary embedding; all heads share the rotary key.

Shapes: B sequences of T tokens, hidden size H, N heads on this tensor rank, compressed widths Rq
and Rkv, widths P (plain) and R (rotary) of a head's query and key, V of its value. Training expands
the compressed vectors, so attention itself is that of N key/value heads.

With tensor parallelism the down-projections run on every rank and the up-projections are split by
heads. The gradients of the former are then sums over the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.trainer.model.attention import Rope, apply_rotary
from paceline.trainer.model.context_parallel import attend
from paceline.trainer.model.dropout import with_rank_rng
from paceline.trainer.model.layer_setting import LayerSetting
from paceline.trainer.model.layers import ColumnParallelLinear, Linear, Norm, RowParallelLinear
from paceline.trainer.model.network import activation_checkpoint
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.tensor import PER_HEAD, TpPlan

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed vectors. The published models' code has it whatever
`rms_norm_eps` is (transformers, modeling_deepseek_v3.py)."""


class DownProjection(Linear):
    """A projection to a compressed vector, which every tensor rank computes for its own heads."""

    tp_plan: TpPlan = PER_HEAD


class LatentNorm(Norm):
    """The RMSNorm of a compressed vector."""

    tp_plan: TpPlan = PER_HEAD

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__(replace(model, norm="rmsnorm", norm_eps=LATENT_NORM_EPS), width)


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values come from compressed vectors."""

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, window: int | None = None
    ) -> None:
        super().__init__()
        latent = model.latent_attention
        assert latent is not None
        self.setting, self.latent, self.window = setting, latent, window
        self.query_scale, self.dropout = model.query_scale, model.attention_dropout_p
        hidden, heads = model.hidden_size, model.num_heads
        queries, rank = heads * latent.qk_head_dim, latent.q_lora_rank
        self.q_down = DownProjection(hidden, rank, bias=False) if rank else None
        self.q_latent_norm = LatentNorm(model, rank) if rank else None
        up = ColumnParallelLinear(rank or hidden, queries, bias=False)
        self.q_up, self.q = (up, None) if rank else (None, up)
        self.kv_down = DownProjection(
            hidden, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False
        )
        self.kv_latent_norm = LatentNorm(model, latent.kv_lora_rank)
        keys_and_values = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.kv_up = ColumnParallelLinear(latent.kv_lora_rank, keys_and_values, bias=False)
        self.o = RowParallelLinear(
            setting.tp, heads * latent.v_head_dim, hidden, model.bias, setting.adapter("o")
        )

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """Map (B, t, H) to (B, t, H); `documents` as in `document_attention`."""
        x = self.setting.tp.gather_input(x)  # (B, T, H)
        selective = self.setting.recompute == "selective"
        out = activation_checkpoint(  # (B, T, N, V)
            self._attend,
            self.queries(x, rope),
            *self.keys_and_values(x, rope),
            documents,
            preserve_rng=self.dropout > 0,
            enabled=selective,
        )
        return self.o(out.flatten(2))  # (B, t, H)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Return the queries (B, T, N, P + R) of x (B, T, H)."""
        if self.q_down is not None and self.q_latent_norm is not None:
            x = self.q_latent_norm(self.q_down(x))  # (B, T, Rq)
        up = self.q if self.q_up is None else self.q_up
        assert up is not None
        q = up(x).unflatten(-1, (-1, self.latent.qk_head_dim))  # (B, T, N, P + R)
        if self.query_scale != 1:
            q = q * self.query_scale
        if rope is None:
            return q
        plain, rotary = q.split([self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], -1)
        return torch.cat([plain, rotate_pairs(rotary, rope)], -1)

    def keys_and_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return keys (B, T, N, P + R) and values (B, T, N, V) of x (B, T, H)."""
        latent = self.latent
        inner, rotary = self.kv_down(x).split([latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
        up = self.kv_up(self.kv_latent_norm(inner))  # (B, T, N (P + V))
        up = up.unflatten(-1, (-1, latent.qk_nope_head_dim + latent.v_head_dim))
        plain, v = up.split([latent.qk_nope_head_dim, latent.v_head_dim], -1)
        rotary = rotary.unsqueeze(2)  # (B, T, 1, R)
        rotary = rotary if rope is None else rotate_pairs(rotary, rope)
        k = torch.cat([plain, rotary.expand(-1, -1, plain.shape[2], -1)], -1)
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        setting, dropout = self.setting, self.dropout if self.training else 0.0
        options = {"dropout": dropout, "window": self.window, "documents": documents}
        compute = partial(attend, cp=setting.cp, exchange=setting.cp_exchange, **options)
        return with_rank_rng(setting.tp.axis, compute, q, k, v) if dropout else compute(q, k, v)


def rotate_pairs(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (B, T, N, R), whose pairs are adjacent features, by their positions.

    The result has the first features of all pairs, then the second ones. Scores do not depend on
    that order, as it is the same in queries and keys.
    """
    return apply_rotary(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *rope)
