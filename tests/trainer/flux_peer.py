"""diffusers' Flux next to ours: the same shape from a config, and its tensors in our order.

Ours keeps the rows of a fused layer head by head and a rotary pair half a head apart; diffusers
keeps q, k, v and MLP apart and pairs side by side. All of that is order: no value changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.core.mmdit import MMDiTShape
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.model_config import FluxConfig

SMALL = MMDiTShape(
    kind="mmdit",
    hidden_size=48,
    num_heads=3,
    num_double_blocks=2,
    num_single_blocks=2,
    latent_size=8,
    text_len=6,
    text_width=20,
    pooled_width=12,
    rope_axes=(4, 6, 6),
)
FULL = MMDiTShape(
    kind="mmdit",
    hidden_size=3072,
    num_heads=24,
    num_double_blocks=19,
    num_single_blocks=38,
    latent_size=32,
    text_len=256,
    text_width=4096,
    pooled_width=768,
)


def flux_config(shape: MMDiTShape) -> FluxConfig:
    """The trainer's form of a shape."""
    return FluxConfig(**shape.model_dump())


def peer_settings(shape: MMDiTShape) -> dict[str, Any]:
    """The arguments with which diffusers' FluxTransformer2DModel has this shape."""
    return {
        "in_channels": shape.in_channels,
        "num_layers": shape.num_double_blocks,
        "num_single_layers": shape.num_single_blocks,
        "attention_head_dim": shape.head_dim,
        "num_attention_heads": shape.num_heads,
        "joint_attention_dim": shape.text_width,
        "pooled_projection_dim": shape.pooled_width,
        "axes_dims_rope": shape.rope_axes,
    }


def places(shape: MMDiTShape) -> tuple[Tensor, Tensor]:
    """diffusers' image and text ids: (image, 3) with rows and columns, (text, 3) zeros."""
    side = shape.latent_size // shape.patch_size
    ids = torch.zeros(side, side, 3)
    ids[..., 1] += torch.arange(side)[:, None]
    ids[..., 2] += torch.arange(side)[None, :]
    return ids.flatten(0, 1), torch.zeros(shape.text_len, 3)


def peer_velocity(
    peer: Any, shape: MMDiTShape, noisy: Tensor, time: Tensor, text: Tensor, pooled: Tensor
) -> Tensor:
    """What diffusers' model makes of our inputs."""
    image_ids, text_ids = places(shape)
    return peer(
        hidden_states=noisy,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=time,
        img_ids=image_ids,
        txt_ids=text_ids,
        return_dict=False,
    )[0]


def in_our_order(theirs: dict[str, Tensor], shape: MMDiTShape) -> dict[str, Tensor]:
    """diffusers' weights or gradients, renamed and reordered as ours are."""
    found = dict(_ends(theirs))
    for i in range(shape.num_double_blocks):
        found |= _double(theirs, f"transformer_blocks.{i}.", f"blocks.{i}.", shape)
    for i in range(shape.num_single_blocks):
        here = f"blocks.{shape.num_double_blocks + i}."
        found |= _single(theirs, f"single_transformer_blocks.{i}.", here, shape)
    return found


def copy_weights(peer: Any, ours: MMDiT, shape: MMDiTShape) -> None:
    """Give our model the peer's weights."""
    ours.load_state_dict(in_our_order(dict(peer.state_dict()), shape))


def _ends(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    names = {
        "x_embedder": "image_in",
        "context_embedder": "text_in",
        "proj_out": "out",
        "time_text_embed.timestep_embedder.linear_1": "time_in.first",
        "time_text_embed.timestep_embedder.linear_2": "time_in.second",
        "time_text_embed.text_embedder.linear_1": "pooled_in.first",
        "time_text_embed.text_embedder.linear_2": "pooled_in.second",
    }
    for kind in ("weight", "bias"):
        for old, new in names.items():
            yield f"{new}.{kind}", theirs[f"{old}.{kind}"]
        scale, shift = theirs[f"norm_out.linear.{kind}"].chunk(2)
        yield f"modulation.{kind}", torch.cat([shift, scale])


def _double(theirs: dict[str, Tensor], old: str, new: str, shape: MMDiTShape) -> dict[str, Tensor]:
    streams = {
        "image.": (
            "norm1",
            "attn.to_q attn.to_k attn.to_v",
            "attn.norm_q attn.norm_k",
            "attn.to_out.0",
            "ff",
        ),
        "text.": (
            "norm1_context",
            "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
            "attn.norm_added_q attn.norm_added_k",
            "attn.to_add_out",
            "ff_context",
        ),
    }
    found: dict[str, Tensor] = {}
    for stream, (modulation, qkv, norms, out, ffn) in streams.items():
        plain = {
            "modulation": f"{modulation}.linear",
            "o": out,
            "up": f"{ffn}.net.0.proj",
            "down": f"{ffn}.net.2",
        }
        for kind in ("weight", "bias"):
            parts = [theirs[f"{old}{name}.{kind}"] for name in qkv.split()]
            found[f"{new}{stream}qkv.{kind}"] = _by_head(parts, shape)
            for ours, name in plain.items():
                found[f"{new}{stream}{ours}.{kind}"] = theirs[f"{old}{name}.{kind}"]
        for ours, name in zip(("q_norm", "k_norm"), norms.split(), strict=True):
            found[f"{new}{stream}{ours}.weight"] = _halves(theirs[f"{old}{name}.weight"])
    return found


def _single(theirs: dict[str, Tensor], old: str, new: str, shape: MMDiTShape) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        parts = [theirs[f"{old}{name}.{kind}"] for name in names]
        found[f"{new}linear1.{kind}"] = _by_head(parts, shape)
        found[f"{new}modulation.{kind}"] = theirs[f"{old}norm.linear.{kind}"]
    sizes = [shape.hidden_size, shape.ffn_size]
    attention, ffn = theirs[f"{old}proj_out.weight"].split(sizes, dim=1)
    columns = [part.unflatten(1, (shape.num_heads, -1)) for part in (attention, ffn)]
    found[f"{new}linear2.weight"] = torch.cat(columns, dim=2).flatten(1)
    found[f"{new}linear2.bias"] = theirs[f"{old}proj_out.bias"]
    for ours, name in {"q_norm": "attn.norm_q", "k_norm": "attn.norm_k"}.items():
        found[f"{new}{ours}.weight"] = _halves(theirs[f"{old}{name}.weight"])
    return found


def _by_head(parts: list[Tensor], shape: MMDiTShape) -> Tensor:
    """q, k and what follows them, each with all heads -> all of one head after the other."""
    q, k, *rest = (part.unflatten(0, (shape.num_heads, -1)) for part in parts)
    return torch.cat([_halves(q, 1), _halves(k, 1), *rest], dim=1).flatten(0, 1)


def _halves(x: Tensor, dim: int = 0) -> Tensor:
    """Rotary pairs side by side -> half a head apart."""
    even = torch.arange(0, x.shape[dim], 2)
    return x.index_select(dim, torch.cat([even, even + 1]))
