"""Which tensor of a hub's folder each weight of a decoder is: one table, read both ways."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.trainer.config import is_adapter
from paceline.trainer.model_config import ModelConfig

Shape = tuple[int, ...]
View = Callable[[Tensor], Tensor]
OUTER_OF_LLAMA = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
INNER_OF_LLAMA = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
HEAD_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
OUTER = {
    "opt": {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": OUTER_OF_LLAMA,
    "qwen3": OUTER_OF_LLAMA,
    "mistral": OUTER_OF_LLAMA,
}
"""Layers outside of the blocks by model_type of config.json: name here, name there."""
BLOCKS = {
    "opt": "model.decoder.layers",
    "gpt2": "transformer.h",
    **dict.fromkeys(("llama", "qwen3", "mistral"), "model.layers"),
}
INNER = {
    "opt": {
        "attention_norm": "self_attn_layer_norm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "ffn.up": "fc1",
        "ffn.down": "fc2",
    },
    "gpt2": {
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.o": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    "llama": INNER_OF_LLAMA,
    "qwen3": {**INNER_OF_LLAMA, **HEAD_NORMS},
    "mistral": INNER_OF_LLAMA,
}
"""Layers of a block."""
ROOTS = ("", "model.", "transformer.")
"""Saved without its head, a model's names lack the first of these that they had."""
FUSED = {"attention.q": 0, "attention.k": 1, "attention.v": 2}
"""GPT-2 keeps the three in one layer, and all matrices of blocks as (in, out)."""
KINDS = ("weight", "bias")
VOCABULARY = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Piece:
    """A tensor of a folder, and the views of it and of a weight that are equal."""

    name: str
    shape: Shape
    """Of the whole tensor."""
    there: View
    here: View


@dataclass(frozen=True)
class HubWeight:
    """A weight of the trainer's by the tensors of a folder that hold it."""

    shape: Shape
    pieces: tuple[Piece, ...]

    def read(self, tensors: Callable[[str], Tensor]) -> Tensor:
        """The whole weight, a view where one tensor holds it; what no tensor holds is 0."""
        tensor = tensors(self.pieces[0].name)
        view = self.pieces[0].there(tensor)
        if view.shape == self.shape:
            return view
        whole = tensor.new_zeros(self.shape)
        for piece in self.pieces:
            piece.here(whole).copy_(piece.there(tensors(piece.name)))
        return whole

    def write(self, whole: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Fill the folder's tensors with their parts of a weight, cast to their dtype."""
        for piece in self.pieces:
            piece.there(tensors[piece.name]).copy_(piece.here(whole))


@dataclass(frozen=True)
class HubPlace:
    """Which tensor of the folder a decoder's weight is, and what is done with it."""

    name: str
    turned: bool = False
    third: int | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """The weight in the folder's tensor."""
        tensor = tensor.t() if self.turned else tensor
        return tensor if self.third is None else tensor.chunk(3)[self.third]

    def outer(self, shape: Shape) -> Shape:
        """The shape of the folder's tensor for a weight of this one."""
        shape = shape if self.third is None else (3 * shape[0], *shape[1:])
        return shape[::-1] if self.turned else shape

    def inner(self, shape: Shape) -> Shape:
        """The shape of the weight in a folder's tensor of this one."""
        shape = shape[::-1] if self.turned else shape
        return shape if self.third is None else (shape[0] // 3, *shape[1:])


def places(family: str, model: ModelConfig) -> dict[str, HubPlace]:
    """Which tensor each weight that a model of this family may have is, by its full name."""
    layers = {ours: HubPlace(theirs) for ours, theirs in OUTER[family].items()}
    for number in range(model.num_layers):
        for ours, theirs in INNER[family].items():
            turned = family == "gpt2" and not ours.endswith("norm")
            third = FUSED.get(ours) if family == "gpt2" else None
            name = f"{BLOCKS[family]}.{number}.{theirs}"
            layers[f"blocks.{number}.{ours}"] = HubPlace(name, turned, third)
    return {
        f"{ours}.{kind}": HubPlace(
            f"{place.name}.{kind}", place.turned and kind == "weight", place.third
        )
        for ours, place in layers.items()
        for kind in KINDS
    }


def stored_places(family: str, model: ModelConfig, stored: Container[str]) -> dict[str, HubPlace]:
    """Those of which a folder has the tensor, under the name that it has there."""
    chosen: dict[str, HubPlace] = {}
    for ours, place in places(family, model).items():
        names = [place.name.removeprefix(root) for root in ROOTS]
        for name in [name for name in names if name in stored][:1]:
            chosen[ours] = HubPlace(name, place.turned, place.third)
    return chosen


def read_weight(ours: str, place: HubPlace, shape: Shape, model: ModelConfig) -> HubWeight:
    """A weight by a folder's tensor of this shape; rows that pad the vocabulary are not there."""
    inner = place.inner(shape)
    rows = inner[0]
    if ours in VOCABULARY:
        inner = (max(rows, model.padded_vocab), *inner[1:])
    piece = Piece(place.name, shape, place.view, first(rows))
    return HubWeight(inner, (piece,))


def written_weights(
    family: str, model: ModelConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    """A model's weights of these shapes by the tensors of a folder of this family.

    Without rows that pad the vocabulary, and without adapters. Raises KeyError for a weight that
    the family does not have.
    """
    table = places(family, model)
    weights: dict[str, HubWeight] = {}
    for ours, shape in shapes.items():
        if is_adapter(ours):
            continue
        place, rows = table[ours], shape[0]
        rows = min(rows, model.vocab_size) if ours in VOCABULARY else rows
        outer = place.outer((rows, *shape[1:]))
        weights[ours] = HubWeight(shape, (Piece(place.name, outer, place.view, first(rows)),))
    return weights


def first(rows: int) -> View:
    """A view of the first rows."""
    return lambda whole: whole[:rows]


def plain(name: str, shape: Shape) -> HubWeight:
    """A weight that is the same there."""
    return HubWeight(shape, (Piece(name, shape, same, same),))


def same(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor
