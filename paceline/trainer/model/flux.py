"""Flux: a diffusion transformer over text and image tokens, trained as a rectified flow.

Shapes: B samples of T = text + image tokens, t of them on this rank, hidden size H, N heads of
width D, MLP ratio R. With tensor parallelism N is this rank's share. With context parallelism a
rank holds an equal part of the text and of the image.

The order of the weights differs from the published ones in two ways, so that one kind of shard
serves every layer. The rows of `qkv` (q, k, v), of `linear1` (q, k, v, MLP) and the columns of
`linear2` (attention, MLP) are sorted by head, so that consecutive heads are one slice of a matrix.
Rotary pairs lie half a head apart. Modulation has 27% of all weights but runs once per sample, so
tensor ranks shard its outputs and gather a few vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.model.attention import apply_rotary
from paceline.trainer.model.context_parallel import full_attention_over_ranks
from paceline.trainer.model.layer_setting import LayerSetting
from paceline.trainer.model.layers import ColumnParallelLinear, Linear, RowParallelLinear, gelu_tanh
from paceline.trainer.model.network import INIT_STD, Network, activation_checkpoint
from paceline.trainer.model_config import FluxConfig
from paceline.trainer.parallel.collectives import copy_to, gather_features
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.tensor import PER_HEAD, TensorParallel, TpPlan, local

EPS = 1e-6
TIME_WIDTH, TIME_SCALE, TIME_PERIOD = 256, 1000.0, 10_000.0
Rope = tuple[Tensor, Tensor]
Chunks = tuple[Tensor, ...]


class Modulation(ColumnParallelLinear):
    """Shift, scale and gate vectors of a stream, from the vector of time and pooled text."""

    def __init__(self, tp: TensorParallel, hidden: int, chunks: int) -> None:
        super().__init__(hidden, chunks * hidden, bias=True)
        self.tp, self.chunks = tp, chunks

    def forward(self, input: Tensor) -> Chunks:  # type: ignore[override]
        """Map (B, H) to `chunks` tensors of (B, 1, H)."""
        out = gather_features(super().forward(input), self.tp.axis)
        return out.unsqueeze(1).chunk(self.chunks, dim=-1)


class HeadNorm(nn.Module):
    """RMSNorm of each head, with one weight for all heads."""

    tp_plan: TpPlan = PER_HEAD

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, t, N, D)."""
        weight = local(self.weight).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, EPS)


class Embedder(nn.Module):
    """A two-layer MLP that embeds a vector in the hidden size."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = Linear(width, hidden, bias=True)
        self.second = Linear(hidden, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, W) to (B, H)."""
        return self.second(functional.silu(self.first(x)))


class Stream(nn.Module):
    """The layers of a double block for one of its two streams."""

    def __init__(self, model: FluxConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.tp, self.head_dim = setting.tp, model.head_dim
        hidden, ffn = model.hidden_size, model.mlp_ratio * model.hidden_size
        self.modulation = Modulation(self.tp, hidden, 6)
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, bias=True)
        self.q_norm, self.k_norm = HeadNorm(self.head_dim), HeadNorm(self.head_dim)
        self.o = RowParallelLinear(self.tp, hidden, hidden, bias=True)
        self.up = ColumnParallelLinear(hidden, ffn, bias=True)
        self.down = RowParallelLinear(self.tp, ffn, hidden, bias=True)

    def heads(self, x: Tensor, chunks: Chunks) -> Chunks:
        """Map (B, t, H) to (B, t, N, D) queries, keys and values."""
        x = self.tp.gather_input(modulate(x, *chunks[:2]))
        # (B, t, N, D)
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)
        return self.q_norm(q), self.k_norm(k), v

    def finish(self, x: Tensor, attention: Tensor, chunks: Chunks) -> Tensor:
        """Add attention's output (B, t, N, D) and the MLP to the stream (B, t, H)."""
        gate, *shift_and_scale, ffn_gate = chunks[2:]
        x = torch.addcmul(x, gate, self.o(attention.flatten(2)))
        inner = self.up(self.tp.gather_input(modulate(x, *shift_and_scale)))  # (B, t, R H / tp)
        out = self.down(gelu_tanh(inner))
        return torch.addcmul(x, ffn_gate, out)


