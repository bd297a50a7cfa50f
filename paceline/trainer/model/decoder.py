"""One decoder for every shape: GPT-2/Megatron, OPT, BLOOM and Llama are settings of it.

Shapes: B sequences of T tokens, t of them in this rank's part of the stream, H width, N heads of D,
V vocabulary. The residual stream runs in the compute dtype; parameters keep their own dtype and are
cast where they are used, so the same code trains fp32 master weights and parameters that FSDP
already gathers in the compute dtype. Everything is computed on plain local tensors: with tensor
parallelism N, V and the ffn's width are this rank's share, and `TensorParallel` says what is
exchanged. `gelu` is the exact one, `gelu_tanh` the form that GPT-2 was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.trainer.config import LoraConfig
from paceline.trainer.model.attention import Rope, rope_tables_on, rotate
from paceline.trainer.model.context_parallel import attend, local_positions
from paceline.trainer.model.document_attention import restarted
from paceline.trainer.model.dropout import drop_apart, drop_stream
from paceline.trainer.model.layers import (
    ACTIVATIONS,
    ColumnParallelLinear,
    Head,
    Linear,
    Norm,
    PositionEmbedding,
    QKNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from paceline.trainer.model.loss import head_loss
from paceline.trainer.model.network import Network, recomputed
from paceline.trainer.model.windowed_attention import load_kernels
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from paceline.trainer.parallel.tensor import NO_TP, TensorParallel


@dataclass(frozen=True)
class LayerSetting:
    """How a decoder computes, whatever its shape."""

    seq_len: int
    dtype: torch.dtype
    recompute: str = "none"
    tp: TensorParallel = NO_TP
    cp: MeshAxis = ALONE
    cp_exchange: str = "all-gather"
    lora: LoraConfig | None = None
    levels: tuple[str, ...] = ()
    """What each layer recomputes, where they do not all do the same."""

    def of_layer(self, layer: int) -> LayerSetting:
        """The setting of one layer's block."""
        return replace(self, recompute=self.levels[layer]) if self.levels else self

    def adapter(self, layer: str) -> LoraConfig | None:
        """The adapter of a layer of a block, if it has one."""
        return self.lora if self.lora and layer in self.lora.targets else None


@dataclass(frozen=True)
class ModelPart:
    """Which layers a pipeline stage holds; the first one embeds, the last one has the head."""

    layers: range
    first: bool = True
    last: bool = True


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, to a window of the past if it has one."""

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, window: int | None = None
    ) -> None:
        super().__init__()
        self.setting, self.head_dim, self.window = setting, model.head_dim, window
        self.query_scale = model.query_scale
        self.dropout = model.dropped_probabilities
        hidden, bias = model.hidden_size, model.bias
        heads_size, kv_size = model.num_heads * self.head_dim, model.kv_heads * self.head_dim
        self.q = ColumnParallelLinear(hidden, heads_size, bias, setting.adapter("q"))
        self.k = ColumnParallelLinear(hidden, kv_size, bias, setting.adapter("k"))
        self.v = ColumnParallelLinear(hidden, kv_size, bias, setting.adapter("v"))
        self.o = RowParallelLinear(setting.tp, heads_size, hidden, bias, setting.adapter("o"))
        self.q_norm = QKNorm(model) if model.qk_norm else None
        self.k_norm = QKNorm(model) if model.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """(B, t, H) -> (B, t, H); `documents` as in `document_attention`."""
        x = self.setting.tp.gather_input(x)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.query_scale != 1:
            q = q * self.query_scale
        selective = self.setting.recompute == "selective"
        out = recomputed(self._attend, q, k, v, documents, draws=self.dropout > 0, when=selective)
        return self.o(out.flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        setting, drops = self.setting, self.dropout if self.training else 0.0
        rest = {"dropout": drops, "window": self.window, "documents": documents}
        compute = partial(attend, cp=setting.cp, exchange=setting.cp_exchange, **rest)
        return drop_apart(setting.tp.axis, compute, q, k, v) if drops else compute(q, k, v)


class FeedForward(nn.Module):
    """The MLP of a block, with or without a gate."""

    def __init__(self, model: ModelConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.tp = setting.tp
        self.activation = ACTIVATIONS[model.activation]
        hidden, ffn, bias = model.hidden_size, model.ffn_size, model.bias
        self.up = ColumnParallelLinear(hidden, ffn, bias, setting.adapter("up"))
        self.gate = (
            ColumnParallelLinear(hidden, ffn, bias, setting.adapter("gate"))
            if model.gated_ffn
            else None
        )
        self.down = RowParallelLinear(self.tp, ffn, hidden, bias, setting.adapter("down"))
        self.recompute = setting.recompute == "activation"
        self.draws = self.down.lora is not None and self.down.lora.dropout > 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, t, H) -> (B, t, H)."""
        x = self.tp.gather_input(x)
        inner = [layer(x) for layer in (self.gate, self.up) if layer is not None]
        return recomputed(self._activated, *inner, draws=self.draws, when=self.recompute)

    def _activated(self, x: Tensor, gated: Tensor | None = None) -> Tensor:
        x = self.activation(x)
        return self.down(x if gated is None else x * gated)


