"""One decoder for every shape: GPT-2/Megatron, OPT, BLOOM and Llama are settings of it.

Shapes: B sequences of T tokens, H width, N heads of D, V vocabulary. The residual stream runs in
the compute dtype; parameters keep their own dtype and are cast where they are used, so the same
code trains fp32 master weights and parameters that FSDP already gathers in the compute dtype.
`gelu` is the exact one; GPT-2's tanh form costs the same FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attention import causal_attention
from config import ModelConfig
from loss import chunked_cross_entropy

ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in its input's dtype."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden_size))
        self.bias = (
            nn.Parameter(torch.empty(model.hidden_size)) if model.norm == "layernorm" else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        bias = self.bias.to(x.dtype)
        if x.device.type == "cpu" and x.dtype.itemsize == 2:
            # PyTorch's CPU kernel sums the gradients of weight and bias in 16 bits: 10 % wrong over
            # 8,192 tokens, 70 % over 65,536 (PyTorch 2.13).
            return torch.addcmul(bias, functional.layer_norm(x, weight.shape, eps=self.eps), weight)
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, T, N, D) turned by its positions; `sin` carries the sign of the half it belongs to."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def rope_tables(model: ModelConfig, seq_len: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin of rotary embeddings (Su et al., arXiv:2104.09864), (T, 1, D) in fp64."""
    half = model.head_dim // 2
    rate = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), rate)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.num_heads, model.kv_heads, model.head_dim
        hidden, bias = model.hidden_size, model.bias
        self.q = Linear(hidden, self.heads * self.head_dim, bias)
        self.k = Linear(hidden, self.kv_heads * self.head_dim, bias)
        self.v = Linear(hidden, self.kv_heads * self.head_dim, bias)
        self.o = Linear(self.heads * self.head_dim, hidden, bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        rows = x.shape[:2]
        q = self.q(x).view(*rows, self.heads, self.head_dim)
        k = self.k(x).view(*rows, self.kv_heads, self.head_dim)
        v = self.v(x).view(*rows, self.kv_heads, self.head_dim)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return self.o(causal_attention(q, k, v).flatten(2))


class FeedForward(nn.Module):
    """The MLP of a block, with or without a gate."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[model.activation]
        self.up = Linear(model.hidden_size, model.ffn_size, model.bias)
        self.gate = (
            Linear(model.hidden_size, model.ffn_size, model.bias) if model.gated_ffn else None
        )
        self.down = Linear(model.ffn_size, model.hidden_size, model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP with their residuals; norms before (pre) or after the sums (post)."""

    def __init__(self, model: ModelConfig, recompute: str) -> None:
        super().__init__()
        self.pre = model.norm_position == "pre"
        self.recompute = recompute == "full"
        self.attention_norm = Norm(model)
        self.attention = Attention(model)
        self.ffn_norm = Norm(model)
        self.ffn = FeedForward(model)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        if self.recompute and torch.is_grad_enabled():
            # Inside the block, so that FSDP's gathering happens once outside of it.
            return checkpoint(self._layers, x, rope, use_reentrant=False, preserve_rng_state=False)
        return self._layers(x, rope)

    def _layers(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.pre:
            x = x + self.attention(self.attention_norm(x), rope)
            return x + self.ffn(self.ffn_norm(x))
        x = self.attention_norm(x + self.attention(x, rope))
        return self.ffn_norm(x + self.ffn(x))


class Decoder(nn.Module):
    """Tokens in, scaled loss out; `blocks` is keyed by the global layer index."""

    def __init__(
        self, model: ModelConfig, seq_len: int, dtype: torch.dtype, recompute: str = "none"
    ) -> None:
        super().__init__()
        self.model, self.seq_len, self.dtype = model, seq_len, dtype
        hidden, embed = model.hidden_size, model.embed_dim
        projected = embed != hidden
        self.embedding = nn.Embedding(model.padded_vocab, embed)
        self.project_in = Linear(embed, hidden, bias=False) if projected else None
        self.embedding_norm = Norm(model) if model.embedding_norm else None
        rows = model.max_positions + model.position_offset
        self.positions = nn.Embedding(rows, hidden) if model.positions == "learned" else None
        self.blocks = nn.ModuleDict(
            {str(layer): Block(model, recompute) for layer in range(model.num_layers)}
        )
        self.final_norm = Norm(model) if model.final_norm else None
        self.project_out = Linear(hidden, embed, bias=False) if projected else None
        self.head = None if model.tied_embeddings else Linear(embed, model.padded_vocab, bias=False)
        # No buffer: DDP would send it around in every step, and a meta model has no memory for it.
        self.rope: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor, scale: float) -> Tensor:
        """scale x the summed loss of (B, T) tokens against (B, T) targets, a scalar."""
        hidden = self.hidden_states(tokens)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return chunked_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), scale)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens -> (B, T, E) inputs of the head."""
        x = self.embedding(tokens).to(self.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            start = self.model.position_offset
            x = x + self.positions.weight[start : start + tokens.shape[1]].to(x.dtype)
        for block in self.blocks.values():
            x = block(x, self.rope)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

    def make_tables(self, device: torch.device) -> None:
        """Compute the rotary tables in the compute dtype; needed once before training."""
        if self.positions is None:
            cos, sin = rope_tables(self.model, self.seq_len)
            self.rope = cos.to(device, self.dtype), sin.to(device, self.dtype)
