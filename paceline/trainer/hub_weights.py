"""Weights of OPT, GPT-2 and Llama models in the hub's form, under the names of this trainer.

A folder has config.json and *.safetensors: 8 bytes that say how long the header is, a JSON header
of {name: {dtype, shape, data_offsets}}, then the tensors (huggingface/safetensors, README). They
are mapped into memory; each rank reads its own part alone, through DCP's planner.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.trainer.checkpoint import WEIGHTS
from paceline.trainer.checkpoint_reader import UnsoundCheckpointError
from paceline.trainer.config import ModelConfig

CONFIG, PATTERN = "config.json", "*.safetensors"
NAMED = 5
"""Tensors that a refusal names at most."""
LARGEST_HEADER = 100_000_000
"""Bytes, the format's own limit."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
OUTER = {
    "opt": {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
    },
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
    },
    "llama": {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
}
"""Layers outside of the blocks by model_type of config.json: name here, name there."""
BLOCKS = {"opt": "model.decoder.layers", "gpt2": "transformer.h", "llama": "model.layers"}
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
    "llama": {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
}
"""Layers of a block."""
ROOTS = ("", "model.", "transformer.")
"""Saved without its head, a model's names lack the first of these that they had."""
FUSED = {"attention.q": 0, "attention.k": 1, "attention.v": 2}
"""GPT-2 keeps the three in one layer, and all matrices of blocks as (in, out)."""
SETTINGS = {
    "opt": {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "activation_function": "activation",
        "enable_bias": "bias",
        "tie_word_embeddings": "tied_embeddings",
    },
    "gpt2": {
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "activation_function": "activation",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied_embeddings",
    },
    "llama": {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "kv_heads",
        "hidden_act": "activation",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "attention_bias": "bias",
        "mlp_bias": "bias",
        "tie_word_embeddings": "tied_embeddings",
    },
}
"""What of config.json no tensor's size tells: key there, field here."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
}
"""What a key that config.json lacks means in transformers."""
OPT_EPS = 1e-5
"""Of OPT's norms; its config.json has no key for it."""
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of what older files keep of the computation itself: masks, and the rotary frequencies."""
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file."""


@dataclass(frozen=True)
class StoredPlace:
    """Which tensor of the folder a weight is, and what is done with it."""

    name: str
    turned: bool = False
    third: int | None = None


def is_hub_folder(path: Path) -> bool:
    """Whether a folder holds a model in the hub's form."""
    return (path / CONFIG).is_file() and any(path.glob(PATTERN))