class DecoderBlock(nn.Module):
    """Attention and MLP with their residuals; norms before (pre) or after the sums (post).

    Or before each of the two and behind it, ahead of the sum (both).
    """

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, window: int | None = None
    ) -> None:
        super().__init__()
        self.pre = model.norm_position != "post"
        self.recompute = setting.recompute
        self.dropout, self.tp = model.dropout, setting.tp
        of_adapters = setting.lora.dropout if setting.lora else 0.0
        self.draws = max(of_adapters, model.dropout, model.dropped_probabilities) > 0
        self.attention_norm = Norm(model)
        self.attention = Attention(model, setting, window)
        self.ffn_norm = Norm(model)
        self.ffn = FeedForward(model, setting)
        both = model.norm_position == "both"
        self.attention_post_norm = Norm(model) if both else None
        self.ffn_post_norm = Norm(model) if both else None

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """(B, t, H) -> (B, t, H)."""
        # Inside the block, so that FSDP's gathering happens once outside of it.
        full = self.recompute == "full"
        return recomputed(self._layers, x, rope, documents, draws=self.draws, when=full)

    def _layers(self, x: Tensor, rope: Rope, documents: Tensor | None) -> Tensor:
        if self.attention_post_norm is not None and self.ffn_post_norm is not None:
            attended = self.attention(self.attention_norm(x), rope, documents)
            x = x + self._drop(self.attention_post_norm(attended))
            return x + self._drop(self.ffn_post_norm(self._ffn(x)))
        if self.pre:
            x = x + self._drop(self.attention(self.attention_norm(x), rope, documents))
            return x + self._drop(self._ffn(x))
        x = self.attention_norm(x + self._drop(self.attention(x, rope, documents)))
        return self.ffn_norm(x + self._drop(self._ffn(x)))

    def _ffn(self, x: Tensor) -> Tensor:
        """The ffn, behind its norm where that comes first."""
        return recomputed(self._normed_ffn, x, draws=self.draws, when=self.recompute == "ffn")

    def _normed_ffn(self, x: Tensor) -> Tensor:
        return self.ffn(self.ffn_norm(x) if self.pre else x)

    def _drop(self, x: Tensor) -> Tensor:
        drops = self.dropout and self.training
        return drop_stream(x, self.dropout, self.tp) if drops else x


