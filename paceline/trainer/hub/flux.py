"""FLUX.1's tensors in the transformer folder of diffusers.

The values are equal and only their order differs. In this trainer the rows of a fused layer are
grouped by head, and the two rows of a rotary pair are half a head apart. In diffusers pairs are
adjacent, q, k, v and MLP are separate layers, and scale precedes shift in `norm_out`. Source of the
names: huggingface/diffusers, transformer_flux.py. N heads of size D, H width, R MLP ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.hub.names import KINDS, HubWeight, Shape, TensorSlice, View, identical_weight
from paceline.trainer.model_config import FluxConfig

CLASS = "FluxTransformer2DModel"
RATIO, THETA, DEFAULT_AXES = 4, 10_000.0, (16, 56, 56)
"""Constants of FLUX.1 in diffusers, and the axes meant by a config without them."""
TIME_WIDTH = 256
OUTER = {
    "image_in": "x_embedder",
    "text_in": "context_embedder",
    "time_in.first": "time_text_embed.timestep_embedder.linear_1",
    "time_in.second": "time_text_embed.timestep_embedder.linear_2",
    "pooled_in.first": "time_text_embed.text_embedder.linear_1",
    "pooled_in.second": "time_text_embed.text_embedder.linear_2",
    "modulation": "norm_out.linear",
    "out": "proj_out",
}
"""Layers outside the blocks: the trainer's name, the name in diffusers."""
STREAMS = {
    "image": {
        "modulation": "norm1.linear",
        "q": "attn.to_q",
        "k": "attn.to_k",
        "v": "attn.to_v",
        "q_norm": "attn.norm_q",
        "k_norm": "attn.norm_k",
        "o": "attn.to_out.0",
        "up": "ff.net.0.proj",
        "down": "ff.net.2",
    },
    "text": {
        "modulation": "norm1_context.linear",
        "q": "attn.add_q_proj",
        "k": "attn.add_k_proj",
        "v": "attn.add_v_proj",
        "q_norm": "attn.norm_added_q",
        "k_norm": "attn.norm_added_k",
        "o": "attn.to_add_out",
        "up": "ff_context.net.0.proj",
        "down": "ff_context.net.2",
    },
}
"""Layers of a double block by stream."""
SINGLE = {
    "modulation": "norm.linear",
    "q": "attn.to_q",
    "k": "attn.to_k",
    "v": "attn.to_v",
    "mlp": "proj_mlp",
    "q_norm": "attn.norm_q",
    "k_norm": "attn.norm_k",
    "linear2": "proj_out",
}
"""Layers of a single block."""


def stored_flux(model: FluxConfig, shapes: Mapping[str, Shape]) -> dict[str, HubWeight]:
    """Return the weights whose tensors are all present.

    Raises CorruptCheckpointError for a tensor of another shape.
    """
    weights = flux_weights(model)
    for weight in weights.values():
        for piece in weight.slices:
            shape = shapes.get(piece.name, piece.shape)
            if shape != piece.shape:
                raise CorruptCheckpointError(
                    f"its {piece.name} is {shape}, but the model needs {piece.shape}"[:200]
                )
    return {
        name: weight
        for name, weight in weights.items()
        if all(piece.name in shapes for piece in weight.slices)
    }


def flux_differences(config: Mapping[str, Any], model: FluxConfig) -> list[str]:
    """Return the differences that make a folder's model compute something else."""
    if config.get("_class_name") != CLASS:
        return [f"its _class_name is {config.get('_class_name')}; use {CLASS}'s folder"]
    problems: list[str] = []
    if config.get("guidance_embeds"):
        problems.append(
            "its guidance_embeds is true (FLUX.1-dev), but this model has no guidance layers; use "
            "FLUX.1-schnell"
        )
    axes = config.get("axes_dims_rope", DEFAULT_AXES)
    expected = {
        "num_layers": model.num_double_blocks,
        "num_single_layers": model.num_single_blocks,
        "attention_head_dim": model.head_dim,
        "num_attention_heads": model.num_heads,
        "patch_size": 1,
    }
    problems += [
        f"its {key} is {config[key]}, but the model's is {size}"
        for key, size in expected.items()
        if config.get(key, size) != size
    ]
    if not isinstance(axes, list | tuple) or [*axes] != [*model.rope_axes]:
        problems.append(f"its axes_dims_rope is {axes}, but model.rope_axes is {model.rope_axes}")
    if model.rope_theta != THETA:
        problems.append(f"its rotary base is {THETA}, but model.rope_theta is {model.rope_theta}")
    return problems


