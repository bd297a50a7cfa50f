"""A decoder-only transformer, configurable as GPT-2/Megatron, OPT, BLOOM, Llama or Gemma.

Shapes: B sequences of T tokens, t of them in this rank's part of the residual stream, hidden size
H, N heads of width D, vocabulary V. The residual stream runs in the compute dtype. Parameters keep
their own dtype and are cast where they are used, so the same code trains fp32 master weights and
parameters that FSDP gathers in the compute dtype. All tensors are plain local tensors: with tensor
parallelism, N, V and the FFN width are this rank's share, and `TensorParallel` does the exchanges.
`gelu` is the exact function, `gelu_tanh` the approximation that GPT-2 was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from paceline.trainer.model.attention import Rope, apply_rotary, rope_tables
from paceline.trainer.model.context_parallel import attend, local_positions
from paceline.trainer.model.document_attention import restart_positions
from paceline.trainer.model.dropout import residual_dropout, with_rank_rng
from paceline.trainer.model.experts import AddLoss, MixtureOfExperts, keep_rows
from paceline.trainer.model.latent_attention import LatentAttention
from paceline.trainer.model.layer_setting import LayerSetting
from paceline.trainer.model.layers import (
    ColumnParallelLinear,
    Head,
    Linear,
    Norm,
    PositionEmbedding,
    QKNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    mlp_activation,
)
from paceline.trainer.model.loss import head_loss
from paceline.trainer.model.network import Network, activation_checkpoint
from paceline.trainer.model.windowed_attention import load_kernels
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.tensor import ParamPlan, TpPlan, local
from paceline.trainer.parallel.token_exchange import exchange_tokens


@dataclass(frozen=True)
class ModelPart:
    """Layers of a pipeline stage; the first stage has the embedding, the last one the head."""

    layers: range
    first: bool = True
    last: bool = True


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, a sliding window and sinks if set."""

    tp_plan: TpPlan = {"sinks": ParamPlan(shard_dim=0)}

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, window: int | None = None
    ) -> None:
        super().__init__()
        self.setting, self.head_dim, self.window = setting, model.head_dim, window
        self.query_scale = model.query_scale
        self.dropout = model.attention_dropout_p
        hidden, bias = model.hidden_size, model.bias
        heads_size, kv_size = model.num_heads * self.head_dim, model.kv_heads * self.head_dim
        qkv_bias = bias or model.qkv_bias
        self.q = ColumnParallelLinear(hidden, heads_size, qkv_bias, setting.adapter("q"))
        self.k = ColumnParallelLinear(hidden, kv_size, qkv_bias, setting.adapter("k"))
        self.v = ColumnParallelLinear(hidden, kv_size, qkv_bias, setting.adapter("v"))
        self.o = RowParallelLinear(setting.tp, heads_size, hidden, bias, setting.adapter("o"))
        self.q_norm = QKNorm(model) if model.qk_norm else None
        self.k_norm = QKNorm(model) if model.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(model.num_heads)) if model.attention_sinks else None

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """Map (B, t, H) to (B, t, H); `documents` as in `document_attention`."""
        x = self.setting.tp.gather_input(x)  # (B, T, H)
        q, k, v = (  # (B, T, N or K, D)
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rotary(q, *rope), apply_rotary(k, *rope)
        if self.query_scale != 1:
            q = q * self.query_scale
        selective = self.setting.recompute == "selective"
        sinks = None if self.sinks is None else local(self.sinks)  # (N,)
        inputs, preserve_rng = (q, k, v, documents, sinks), self.dropout > 0
        out = activation_checkpoint(  # (B, T, N, D)
            self._attend, *inputs, preserve_rng=preserve_rng, enabled=selective
        )
        return self.o(out.flatten(2))  # (B, t, H)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        setting, dropout = self.setting, self.dropout if self.training else 0.0
        options = {
            "dropout": dropout,
            "window": self.window,
            "documents": documents,
            "sinks": sinks,
        }
        compute = partial(attend, cp=setting.cp, exchange=setting.cp_exchange, **options)
        return with_rank_rng(setting.tp.axis, compute, q, k, v) if dropout else compute(q, k, v)


class FeedForward(nn.Module):
    """The MLP of a block, optionally gated (SwiGLU, GeGLU)."""

    def __init__(self, model: ModelConfig, setting: LayerSetting, width: int | None = None) -> None:
        super().__init__()
        self.tp = setting.tp
        self.activate = mlp_activation(model)
        hidden, ffn, bias = model.hidden_size, width or model.ffn_size, model.bias
        self.up = ColumnParallelLinear(hidden, ffn, bias, setting.adapter("up"))
        self.gate = (
            ColumnParallelLinear(hidden, ffn, bias, setting.adapter("gate"))
            if model.gated_ffn
            else None
        )
        self.down = RowParallelLinear(self.tp, ffn, hidden, bias, setting.adapter("down"))
        self.recompute = setting.recompute == "activation"
        self.uses_rng = self.down.lora is not None and self.down.lora.dropout > 0

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, t, H) to (B, t, H)."""
        x = self.tp.gather_input(x)  # (B, T, H)
        inner = [layer(x) for layer in (self.gate, self.up) if layer is not None]  # (B, T, F)
        return activation_checkpoint(
            self._activate, *inner, preserve_rng=self.uses_rng, enabled=self.recompute
        )

    def _activate(self, *inner: Tensor) -> Tensor:
        return self.down(self.activate(*inner))  # (B, t, H)


def expert_layer(model: ModelConfig, setting: LayerSetting) -> MixtureOfExperts:
    """Return the experts of a block, with a shared one where the model has it."""
    width = model.shared_ffn_size
    shared = FeedForward(model, setting, width) if width else None
    recompute = setting.recompute == "activation"
    dispatch = partial(exchange_tokens, axis=setting.ep) if setting.ep.size > 1 else keep_rows
    return MixtureOfExperts(
        model, setting.tp, shared, setting.routing, dispatch, recompute_activation=recompute
    )


class DecoderBlock(nn.Module):
    """Attention and MLP with their residual connections.

    `norm_position`: `pre` normalizes the inputs of attention and MLP, `post` the residual sums,
    and `both` the inputs and the outputs.
    """

    def __init__(
        self,
        model: ModelConfig,
        setting: LayerSetting,
        window: int | None = None,
        experts: bool = False,
    ) -> None:
        super().__init__()
        self.pre = model.norm_position != "post"
        self.recompute = setting.recompute
        self.dropout, self.tp = model.dropout, setting.tp
        lora_dropout = setting.lora.dropout if setting.lora else 0.0
        self.uses_rng = max(lora_dropout, model.dropout, model.attention_dropout_p) > 0
        self.attention_norm = Norm(model)
        attention = Attention if model.latent_attention is None else LatentAttention
        self.attention = attention(model, setting, window)
        self.ffn_norm = Norm(model)
        self.routes = experts
        self.ffn = (
            expert_layer(model, setting)
            if experts
            else FeedForward(model, setting, model.dense_ffn_size)
        )
        both = model.norm_position == "both"
        self.attention_post_norm = Norm(model) if both else None
        self.ffn_post_norm = Norm(model) if both else None

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """Map (B, t, H) to (B, t, H)."""
        # Checkpointing is inside the block, so that FSDP gathers its weights once, outside.
        return activation_checkpoint(
            self._layers,
            x,
            rope,
            documents,
            preserve_rng=self.uses_rng,
            routes=self.routes,
            enabled=self.recompute == "full",
        )

    def _layers(self, x: Tensor, rope: Rope, documents: Tensor | None) -> Tensor:
        if self.attention_post_norm is not None and self.ffn_post_norm is not None:
            out = self.attention(self.attention_norm(x), rope, documents)
            x = x + self._drop(self.attention_post_norm(out))
            return x + self._drop(self.ffn_post_norm(self._ffn(x)))
        if self.pre:
            x = x + self._drop(self.attention(self.attention_norm(x), rope, documents))
            return x + self._drop(self._ffn(x))
        x = self.attention_norm(x + self._drop(self.attention(x, rope, documents)))
        return self.ffn_norm(x + self._drop(self._ffn(x)))

    def _ffn(self, x: Tensor) -> Tensor:
        """Apply the MLP, with its norm first unless norms come after the sums."""

        def norm_and_ffn(x: Tensor) -> Tensor:
            return self.ffn(self.ffn_norm(x) if self.pre else x)

        return activation_checkpoint(
            norm_and_ffn,
            x,
            preserve_rng=self.uses_rng,
            routes=self.routes,
            enabled=self.recompute == "ffn",
        )

    def _drop(self, x: Tensor) -> Tensor:
        return residual_dropout(x, self.dropout, self.tp) if self.dropout and self.training else x


class MtpModule(nn.Module):
    """Multi-token prediction: predict the token after that of the model or of the module before.

    The inputs are the previous hidden states and the embeddings of the tokens that those predict;
    head and embedding are the model's (DeepSeek V3, arXiv:2412.19437, section 2.2).
    """

    def __init__(self, model: ModelConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = Norm(model), Norm(model)
        self.projection = Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        last = setting.for_layer(model.num_layers - 1)
        self.block = DecoderBlock(model, last, experts=model.num_experts > 1)
        self.final_norm = Norm(model)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, rope: Rope, documents: Tensor | None = None
    ) -> Tensor:
        """Map hidden states and embeddings, (B, T, H) each, to the head's inputs (B, T, H)."""
        inputs = torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], -1)
        return self.final_norm(self.block(self.projection(inputs), rope, documents))