class Decoder(Network):
    """A decoder or a pipeline stage of it; `blocks` is keyed by the global layer index.

    Tokens or hidden states in, hidden states or the scaled loss out, as its part says.
    """

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, part: ModelPart | None = None
    ) -> None:
        super().__init__()
        self.model, self.setting = model, setting
        self.part = part = part or ModelPart(range(model.num_layers))
        hidden, embed = model.hidden_size, model.embed_dim
        projected = embed != hidden
        holds_table = part.first or (part.last and model.tied_embeddings)
        self.embedding = (
            VocabParallelEmbedding(setting.tp, setting.dtype, model.padded_vocab, embed)
            if holds_table
            else None
        )
        self.project_in = Linear(embed, hidden, bias=False) if projected and part.first else None
        self.embedding_norm = Norm(model) if model.embedding_norm and part.first else None
        places = model.max_positions + model.position_offset
        learned = model.positions == "learned" and part.first
        self.positions = PositionEmbedding(places, hidden) if learned else None
        self.blocks = nn.ModuleDict(
            {str(i): DecoderBlock(model, setting.of_layer(i), model.window(i)) for i in part.layers}
        )
        self.final_norm = Norm(model) if model.final_norm and part.last else None
        self.project_out = Linear(hidden, embed, bias=False) if projected and part.last else None
        headed = part.last and not model.tied_embeddings
        self.head = Head(embed, model.padded_vocab, bias=False) if headed else None
        # No buffers: DDP would send them around in every step, and a meta model has no memory.
        self.rope: Rope = None
        self.local_rope: Rope = None
        self.places: Tensor | None = None

    @property
    def tied_copy(self) -> str | None:
        """The parameter that is another stage's as well, and only copied here."""
        tied = self.model.tied_embeddings and self.part.last and not self.part.first
        return "embedding.weight" if tied else None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """(B, T) tokens or (B, t, H) -> (B, t, H), or `scale` x the summed loss of the targets."""
        if self.part.first:
            x = self.embed(x, documents)
        for layer, block in self.blocks.items():
            windowed = self.model.window(int(layer)) is not None
            x = block(x, self.local_rope if windowed else self.rope, documents)
        if not self.part.last:
            return x
        assert targets is not None, "the last stage needs targets"
        return self.loss(x, targets)

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """(B, T) tokens -> (B, t, H)."""
        assert self.embedding is not None
        x = self.embedding(tokens)
        if self.model.scale_embedding:
            x = x * self.model.hidden_size**0.5
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            assert self.places is not None, "make_tables comes first"
            places = restarted(self.places, documents, self.model.position_offset)
            x = x + self.positions(places).to(x.dtype)
        if self.model.dropout and self.training:
            x = drop_stream(x, self.model.dropout, self.setting.tp)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """(B, t, H), (B, T) targets -> scaled loss, a scalar shared by a replica's tensor ranks."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        tp, worth = self.setting.tp, self.sample_weights
        counts = None if worth is None else worth.repeat_interleave(targets.shape[1])
        head = self.head or partial(head_loss, self.head_table)
        x, targets = tp.gather_input(x).flatten(0, 1), targets.flatten()
        settings = {"scale": self.scale, "tp": tp.axis, "compiled": self.compiled}
        return head(x, targets=targets, counts=counts, **settings)

    @property
    def head_table(self) -> Linear | VocabParallelEmbedding:
        """What holds the head's weight, on the last stage."""
        table = self.head or self.embedding
        assert table is not None, "the last stage has a head"
        return table

    def fill(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """As all networks; the weight of a zero-centered norm, to which 1 is added, is 0."""
        super().fill(name, whole, generator)
        if self.model.norm_zero_centered and name.endswith("norm.weight"):
            whole.zero_()

    def make_tables(self, device: torch.device) -> None:
        """Compute what belongs to this rank's positions; needed once before training."""
        load_kernels(device)
        positions = local_positions(self.setting.seq_len, self.setting.cp)
        if self.model.positions == "rope":
            place = device, self.setting.dtype
            self.rope = self.local_rope = rope_tables_on(*place, self.model, positions)
            if self.model.rope_local_theta is not None:
                self.local_rope = rope_tables_on(*place, self.model, positions, windowed=True)
        elif self.positions is not None:
            places = self.setting.tp.split_sequence(positions + self.model.position_offset)
            self.places = places.to(device)
