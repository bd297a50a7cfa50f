"""Mapping between a decoder's weights and the tensors of a Hugging Face folder."""

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
BLOCK_OF_MIXTRAL = {
    **{ours: theirs for ours, theirs in INNER_OF_LLAMA.items() if not ours.startswith("ffn.")},
    "ffn.router": "block_sparse_moe.gate",
}
BLOCK_OF_QWEN3_MOE = {**BLOCK_OF_MIXTRAL, "ffn.router": "mlp.gate"}
BLOCK_OF_DEEPSEEK_V3 = {
    **INNER_OF_LLAMA,
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
"""Layers of both kinds of blocks, dense ones and those with experts."""
BLOCK_OF_GPT_OSS = {**BLOCK_OF_MIXTRAL, "ffn.router": "mlp.router"}
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
    "mixtral": OUTER_OF_LLAMA,
    "qwen3_moe": OUTER_OF_LLAMA,
    "deepseek_v3": OUTER_OF_LLAMA,
    "gpt_oss": OUTER_OF_LLAMA,
}
"""Layers outside the blocks by model_type of config.json: the trainer's name, the folder's name."""
BLOCKS = {
    "opt": "model.decoder.layers",
    "gpt2": "transformer.h",
    **dict.fromkeys(
        ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
        "model.layers",
    ),
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
    "mixtral": BLOCK_OF_MIXTRAL,
    "qwen3_moe": {**BLOCK_OF_QWEN3_MOE, **HEAD_NORMS},
    "deepseek_v3": BLOCK_OF_DEEPSEEK_V3,
    "gpt_oss": BLOCK_OF_GPT_OSS,
}
"""Layers of a block."""
EXPERTS = {
    "mixtral": {
        "gate": "block_sparse_moe.experts.{}.w1.weight",
        "up": "block_sparse_moe.experts.{}.w3.weight",
        "down": "block_sparse_moe.experts.{}.w2.weight",
    },
    **{
        family: {name: f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")}
        for family in ("qwen3_moe", "deepseek_v3")
    },
}
"""Tensor of one expert in a block, by the trainer's stacked weight."""
EVERY, GATES, UPS = slice(None), slice(0, None, 2), slice(1, None, 2)
FUSED_EXPERTS = {
    "gpt_oss": {
        "gate": ("mlp.experts.gate_up_proj", GATES),
        "gate_bias": ("mlp.experts.gate_up_proj_bias", GATES),
        "up": ("mlp.experts.gate_up_proj", UPS),
        "up_bias": ("mlp.experts.gate_up_proj_bias", UPS),
        "down": ("mlp.experts.down_proj", EVERY),
        "down_bias": ("mlp.experts.down_proj_bias", EVERY),
    }
}
"""Tensor of all experts in a block, (E, in, out) or of biases (E, out), and its columns that are a
stacked weight, by the weight."""
PLAIN_PARAMETERS = {"gpt_oss": {"attention.sinks": "self_attn.sinks"}}
"""Parameters of a block that are neither a weight nor a bias of a layer."""
ROOTS = ("", "model.", "transformer.")
"""Prefixes that are missing in models saved without a head."""
FUSED = {"attention.q": 0, "attention.k": 1, "attention.v": 2}
"""GPT-2 stores the three in one layer, and the matrices of blocks as (in, out)."""
KINDS = ("weight", "bias")
CHOICE_BIAS = ("ffn.router.choice_bias", "mlp.gate.e_score_correction_bias")
"""A block's bias for choosing experts: the trainer's name, the folder's name."""
VOCABULARY = ("embedding.weight", "head.weight")
MTP = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
"""Layers of a module for multi-token prediction outside its block. Folders have the modules as
further blocks (DeepSeek-V3, README_WEIGHTS.md)."""
COPIES_OF_MTP = {
    "embedding.weight": "embed_tokens.weight",
    "head.weight": "shared_head.head.weight",
}
"""Tensors of such a block that repeat a weight of the model."""


@dataclass(frozen=True)
class TensorSlice:
    """A view of a folder's tensor that equals a view of the trainer's weight."""

    name: str
    shape: Shape
    """Shape of the whole tensor in the folder."""
    tensor_view: View
    weight_view: View


@dataclass(frozen=True)
class HubWeight:
    """A weight of the trainer and the tensors of a folder that hold it."""

    shape: Shape
    slices: tuple[TensorSlice, ...]

    def read(self, tensors: Callable[[str], Tensor]) -> Tensor:
        """Return the whole weight, as a view if one tensor holds it; missing rows are 0."""
        tensor = tensors(self.slices[0].name)
        view = self.slices[0].tensor_view(tensor)
        if view.shape == self.shape:
            return view
        whole = tensor.new_zeros(self.shape)
        for part in self.slices:
            part.weight_view(whole).copy_(part.tensor_view(tensors(part.name)))
        return whole

    def write(self, whole: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weight to the folder's tensors, cast to their dtype."""
        for part in self.slices:
            part.tensor_view(tensors[part.name]).copy_(part.weight_view(whole))


@dataclass(frozen=True)
class HubLocation:
    """The folder's tensor of a decoder's weight, optionally transposed or one third of it."""

    name: str
    transposed: bool = False
    third: int | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """Return the view of the weight in the folder's tensor."""
        tensor = tensor.t() if self.transposed else tensor
        return tensor if self.third is None else tensor.chunk(3)[self.third]

    def outer(self, shape: Shape) -> Shape:
        """Return the shape of the folder's tensor for a weight of this shape."""
        shape = shape if self.third is None else (3 * shape[0], *shape[1:])
        return shape[::-1] if self.transposed else shape

    def inner(self, shape: Shape) -> Shape:
        """Return the shape of the weight in a folder's tensor of this shape."""
        shape = shape[::-1] if self.transposed else shape
        return shape if self.third is None else (shape[0] // 3, *shape[1:])


def hub_locations(family: str, model: ModelConfig) -> dict[str, HubLocation]:
    """Return the folder's tensor of each weight of a model family, by the weight's full name."""
    layers = {ours: HubLocation(theirs) for ours, theirs in OUTER[family].items()}
    blocks, modules = block_names(family, model), mtp_names(family, model)
    for our_block, their_block in blocks.items():
        for ours, theirs in INNER[family].items():
            is_transposed = family == "gpt2" and not ours.endswith("norm")
            third = FUSED.get(ours) if family == "gpt2" else None
            name = f"{their_block}.{theirs}"
            layers[f"{our_block}.{ours}"] = HubLocation(name, is_transposed, third)
    for module, their_block in modules.items():
        for ours, theirs in MTP.items():
            layers[f"{module}.{ours}"] = HubLocation(f"{their_block}.{theirs}")
    parameters = {
        **PLAIN_PARAMETERS.get(family, {}),
        **(dict([CHOICE_BIAS]) if model.router_choice_bias else {}),
    }
    return {
        f"{ours}.{kind}": HubLocation(
            f"{location.name}.{kind}", location.transposed and kind == "weight", location.third
        )
        for ours, location in layers.items()
        for kind in KINDS
    } | {
        f"{our_block}.{ours}": HubLocation(f"{their_block}.{theirs}")
        for our_block, their_block in blocks.items()
        for ours, theirs in parameters.items()
    }


def block_names(family: str, model: ModelConfig) -> dict[str, str]:
    """Return the folder's name of each block, also of those in modules of `mtp_names`."""
    blocks = {
        f"blocks.{number}": f"{BLOCKS[family]}.{number}" for number in range(model.num_layers)
    }
    return blocks | {f"{ours}.block": theirs for ours, theirs in mtp_names(family, model).items()}


def mtp_names(family: str, model: ModelConfig) -> dict[str, str]:
    """Return the folder's name of each module for multi-token prediction."""
    return {
        f"mtp.{index}": f"{BLOCKS[family]}.{model.num_layers + index}"
        for index in range(model.mtp_layers)
    }


def mtp_copies(family: str, model: ModelConfig, ours: str) -> list[str]:
    """Return the folder's tensors that repeat a weight for multi-token prediction."""
    names = mtp_names(family, model).values() if ours in COPIES_OF_MTP else ()
    return [f"{theirs}.{COPIES_OF_MTP[ours]}" for theirs in names]


def stacked_weights(family: str, model: ModelConfig) -> dict[str, HubWeight]:
    """Return the stacked weights (E, ...) of experts by their tensors in a folder."""
    ffn, hidden = model.ffn_size, model.hidden_size
    shapes: dict[str, Shape] = {
        **{"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)},
        **{"gate_bias": (ffn,), "up_bias": (ffn,), "down_bias": (hidden,)},
    }
    weights: dict[str, HubWeight] = {}
    dense = {f"blocks.{i}" for i in range(model.num_layers) if not model.has_experts(i)}
    blocks = block_names(family, model) if model.num_experts > 1 else {}
    for our_block, block in blocks.items():
        if our_block in dense:
            continue
        ours = f"{our_block}.ffn.experts"
        for matrix, pattern in EXPERTS.get(family, {}).items():
            weights[f"{ours}.{matrix}"] = HubWeight(
                (model.num_experts, *shapes[matrix]),
                tuple(
                    TensorSlice(
                        f"{block}.{pattern.format(expert)}",
                        shapes[matrix],
                        identity,
                        one_expert(expert),
                    )
                    for expert in range(model.num_experts)
                ),
            )
        for matrix, (name, columns) in FUSED_EXPERTS.get(family, {}).items():
            shape = model.num_experts, *shapes[matrix]
            outer = (*shape[:1], *shape[:0:-1])  # (E, in, out)
            outer = (*outer[:-1], outer[-1] * (columns.step or 1))
            view = columns_of_experts(columns)
            slices = (TensorSlice(f"{block}.{name}", outer, view, identity),)
            weights[f"{ours}.{matrix}"] = HubWeight(shape, slices)
    return weights


def columns_of_experts(columns: slice) -> View:
    """Return a view of columns of (E, in, out) as (E, out, in), or of (E, out) biases."""
    return lambda whole: (
        whole[..., columns].transpose(1, 2) if whole.ndim == 3 else whole[..., columns]
    )


def one_expert(expert: int) -> View:
    """Return a view of one expert's matrix."""
    return lambda whole: whole[expert]


def stored_locations(
    family: str, model: ModelConfig, tensor_names: Container[str]
) -> dict[str, HubLocation]:
    """Return the locations whose tensor a folder has, with its name there."""
    locations: dict[str, HubLocation] = {}
    for ours, location in hub_locations(family, model).items():
        names = [location.name.removeprefix(root) for root in ROOTS]
        for name in [name for name in names if name in tensor_names][:1]:
            locations[ours] = HubLocation(name, location.transposed, location.third)
    return locations


def read_weight(ours: str, location: HubLocation, shape: Shape, model: ModelConfig) -> HubWeight:
    """Return a weight by a folder's tensor of this shape, which lacks the vocabulary's padding."""
    inner = location.inner(shape)
    rows = inner[0]
    if ours in VOCABULARY:
        inner = (max(rows, model.padded_vocab), *inner[1:])
    return HubWeight(inner, (TensorSlice(location.name, shape, location.view, first_rows(rows)),))


def exported_weights(
    family: str, model: ModelConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    """Return a model's weights by the tensors of a folder of this family.

    The vocabulary's padding and LoRA adapters are omitted. Raise KeyError for a weight that the
    family does not have.
    """
    table = hub_locations(family, model)
    of_experts = stacked_weights(family, model)
    weights: dict[str, HubWeight] = {}
    for ours, shape in shapes.items():
        if is_adapter(ours):
            continue
        if ours in of_experts:
            weights[ours] = of_experts[ours]
            continue
        location, rows = table[ours], shape[0]
        rows = min(rows, model.vocab_size) if ours in VOCABULARY else rows
        outer = location.outer((rows, *shape[1:]))
        names = [location.name, *mtp_copies(family, model, ours)]
        weights[ours] = HubWeight(
            shape,
            tuple(TensorSlice(name, outer, location.view, first_rows(rows)) for name in names),
        )
    return weights


def first_rows(rows: int) -> View:
    """Return a view of the first rows."""
    return lambda whole: whole[:rows]


def identical_weight(name: str, shape: Shape) -> HubWeight:
    """Return a weight that equals the folder's tensor."""
    return HubWeight(shape, (TensorSlice(name, shape, identity, identity),))


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself."""
    return tensor
