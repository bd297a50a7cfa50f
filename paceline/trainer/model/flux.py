"""Flux: a diffusion transformer over text and image tokens, trained by a rectified flow.

Shapes: B samples of T = text + image tokens, t of them on this rank, H width, N heads of D, r the
MLP's ratio. With tensor parallelism N is this rank's share, and TensorParallel exchanges;
with context parallelism a rank holds an equal part of the text and of the image.

Two departures from the published weights' order, so that one cut serves every layer: the rows of
`qkv` (q, k, v), of `linear1` (q, k, v, MLP) and the columns of `linear2` (attention, MLP) go head
by head, so that any run of heads is one piece of a matrix; and rotary pairs lie half a head apart.
Modulation is 27 % of all weights but runs once a sample, so tensor ranks cut its outputs and gather
a few vectors instead of holding all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.model.attention import rotate
from paceline.trainer.model.context_parallel import attend_all
from paceline.trainer.model.decoder import LayerSetting
from paceline.trainer.model.layers import ColumnParallelLinear, Linear, RowParallelLinear, gelu_tanh
from paceline.trainer.model.network import INIT_STD, Network, recomputed
from paceline.trainer.model_config import FluxConfig
from paceline.trainer.parallel.collectives import copy_to, gather_features
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.tensor import PER_HEAD, TensorParallel, TpPlan, local

EPS = 1e-6
TIME_WIDTH, TIME_SCALE, TIME_PERIOD = 256, 1000.0, 10_000.0
Rope = tuple[Tensor, Tensor]
Chunks = tuple[Tensor, ...]


class Modulation(ColumnParallelLinear):
    """Vectors that shift, scale and gate a stream, from the vector of time and pooled text."""

    def __init__(self, tp: TensorParallel, hidden: int, chunks: int) -> None:
        super().__init__(hidden, chunks * hidden, bias=True)
        self.tp, self.chunks = tp, chunks

    def forward(self, input: Tensor) -> Chunks:  # type: ignore[override]
        """(B, H) -> so many (B, 1, H)."""
        out = gather_features(super().forward(input), self.tp.axis)
        return out.unsqueeze(1).chunk(self.chunks, dim=-1)


class HeadNorm(nn.Module):
    """RMSNorm of every head, with one weight for all."""

    tp_plan: TpPlan = PER_HEAD

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, t, N, D) -> (B, t, N, D)."""
        weight = local(self.weight).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, EPS)


class Embedder(nn.Module):
    """Two layers that take a vector into the model's width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = Linear(width, hidden, bias=True)
        self.second = Linear(hidden, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, W) -> (B, H)."""
        return self.second(functional.silu(self.first(x)))


class Stream(nn.Module):
    """What a double block does to one of its two streams, before and after their attention."""

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
        """(B, t, H) -> (B, t, N, D) queries, keys and values."""
        x = self.tp.gather_input(modulated(x, *chunks[:2]))
        # (B, t, N, D)
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)
        return self.q_norm(q), self.k_norm(k), v

    def finish(self, x: Tensor, attention: Tensor, chunks: Chunks) -> Tensor:
        """(B, t, H) and (B, t, N, D) -> (B, t, H)."""
        gate, *shift_and_scale, ffn_gate = chunks[2:]
        x = torch.addcmul(x, gate, self.o(attention.flatten(2)))
        inner = self.up(self.tp.gather_input(modulated(x, *shift_and_scale)))  # (B, t, R H / tp)
        out = self.down(gelu_tanh(inner))
        return torch.addcmul(x, ffn_gate, out)


class DoubleBlock(nn.Module):
    """Text and image with weights of their own, and one attention over both."""

    def __init__(self, model: FluxConfig, setting: LayerSetting) -> None:
        super().__init__()
        self.setting = setting
        self.text, self.image = Stream(model, setting), Stream(model, setting)

    def forward(self, text: Tensor, image: Tensor, vec: Tensor, rope: Rope) -> Chunks:
        """(B, t, H) of both streams, (B, H) -> both streams."""
        if self.setting.recompute != "full":
            return self._layers(text, image, vec, rope)
        return recomputed(self._layers, text, image, vec, rope)

    def _layers(self, text: Tensor, image: Tensor, vec: Tensor, rope: Rope) -> Chunks:
        of_text, of_image = self.text.modulation(vec), self.image.modulation(vec)
        both = zip(self.text.heads(text, of_text), self.image.heads(image, of_image), strict=True)
        q, k, v = (torch.cat(pair, dim=1) for pair in both)  # (B, text + image, N, D)
        # (B, text + image, N, D)
        out = attend_all(rotate(q, *rope), rotate(k, *rope), v, self.setting.cp)
        text_out, image_out = out.split([text.shape[1], image.shape[1]], dim=1)
        return (
            self.text.finish(text, text_out, of_text),
            self.image.finish(image, image_out, of_image),
        )