class Decoder(Network):
    """A decoder or a pipeline stage of one; `blocks` is keyed by the global layer index.

    The first stage takes tokens, the others hidden states; the last one returns the scaled loss.
    """

    def __init__(
        self, model: ModelConfig, setting: LayerSetting, part: ModelPart | None = None
    ) -> None:
        super().__init__()
        self.model, self.setting = model, setting
        self.part = part = part or ModelPart(range(model.num_layers))
        hidden, embed = model.hidden_size, model.embed_dim
        needs_projection = embed != hidden
        holds_table = part.first or (part.last and self.shares_embedding)
        self.embedding = (
            VocabParallelEmbedding(setting.tp, setting.dtype, model.padded_vocab, embed)
            if holds_table
            else None
        )
        self.project_in = (
            Linear(embed, hidden, bias=False) if needs_projection and part.first else None
        )
        self.embedding_norm = Norm(model) if model.embedding_norm and part.first else None
        has_positions = model.positions == "learned" and part.first
        num_positions = model.max_positions + model.position_offset
        self.positions = PositionEmbedding(num_positions, hidden) if has_positions else None
        self.blocks = nn.ModuleDict(
            {
                str(i): DecoderBlock(
                    model, setting.for_layer(i), model.window(i), model.has_experts(i)
                )
                for i in part.layers
            }
        )
        depths = range(model.mtp_layers if part.last else 0)
        self.mtp = nn.ModuleDict({str(i): MtpModule(model, setting) for i in depths})
        self.mtp_loss: Tensor | None = None
        """Mean loss of the MTP modules since the last `take_mtp_loss`, scaled like the loss."""
        self.final_norm = Norm(model) if model.final_norm and part.last else None
        self.project_out = (
            Linear(hidden, embed, bias=False) if needs_projection and part.last else None
        )
        has_head = part.last and not model.tied_embeddings
        self.head = Head(embed, model.padded_vocab, bias=False) if has_head else None
        # Not buffers: DDP would broadcast them in every step, and a meta model has no memory.
        self.rope: Rope = None
        self.local_rope: Rope = None
        self.position_ids: Tensor | None = None

    @property
    def expert_layers(self) -> dict[int, MixtureOfExperts]:
        """This part's layers with experts by their index in the model."""
        layers = {int(i): block.ffn for i, block in self.blocks.items()}
        first = self.model.num_layers
        layers |= {first + int(i): layer.block.ffn for i, layer in self.mtp_modules.items()}
        return {i: ffn for i, ffn in layers.items() if isinstance(ffn, MixtureOfExperts)}

    def all_blocks(self) -> list[nn.Module]:
        """Return the blocks, then those of the MTP modules."""
        return [*self.blocks.values(), *(module.block for module in self.mtp_modules.values())]

    @property
    def mtp_modules(self) -> dict[str, MtpModule]:
        """This part's modules of multi-token prediction."""
        return cast(dict[str, MtpModule], dict(self.mtp.items()))

    @property
    def shares_embedding(self) -> bool:
        """True if the last stage has a copy of the embedding, for its head or for MTP modules."""
        return self.model.tied_embeddings or self.model.mtp_layers > 0

    @property
    def tied_copy(self) -> str | None:
        """Name of the tied parameter that another stage owns; None without one."""
        tied = self.shares_embedding and self.part.last and not self.part.first
        return "embedding.weight" if tied else None

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T) tokens or (B, t, H) to (B, t, H), or to `scale` x the summed loss.

        MTP modules need `ahead`, the tokens and targets of `data.batches.tokens_ahead`.
        """
        if self.part.first:
            x = self.embed(x, documents)
        for experts in self.expert_layers.values():
            experts.router.loss_scale = self.scale if self.training else 0.0
        for layer, block in self.blocks.items():
            has_window = self.model.window(int(layer)) is not None
            x = block(x, self.local_rope if has_window else self.rope, documents)
        if not self.part.last:
            return x
        assert targets is not None, "the last stage needs targets"
        if self.final_norm is not None:
            x = self.final_norm(x)
        loss = self.loss(x, targets)
        if self.mtp and self.training:
            assert ahead is not None, "MTP modules need the tokens behind the next"
            mtp_loss = self.compute_mtp_loss(x, ahead, documents)
            # Zero-bubble schedules detach the result in place, which a view does not allow.
            return cast(Tensor, AddLoss.apply(loss, mtp_loss)).clone()
        return loss

    def compute_mtp_loss(self, x: Tensor, ahead: Tensor, documents: Tensor | None) -> Tensor:
        """Return the weighted, scaled loss of the MTP modules for normed outputs (B, t, H).

        Each depth has as many terms less as it looks ahead, and the same divisor: equations 24
        and 25 of arXiv:2412.19437. The embeddings of (B, depth, 2, T) tokens `ahead` are computed
        again, because with tensor, context and pipeline parallelism another rank may have them.
        """
        weight = self.setting.mtp_loss_weight / len(self.mtp)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        plain_loss = torch.zeros_like(total)
        for layer, (tokens, targets) in zip(
            self.mtp.values(), (level.unbind(1) for level in ahead.unbind(1)), strict=True
        ):
            x = layer(x, self.embed(tokens, documents), self.rope, documents)
            loss = self.loss(x, targets, weight)
            total, plain_loss = total + loss, plain_loss + loss.detach()
        plain_loss = plain_loss / self.setting.mtp_loss_weight
        self.mtp_loss = plain_loss if self.mtp_loss is None else self.mtp_loss + plain_loss
        return total

    def take_mtp_loss(self) -> Tensor | None:
        """Return and reset the mean, scaled loss of the MTP modules; None without any."""
        loss, self.mtp_loss = self.mtp_loss, None
        return loss

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Embed (B, T) tokens; return (B, t, H)."""
        assert self.embedding is not None
        x = self.embedding(tokens)
        if self.model.scale_embedding:
            x = x * self.model.hidden_size**0.5
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            assert self.position_ids is not None, "make_tables comes first"
            ids = restart_positions(self.position_ids, documents, self.model.position_offset)
            x = x + self.positions(ids).to(x.dtype)
        if self.model.dropout and self.training:
            x = residual_dropout(x, self.model.dropout, self.setting.tp)
        return x

    def loss(self, x: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
        """Return the loss of normed (B, t, H) for (B, T) targets, equal on all tensor ranks.

        It is summed over the targets and multiplied by `scale` and `weight`.
        """
        if self.project_out is not None:
            x = self.project_out(x)
        tp, weights = self.setting.tp, self.sample_weights  # (B,)
        if weights is not None:
            weights = weights.repeat_interleave(targets.shape[1])  # (B T,)
        head = self.head or partial(head_loss, self.head_table)
        x, targets = tp.gather_input(x).flatten(0, 1), targets.flatten()  # (B T, H), (B T,)
        settings = {"scale": weight * self.scale, "tp": tp.axis, "compiled": self.compiled}
        return head(x, targets=targets, token_weights=weights, **settings)

    @property
    def head_table(self) -> Linear | VocabParallelEmbedding:
        """The layer that holds the head's weight; the last stage alone has one."""
        table = self.head or self.embedding
        assert table is not None, "the last stage has a head"
        return table

    def init_parameter(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initialize a whole parameter; the weight of a zero-centered norm is 0."""
        super().init_parameter(name, whole, generator)
        if self.model.norm_zero_centered and name.endswith("norm.weight"):
            whole.zero_()

    def make_tables(self, device: torch.device) -> None:
        """Compute the tables of this rank's positions; required once before training."""
        load_kernels(device)
        positions = local_positions(self.setting.seq_len, self.setting.cp)
        if self.model.positions == "rope":
            cos, sin = rope_tables(self.model, positions)
            self.rope = cos.to(device, self.setting.dtype), sin.to(device, self.setting.dtype)
            self.local_rope = self.rope
            if self.model.rope_local_theta is not None:
                cos, sin = rope_tables(self.model, positions, local_layers=True)
                self.local_rope = (
                    cos.to(device, self.setting.dtype),
                    sin.to(device, self.setting.dtype),
                )
        elif self.positions is not None:
            ids = self.setting.tp.split_sequence(positions + self.model.position_offset)
            self.position_ids = ids.to(device)