class DoubleBlock(nn.Module):
    """A block with separate weights for text and image, and joint attention over both."""

    def __init__(self, model: FluxConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.setting = setting
        self.text, self.image = Stream(model, setting), Stream(model, setting)

    def forward(self, text: Tensor, image: Tensor, vec: Tensor, rope: Rope) -> Chunks:
        """Map both streams (B, t, H) and the modulation input (B, H) to both streams."""
        full = self.setting.recompute == "full"
        return activation_checkpoint(self._layers, text, image, vec, rope, enabled=full)

    def _layers(self, text: Tensor, image: Tensor, vec: Tensor, rope: Rope) -> Chunks:
        text_mod, image_mod = self.text.modulation(vec), self.image.modulation(vec)
        both = zip(self.text.heads(text, text_mod), self.image.heads(image, image_mod), strict=True)
        q, k, v = (torch.cat(pair, dim=1) for pair in both)  # (B, text + image, N, D)
        # (B, text + image, N, D)
        out = full_attention_over_ranks(
            apply_rotary(q, *rope), apply_rotary(k, *rope), v, self.setting.cp
        )
        text_out, image_out = out.split([text.shape[1], image.shape[1]], dim=1)
        return (
            self.text.finish(text, text_out, text_mod),
            self.image.finish(image, image_out, image_mod),
        )


class SingleBlock(nn.Module):
    """A block over one joint stream, whose attention and MLP run in parallel."""

    def __init__(self, model: FluxConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.setting, self.head_dim = setting, model.head_dim
        hidden, ffn = model.hidden_size, model.mlp_ratio * model.hidden_size
        self.parts = [*[model.head_dim] * 3, model.mlp_ratio * model.head_dim]
        self.modulation = Modulation(setting.tp, hidden, 3)
        self.linear1 = ColumnParallelLinear(hidden, 3 * hidden + ffn, bias=True)
        self.q_norm, self.k_norm = HeadNorm(self.head_dim), HeadNorm(self.head_dim)
        self.linear2 = RowParallelLinear(setting.tp, hidden + ffn, hidden, bias=True)

    def forward(self, x: Tensor, vec: Tensor, rope: Rope) -> Tensor:
        """Map (B, t, H) and the modulation input (B, H) to (B, t, H)."""
        full = self.setting.recompute == "full"
        return activation_checkpoint(self._layers, x, vec, rope, enabled=full)

    def _layers(self, x: Tensor, vec: Tensor, rope: Rope) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        inner = self.linear1(self.setting.tp.gather_input(modulate(x, shift, scale)))
        # (B, t, N, D), ffn (B, t, N, R D)
        q, k, v, ffn = inner.unflatten(-1, (-1, sum(self.parts))).split(self.parts, dim=-1)
        q, k = apply_rotary(self.q_norm(q), *rope), apply_rotary(self.k_norm(k), *rope)
        out = full_attention_over_ranks(q, k, v, self.setting.cp)
        both = torch.cat([out, gelu_tanh(ffn)], dim=-1)  # (B, t, N, (1 + R) D)
        return torch.addcmul(x, gate, self.linear2(both.flatten(2)))


class MMDiT(Network):
    """The multimodal diffusion transformer; `blocks` has the double, then the single blocks."""

    def __init__(self, model: FluxConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.model, self.setting = model, setting
        hidden = model.hidden_size
        self.image_in = Linear(model.in_channels, hidden, bias=True)
        self.text_in = Linear(model.text_width, hidden, bias=True)
        self.time_in = Embedder(TIME_WIDTH, hidden)
        self.pooled_in = Embedder(model.pooled_width, hidden)
        kinds = [DoubleBlock] * model.num_double_blocks + [SingleBlock] * model.num_single_blocks
        self.blocks = nn.ModuleDict({str(i): kind(model, setting) for i, kind in enumerate(kinds)})
        self.modulation = Modulation(setting.tp, hidden, 2)
        self.out = Linear(hidden, model.in_channels, bias=True)
        # Not buffers: DDP would broadcast them in every step, and a meta model has no memory.
        self.rope: Rope | None = None
        self.frequencies: Tensor | None = None

    def forward(
        self, noisy: Tensor, velocity: Tensor, time: Tensor, text: Tensor, pooled: Tensor
    ) -> Tensor:
        """Return `scale` x the summed squared error of the predicted velocity.

        Inputs: (B, image, C) noisy latents and their velocity, (B,) times in [0, 1], (B, text, E)
        encoded text and its (B, P) pooled encoding.
        """
        error = self.velocity(noisy, time, text, pooled).to(self.acc_dtype) - velocity.to(
            self.acc_dtype
        )
        if self.sample_weights is None:
            return error.square().sum() * self.scale
        return error.square().flatten(1).sum(1).mul(self.sample_weights).sum() * self.scale

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of losses and times."""
        return torch.promote_types(self.setting.dtype, torch.float32)

    def velocity(self, noisy: Tensor, time: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """Return the predicted velocity (B, image, C), which points from the data to the noise."""
        assert self.rope is not None, "make_tables comes first"
        dtype = self.setting.dtype
        image, words = self.image_in(noisy.to(dtype)), self.text_in(text.to(dtype))  # (B, t, H)
        vec = self.time_in(self._time_features(time)) + self.pooled_in(pooled.to(dtype))  # (B, H)
        # Every layer that reads it is sharded, so each rank's gradient is one term of a sum.
        vec = copy_to(functional.silu(vec), self.setting.tp.axis)
        x: Tensor | None = None
        for block in self.blocks.values():
            if isinstance(block, DoubleBlock):
                words, image = block(words, image, vec, self.rope)
                continue
            x = torch.cat([words, image], dim=1) if x is None else x  # (B, text + image, H)
            x = block(x, vec, self.rope)
        assert x is not None, "there is at least one single block"
        x = modulate(x[:, words.shape[1] :], *self.modulation(vec))
        return self.out(x)

    def _time_features(self, time: Tensor) -> Tensor:
        """Return (B, 256) cosines and sines of (B,) times."""
        assert self.frequencies is not None, "make_tables comes first"
        angle = torch.outer(
            time.to(self.frequencies.dtype) * TIME_SCALE, self.frequencies
        )  # (B, 128)
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.setting.dtype)

    def make_tables(self, device: torch.device) -> None:
        """Compute the rotary tables of this rank's tokens and the frequencies of the time."""
        cos, sin = rope_tables(self.model, self.setting.cp)
        self.rope = cos.to(device, self.setting.dtype), sin.to(device, self.setting.dtype)
        half = TIME_WIDTH // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        self.frequencies = torch.exp(-math.log(TIME_PERIOD) * exponents).to(device, self.acc_dtype)

    def init_parameter(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initialize a whole parameter.

        Modulation and the last layer are 0, so that every block starts as the identity. Embedders
        are N(0, 0.02^2), other matrices uniform in +-sqrt(6 / (in + out)) (Glorot and Bengio).
        """
        *_, layer, kind = name.split(".")
        if layer in ("modulation", "out"):
            whole.zero_()
        elif kind == "bias" or layer in ("q_norm", "k_norm"):
            super().init_parameter(name, whole, generator)
        elif layer in ("first", "second"):
            whole.normal_(0, INIT_STD, generator=generator)
        else:
            bound = math.sqrt(6 / sum(whole.shape))
            whole.uniform_(-bound, bound, generator=generator)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return LayerNorm(x) (1 + scale) + shift for x (B, t, H), shift and scale (B, 1, H)."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


def rope_tables(model: FluxConfig, cp: MeshAxis) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin (t, 1, D) of this rank's tokens in fp64.

    Text tokens are at the origin. An image patch has its row and its column as coordinates, each of
    which rotates its own part of the head.
    """
    rows = torch.arange(model.patches, dtype=torch.float64)
    row, column = torch.meshgrid(rows, rows, indexing="ij")
    image = torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)  # (image, 3)
    text = torch.zeros(model.text_len, 3, dtype=torch.float64)
    coordinates = torch.cat([local_tokens(text, cp), local_tokens(image, cp)])  # (t, 3)
    angles = [
        torch.outer(
            coordinates[:, axis], model.rope_theta ** (-torch.arange(0, width, 2).double() / width)
        )
        for axis, width in enumerate(model.rope_axes)
    ]
    angle = torch.cat(angles, dim=-1)  # (t, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def local_tokens(tokens: Tensor, cp: MeshAxis) -> Tensor:
    """Return this rank's equal part of (T, ...) tokens; any part will do without a mask."""
    return tokens.chunk(cp.size)[cp.index]