def flux_settings(model: FluxConfig) -> dict[str, Any]:
    """Return config.json of a diffusers folder; raises CorruptCheckpointError for another model."""
    if (model.mlp_ratio, model.rope_theta) != (RATIO, THETA):
        raise CorruptCheckpointError(
            f"FLUX.1 needs model.mlp_ratio {RATIO} and model.rope_theta {THETA:g}"
        )
    return {
        "_class_name": CLASS,
        "attention_head_dim": model.head_dim,
        "axes_dims_rope": [*model.rope_axes],
        "guidance_embeds": False,
        "in_channels": model.in_channels,
        "joint_attention_dim": model.text_width,
        "num_attention_heads": model.num_heads,
        "num_layers": model.num_double_blocks,
        "num_single_layers": model.num_single_blocks,
        "out_channels": None,
        "patch_size": 1,
        "pooled_projection_dim": model.pooled_width,
    }


def flux_weights(model: FluxConfig) -> dict[str, HubWeight]:
    """Return all weights by the tensors of diffusers' folder."""
    weights = dict(_outer_weights(model))
    for number in range(model.num_double_blocks):
        for stream, names in STREAMS.items():
            layers = _Layers(f"transformer_blocks.{number}.", names, model)
            weights.update(layers.of_stream(f"blocks.{number}.{stream}."))
    for number in range(model.num_single_blocks):
        layers = _Layers(f"single_transformer_blocks.{number}.", SINGLE, model)
        weights.update(layers.of_single(f"blocks.{model.num_double_blocks + number}."))
    return weights


def _outer_weights(model: FluxConfig) -> Iterator[tuple[str, HubWeight]]:
    width = model.hidden_size
    sizes = {
        "image_in": (width, model.in_channels),
        "text_in": (width, model.text_width),
        "time_in.first": (width, TIME_WIDTH),
        "time_in.second": (width, width),
        "pooled_in.first": (width, model.pooled_width),
        "pooled_in.second": (width, width),
        "modulation": (2 * width, width),
        "out": (model.in_channels, width),
    }
    for ours, theirs in OUTER.items():
        for kind in KINDS:
            shape = sizes[ours] if kind == "weight" else sizes[ours][:1]
            name = f"{theirs}.{kind}"
            halves = [TensorSlice(name, shape, half(1 - i), half(i)) for i in (0, 1)]
            swapped_halves = HubWeight(shape, tuple(halves))
            yield (
                f"{ours}.{kind}",
                swapped_halves if ours == "modulation" else identical_weight(name, shape),
            )