class HubReader(StorageReader):
    """DCP's reader of such a folder; raises UnsoundCheckpointError for one that is not sound.

    Also for a model that computes otherwise than `model` does.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        super().__init__()
        self.folder, self.model = folder, model
        config = _json(folder / CONFIG)
        self._stored: dict[str, Stored] = {}
        self._files: dict[str, mmap.mmap] = {}
        for file in sorted(folder.glob(PATTERN)):
            self._open(file)
        problems = differences(config, model)
        if problems:
            raise UnsoundCheckpointError("; ".join(problems))
        self._places = places(str(config["model_type"]), model, self._stored)
        for name, place in self._places.items():
            _check_shape(name, place, self._stored[place.name].shape)

    def _open(self, path: Path) -> None:
        length = path.stat().st_size
        with path.open("rb") as file:
            # A file of no bytes cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if length else b""
        header = int.from_bytes(content[:8], "little")
        if isinstance(content, bytes) or not 0 < header <= min(LARGEST_HEADER, length - 8):
            raise UnsoundCheckpointError(f"{path.name} is no safetensors file, or is torn")
        self._files[path.name] = content
        try:
            entries = json.loads(content[8 : 8 + header])
            self._stored |= stored_tensors(path.name, entries, 8 + header, length)
        except UnsoundCheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UnsoundCheckpointError(f"{path.name} is broken: {error!r}"[:200]) from error

    def tensor(self, name: str) -> Tensor:
        """A weight of this trainer's as a whole, rows of a padded vocabulary being 0."""
        place = self._places[name]
        stored = self._stored[place.name]
        count, content = prod(stored.shape), self._files[stored.file]
        flat = torch.frombuffer(content, dtype=stored.dtype, count=count, offset=stored.start)
        tensor = flat.view(stored.shape)
        tensor = tensor.t() if place.turned else tensor
        tensor = tensor if place.third is None else tensor.chunk(3)[place.third]
        missing = self.model.padded_vocab - len(tensor)
        if _is_vocabulary(name) and missing > 0:
            return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
        return tensor

    def check_all_taken(self, weights: Iterable[str]) -> None:
        """Raise UnsoundCheckpointError with the tensors that are none of the model's `weights`."""
        taken = {self._places[name].name for name in weights if name in self._places}
        taken |= {"lm_head.weight"} if self.model.tied_embeddings else set()
        left = [name for name in self._stored if name not in taken]
        left = [name for name in left if not name.endswith(NO_WEIGHTS)]
        if left:
            names = ", ".join(left[:NAMED]) + f" and {len(left) - NAMED} more" * (len(left) > NAMED)
            raise UnsoundCheckpointError(f"the model has no weight for its {names}"[:500])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The folder's weights by their names in this trainer's checkpoints."""
        entries: dict[str, Any] = {}
        for name in self._places:
            tensor = self.tensor(name)
            chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
            entries[f"{WEIGHTS}{name}"] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk]
            )
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """All is known from the beginning."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what each item of the plan asks for."""
        for item in plan.items:
            tensor = self.tensor(item.storage_index.fqn.removeprefix(WEIGHTS))
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names such a folder."""
        return is_hub_folder(Path(checkpoint_id))


def stored_tensors(
    file: str, entries: Mapping[str, Any], start: int, end: int
) -> dict[str, Stored]:
    """Tensors of floats in a file whose bytes from `start` to `end` hold them, by its header.

    Raises UnsoundCheckpointError for one that lies elsewhere; integers, as the masks of old GPT-2
    files, are left out. A header of another form raises KeyError, TypeError or ValueError.
    """
    tensors: dict[str, Stored] = {}
    for name, entry in entries.items():
        if name == "__metadata__" or entry["dtype"] not in DTYPES:
            continue
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = (start + at for at in entry["data_offsets"])
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise UnsoundCheckpointError(f"{file} is broken: {name} has no size"[:200])
        if not start <= first <= last <= end or last - first != prod(shape) * dtype.itemsize:
            raise UnsoundCheckpointError(f"{file} is torn: {name}"[:200])
        if last > first:
            tensors[name] = Stored(file, dtype, shape, first)
    return tensors


def _check_shape(name: str, place: StoredPlace, shape: tuple[int, ...]) -> None:
    """Raises UnsoundCheckpointError for a vector in place of a matrix, or no three in one."""
    dims = 1 if name.endswith(".bias") or "norm." in name else 2
    if len(shape) != dims or (place.third is not None and shape[-1] % 3):
        raise UnsoundCheckpointError(f"its {place.name} has the shape {shape}"[:200])


def differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Where a folder's model computes otherwise than this one, one sentence each."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in SETTINGS:
        return [f"its model_type is {family}; use one of {', '.join(SETTINGS)}"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return [f"its rope_scaling is {rope}, which is no object"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    problems = [f"its positions are scaled ({kind}), which is not here"] * (kind != "default")
    stated = {key: value for key, value in {**rope, **config}.items() if value is not None}
    values = {**DEFAULTS[family], **stated}
    for theirs, ours in SETTINGS[family].items():
        value, here = values.get(theirs), getattr(model, ours)
        value = ACTIVATIONS.get(value, value) if isinstance(value, str) else value
        if value is not None and value != here:
            problems.append(f"its {theirs} is {values[theirs]}, and model.{ours} is {here}")
    return problems + _differences_of_opt(family, values, model) + _scales_of_gpt2(family, values)


def _differences_of_opt(family: str, values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    if family != "opt":
        return []
    problems: list[str] = []
    if model.norm_eps != OPT_EPS:
        problems.append(f"its norms' eps is {OPT_EPS}, and model.norm_eps is {model.norm_eps}")
    if values["do_layer_norm_before"] != (model.norm_position == "pre"):
        problems.append(f"model.norm_position is {model.norm_position}, and there the other")
    return problems


def _scales_of_gpt2(family: str, values: Mapping[str, Any]) -> list[str]:
    """Attention that is divided by other than the root of a head's width."""
    keys = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx") if family == "gpt2" else ()
    return [
        f"its {key} is {values[key]}, which is not here"
        for key in keys
        if values[key] != DEFAULTS["gpt2"][key]
    ]


def places(family: str, model: ModelConfig, stored: Mapping[str, Stored]) -> dict[str, StoredPlace]:
    """Which tensor of the folder each weight is, of those that are there."""
    layers = {ours: StoredPlace(theirs) for ours, theirs in OUTER[family].items()}
    for number in range(model.num_layers):
        for ours, theirs in INNER[family].items():
            turned = family == "gpt2" and not ours.endswith("norm")
            third = FUSED.get(ours) if family == "gpt2" else None
            name = f"{BLOCKS[family]}.{number}.{theirs}"
            layers[f"blocks.{number}.{ours}"] = StoredPlace(name, turned, third)
    chosen: dict[str, StoredPlace] = {}
    for ours, place in layers.items():
        for kind in ("weight", "bias"):
            names = [f"{place.name}.{kind}".removeprefix(root) for root in ROOTS]
            for name in [name for name in names if name in stored][:1]:
                turned = place.turned and kind == "weight"
                chosen[f"{ours}.{kind}"] = StoredPlace(name, turned, place.third)
    return chosen


def _is_vocabulary(name: str) -> bool:
    return name in ("embedding.weight", "head.weight")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsoundCheckpointError(f"{path.name} is no JSON: {error}"[:200]) from error
    if not isinstance(content, dict):
        raise UnsoundCheckpointError(f"{path.name} holds no JSON object")
    return content
