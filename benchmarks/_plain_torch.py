"""A Llama in plain PyTorch, as one writes it by hand: the other peer of the native trainer.

nn.Linear, scaled_dot_product_attention, cross_entropy over all logits at once, autocast for bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from _plain_loop import main
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention with grouped key/value heads and rotary positions."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = model["hidden_size"], model["num_heads"]
        kv_heads = model["num_kv_heads"] or heads
        self.width = model["head_size"] or hidden // heads
        self.q = nn.Linear(hidden, heads * self.width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.o = nn.Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, ffn = model["hidden_size"], model["ffn_size"]
        self.attention_norm = nn.RMSNorm(hidden, model["norm_eps"])
        self.attention = Attention(model)
        self.ffn_norm = nn.RMSNorm(hidden, model["norm_eps"])
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocab = model["hidden_size"], model["padded_vocab"]
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["num_layers"]))
        self.norm = nn.RMSNorm(hidden, model["norm_eps"])
        self.head = nn.Linear(hidden, vocab, bias=False)
        width = model["head_size"] or hidden // model["num_heads"]
        rate = model["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(model["max_positions"]), rate).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, N, T, D) turned by its positions."""
    early, late = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-late, early], dim=-1) * sin).to(x.dtype)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in fp32."""
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


if __name__ == "__main__":
    main(lambda settings: Llama(settings["model"]), loss_of, extra_tokens=1)