@dataclass(frozen=True)
class _Layers:
    """Layers of a block, or of one of its streams, by their names in diffusers."""

    prefix: str
    names: Mapping[str, str]
    model: FluxConfig

    def of_stream(self, ours: str) -> Iterator[tuple[str, HubWeight]]:
        width = self.model.hidden_size
        inner = self.model.mlp_ratio * width
        sizes = {
            "modulation": (6 * width, width),
            "o": (width, width),
            "up": (inner, width),
            "down": (width, inner),
        }
        yield from self._plain(ours, sizes)
        yield from self._fused(f"{ours}qkv", 0)
        yield from self._norms(ours)

    def of_single(self, ours: str) -> Iterator[tuple[str, HubWeight]]:
        width, ratio = self.model.hidden_size, self.model.mlp_ratio
        yield from self._plain(ours, {"modulation": (3 * width, width)})
        yield from self._fused(f"{ours}linear1", ratio)
        yield from self._norms(ours)
        heads, size = self.model.num_heads, self.model.head_dim
        name, shape = self._name("linear2", "weight"), (width, (1 + ratio) * width)
        parts = ((0, 1), (1, ratio))
        pieces = tuple(
            TensorSlice(
                name, shape, columns(at, times, heads, size), own_columns(at, times, size, ratio)
            )
            for at, times in parts
        )
        yield f"{ours}linear2.weight", HubWeight(shape, pieces)
        yield f"{ours}linear2.bias", identical_weight(self._name("linear2", "bias"), (width,))

    def _name(self, layer: str, kind: str) -> str:
        return f"{self.prefix}{self.names[layer]}.{kind}"

    def _plain(self, ours: str, sizes: Mapping[str, Shape]) -> Iterator[tuple[str, HubWeight]]:
        for layer, shape in sizes.items():
            yield f"{ours}{layer}.weight", identical_weight(self._name(layer, "weight"), shape)
            yield f"{ours}{layer}.bias", identical_weight(self._name(layer, "bias"), shape[:1])

    def _norms(self, ours: str) -> Iterator[tuple[str, HubWeight]]:
        shape = (self.model.head_dim,)
        for layer in ("q_norm", "k_norm"):
            piece = TensorSlice(self._name(layer, "weight"), shape, pairs, own_pairs)
            yield f"{ours}{layer}.weight", HubWeight(shape, (piece,))

    def _fused(self, ours: str, ratio: int) -> Iterator[tuple[str, HubWeight]]:
        """Yield q, k, v, and in a single block the MLP with `ratio` times as many rows."""
        heads, size, width = self.model.num_heads, self.model.head_dim, self.model.hidden_size
        starts = {"q": 0, "k": 1, "v": 2, **({"mlp": 3} if ratio else {})}
        for kind in KINDS:
            trailing = (width,) if kind == "weight" else ()
            pieces: list[TensorSlice] = []
            for part, at in starts.items():
                times, rotary = ratio if part == "mlp" else 1, part in ("q", "k")
                tensor_view = by_head(times, heads, size, rotary)
                weight_view = own_rows(at, times, heads, size, rotary)
                name = self._name(part, kind)
                pieces.append(
                    TensorSlice(name, (times * width, *trailing), tensor_view, weight_view)
                )
            yield f"{ours}.{kind}", HubWeight(((3 + ratio) * width, *trailing), tuple(pieces))


def half(number: int) -> View:
    """Return a view of one half of the rows."""
    return lambda tensor: tensor.chunk(2)[number]


def pairs(tensor: Tensor) -> Tensor:
    """Split adjacent pairs: (D, ...) -> (2, D / 2, ...), with the position in the pair first."""
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1)


def own_pairs(tensor: Tensor) -> Tensor:
    """Split pairs that are half a head apart: (D, ...) -> (2, D / 2, ...)."""
    return tensor.unflatten(0, (2, -1))


def by_head(times: int, heads: int, size: int, rotary: bool) -> View:
    """Return the view (times x ND, ...) -> (N, times x D, ...), in pairs of halves if `rotary`."""

    def view(tensor: Tensor) -> Tensor:
        rows = tensor.unflatten(0, (heads, times * size))
        return rows.unflatten(1, (-1, 2)).transpose(1, 2) if rotary else rows

    return view


def own_rows(at: int, times: int, heads: int, size: int, rotary: bool) -> View:
    """Return the view (NxD, ...) by head -> (N, times x D, ...), from row at x D of each head."""

    def view(tensor: Tensor) -> Tensor:
        rows = tensor.unflatten(0, (heads, -1))[:, at * size : (at + times) * size]
        return rows.unflatten(1, (2, -1)) if rotary else rows

    return view


def columns(at: int, times: int, heads: int, size: int) -> View:
    """Return the view (H, (1 + R) N D) -> (H, N, times x D), from column at x ND."""
    start, end = at * heads * size, (at + times) * heads * size
    return lambda tensor: tensor[:, start:end].unflatten(1, (heads, -1))


def own_columns(at: int, times: int, size: int, ratio: int) -> View:
    """Return the view (H, N (1 + R) D) by head -> (H, N, times x D), from column at x D of each."""
    step = (1 + ratio) * size
    return lambda tensor: tensor.unflatten(1, (-1, step))[:, :, at * size : (at + times) * size]