class SingleBlock(nn.Module):
    """One stream, whose attention and MLP run side by side."""

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
        """(B, t, H) and (B, H) -> (B, t, H)."""
        if self.setting.recompute != "full":
            return self._layers(x, vec, rope)
        return recomputed(self._layers, x, vec, rope)

    def _layers(self, x: Tensor, vec: Tensor, rope: Rope) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        inner = self.linear1(self.setting.tp.gather_input(modulated(x, shift, scale)))
        # (B, t, N, D), ffn (B, t, N, R D)
        q, k, v, ffn = inner.unflatten(-1, (-1, sum(self.parts))).split(self.parts, dim=-1)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        out = attend_all(q, k, v, self.setting.cp)
        both = torch.cat([out, gelu_tanh(ffn)], dim=-1)  # (B, t, N, (1 + R) D)
        return torch.addcmul(x, gate, self.linear2(both.flatten(2)))


class MMDiT(Network):
    """The whole transformer; `blocks` holds the double ones, then the single ones."""

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
        # No buffers: DDP would send them around in every step, and a meta model has no memory.
        self.rope: Rope | None = None
        self.rates: Tensor | None = None

    def forward(
        self, noisy: Tensor, velocity: Tensor, time: Tensor, text: Tensor, pooled: Tensor
    ) -> Tensor:
        """`scale` x the summed squared error of the velocity.

        (B, image, C) noisy latents and their velocity, (B,) times in [0, 1], (B, text, E) encoded
        text and (B, P) of all of it.
        """
        error = self.velocity(noisy, time, text, pooled).to(self.wide) - velocity.to(self.wide)
        if self.sample_weights is None:
            return error.square().sum() * self.scale
        return error.square().flatten(1).sum(1).mul(self.sample_weights).sum() * self.scale

    @property
    def wide(self) -> torch.dtype:
        """What losses and times are computed in."""
        return torch.promote_types(self.setting.dtype, torch.float32)

    def velocity(self, noisy: Tensor, time: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """(B, image, C): from the data to the noise, as the model sees it."""
        assert self.rope is not None, "make_tables comes first"
        dtype = self.setting.dtype
        image, words = self.image_in(noisy.to(dtype)), self.text_in(text.to(dtype))  # (B, t, H)
        vec = self.time_in(self._waves(time)) + self.pooled_in(pooled.to(dtype))  # (B, H)
        # Every layer behind it is cut, so that all its gradients are shares of one sum.
        vec = copy_to(functional.silu(vec), self.setting.tp.axis)
        x: Tensor | None = None
        for block in self.blocks.values():
            if isinstance(block, DoubleBlock):
                words, image = block(words, image, vec, self.rope)
                continue
            x = torch.cat([words, image], dim=1) if x is None else x  # (B, text + image, H)
            x = block(x, vec, self.rope)
        assert x is not None, "there is at least one single block"
        x = modulated(x[:, words.shape[1] :], *self.modulation(vec))
        return self.out(x)

    def _waves(self, time: Tensor) -> Tensor:
        """(B,) -> (B, 256) cosines and sines of the time."""
        assert self.rates is not None, "make_tables comes first"
        angle = torch.outer(time.to(self.rates.dtype) * TIME_SCALE, self.rates)  # (B, 128)
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.setting.dtype)

    def make_tables(self, device: torch.device) -> None:
        """The angles of this rank's tokens, and the rates of the time's waves."""
        cos, sin = rope_tables(self.model, self.setting.cp)
        self.rope = cos.to(device, self.setting.dtype), sin.to(device, self.setting.dtype)
        half = TIME_WIDTH // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        self.rates = torch.exp(-math.log(TIME_PERIOD) * exponents).to(device, self.wide)

    def fill(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initial values of a whole parameter.

        Modulation and the last layer begin with 0, so that the blocks begin as identities;
        embedders with N(0, 0.02); other matrices uniform in +-sqrt(6 / (in + out)) (Glorot and
        Bengio).
        """
        *_, layer, kind = name.split(".")
        if layer in ("modulation", "out"):
            whole.zero_()
        elif kind == "bias" or layer in ("q_norm", "k_norm"):
            super().fill(name, whole, generator)
        elif layer in ("first", "second"):
            whole.normal_(0, INIT_STD, generator=generator)
        else:
            bound = math.sqrt(6 / sum(whole.shape))
            whole.uniform_(-bound, bound, generator=generator)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, scaled and shifted; (B, t, H) and two (B, 1, H)."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


def rope_tables(model: FluxConfig, cp: MeshAxis) -> tuple[Tensor, Tensor]:
    """cos and signed sin (t, 1, D) of this rank's tokens in fp64: text does not turn, patches do.

    A patch turns by its row and column in parts of the head of their own.
    """
    rows = torch.arange(model.patches, dtype=torch.float64)
    row, column = torch.meshgrid(rows, rows, indexing="ij")
    places = torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)  # (image, 3)
    text = torch.zeros(model.text_len, 3, dtype=torch.float64)
    coordinates = torch.cat([own_part(text, cp), own_part(places, cp)])  # (t, 3)
    angles = [
        torch.outer(
            coordinates[:, axis], model.rope_theta ** (-torch.arange(0, width, 2).double() / width)
        )
        for axis, width in enumerate(model.rope_axes)
    ]
    angle = torch.cat(angles, dim=-1)  # (t, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


def own_part(tokens: Tensor, cp: MeshAxis) -> Tensor:
    """This rank's equal part of (T, ...) tokens: without a mask, which one does not matter."""
    return tokens.chunk(cp.size)[cp.index]
