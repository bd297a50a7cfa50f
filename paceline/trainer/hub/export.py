"""Export of a checkpoint to a Hugging Face folder: sharded safetensors, their index, config.json.

Main memory holds one file at a time, plus the tensors that fill it. The folder is renamed to its
final name when everything is on the disk. If the process is killed, a hidden folder remains next to
it; the next export to the same path removes it.

Low-rank adapters are written in the format of peft: adapter_config.json and
adapter_model.safetensors, with the names of the adapted layer after `base_model.model.`, as peft
0.21 saves them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.trainer.checkpoint import (
    STATE,
    failure_reason,
    find_checkpoint,
    read_state,
    sync,
    write_synced,
)
from paceline.trainer.checkpoint_reader import CheckpointReader, CorruptCheckpointError
from paceline.trainer.checkpoint_tensors import WEIGHTS
from paceline.trainer.config import LoraConfig, is_adapter, parse_lora, parse_model, read_json
from paceline.trainer.hub.flux import flux_differences, flux_settings, flux_weights
from paceline.trainer.hub.names import (
    INNER,
    HubWeight,
    Shape,
    exported_weights,
    hub_locations,
    identical_weight,
)
from paceline.trainer.hub.reader import CONFIG, is_hub_folder, read_config
from paceline.trainer.hub.settings import differences, family_of, hub_settings, hub_sizes
from paceline.trainer.hub.tensors import SafetensorsWriter, bytes_of
from paceline.trainer.model_config import FluxConfig, Model, ModelConfig

PREFIX = "base_model.model."
MATRICES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


def adapter_weights(
    family: str, model: ModelConfig, lora: LoraConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    """Return the adapters of these shapes by peft's tensors.

    Raises CorruptCheckpointError if not only adapters were trained, and for GPT-2.
    """
    if lora.train_rest:
        raise CorruptCheckpointError("not only adapters were trained; export the merged weights")
    if family == "gpt2":
        raise CorruptCheckpointError(
            "Hugging Face's GPT-2 has query, key and value in one layer, so separate adapters do "
            "not fit; export the merged weights"
        )
    table = hub_locations(family, model)
    weights: dict[str, HubWeight] = {}
    for ours, shape in shapes.items():
        layer, _, matrix = ours.rpartition(".")
        module = table[f"{layer}.weight"].name.removesuffix(".weight")
        weights[ours] = identical_weight(f"{PREFIX}{module}.{MATRICES[matrix]}", shape)
    return weights


def adapter_settings(family: str, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json; `base` is the adapted model."""
    modules = {
        theirs.rpartition(".")[2]
        for ours, theirs in INNER[family].items()
        if ours.rpartition(".")[2] in lora.targets
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


FIELD = "checkpoint"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
)
"""Files copied from the initial model, or from the one given in the settings."""
PREFIXES = {"decoder": "model", "mmdit": "diffusion_pytorch_model", "lora": "adapter_model"}
"""File name prefixes of tensors in transformers, diffusers and peft."""


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export."""

    checkpoint: str
    to: str
    merged: bool = False
    """True to merge the adapters into the weights; else the adapters are exported alone."""
    dtype: str | None = None
    """Dtype of all tensors; None keeps each tensor's own."""
    shard_bytes: int = 5_000_000_000
    """Maximum size of a file in bytes, unless a single tensor is larger."""
    like: str | None = None
    """Model folder that provides config.json and the tokenizer."""


@dataclass(frozen=True)
class ExportSource:
    """Checkpoint to export, and its model."""

    folder: Path
    step: int
    model: Model
    lora: LoraConfig | None
    like: Path | None
    """Folder of the initial model, if it still exists."""
    tensor_specs: Mapping[str, tuple[Shape, torch.dtype]]
    """Shape and dtype of the checkpoint's weights by name."""


def export(settings: ExportSettings) -> dict[str, Any]:
    """Write the folder and return a description of it.

    Raises ConfigError or CorruptCheckpointError if the checkpoint cannot be exported, and OSError
    if reading or writing fails.
    """
    source = read_source(Path(settings.checkpoint), settings.like)
    if settings.merged and source.lora is None:
        raise CorruptCheckpointError("the checkpoint has no adapters to merge")
    target = Path(settings.to)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        answer = write_folder(source, settings, part)
        if target.is_dir():
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {"checkpoint": str(source.folder), "step": source.step, "folder": settings.to, **answer}


def write_folder(source: ExportSource, settings: ExportSettings, folder: Path) -> dict[str, Any]:
    """Write all files into a folder and return their description for `export`."""
    adapters = source.lora is not None and not settings.merged
    weights = adapter_table(source) if adapters else weight_table(source)
    config = adapters_config(source) if adapters else model_config(source)
    prefix = PREFIXES["lora" if adapters else source.model.kind]
    files, dtypes = write_tensors(source, settings, weights, folder, prefix, merged=not adapters)
    if not adapters:
        copy_companions(source, folder)
        if not isinstance(source.model, FluxConfig):  # diffusers rejects the key
            config["dtype"] = dtype_name(max(dtypes, key=lambda dtype: dtype.itemsize))
    name = "adapter_config.json" if adapters else CONFIG
    write_synced(folder / name, json.dumps(config, indent=2) + "\n")
    sync(folder)
    return {
        "form": "adapters" if adapters else config.get("model_type", "flux"),
        "dtypes": sorted(map(dtype_name, dtypes)),
        "like": None if source.like is None or adapters else str(source.like),
        "files": files,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in config.json, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def read_source(path: Path, like: str | None) -> ExportSource:
    """Read a run, a folder of checkpoints or a checkpoint; raises as `export`."""
    folder = find_checkpoint(path, FIELD)
    state = read_state(folder, FIELD)
    run = folder.parent.parent / "trainer.json"
    run_settings = read_json(str(run)) if run.is_file() else {}
    tensor_specs = read_tensor_specs(CheckpointReader(folder))
    lora = None
    if any(map(is_adapter, tensor_specs)):
        # Checkpoints of earlier versions do not store it themselves.
        lora = parse_lora(state if state.get("lora") else run_settings)
        if lora is None:
            raise CorruptCheckpointError(f"{STATE} has no settings for its adapters")
    origin = like or (run_settings.get("training") or {}).get("initial_weights")
    like_folder = Path(origin) if isinstance(origin, str) else None
    if like is not None and not (Path(like) / CONFIG).is_file():
        raise CorruptCheckpointError(f"{like} has no {CONFIG}")
    if (
        like_folder is not None
        and like is None
        and not (like_folder.is_dir() and is_hub_folder(like_folder))
    ):
        like_folder = None
    return ExportSource(
        folder, state["step"], parse_model(state["model"]), lora, like_folder, tensor_specs
    )


def read_tensor_specs(reader: CheckpointReader) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the shape and dtype of a checkpoint's weights by name."""
    entries = reader.read_metadata().state_dict_metadata
    return {
        key.removeprefix(WEIGHTS): (tuple(entry.size), entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }


def weight_table(source: ExportSource) -> dict[str, HubWeight]:
    """Return the model's weights by the exported tensors."""
    shapes = {name: shape for name, (shape, _) in source.tensor_specs.items()}
    model = source.model
    if isinstance(model, FluxConfig):
        table = flux_weights(model)
        wrong = [name for name in shapes if name not in table or shapes[name] != table[name].shape]
        if wrong or table.keys() - shapes.keys():
            raise CorruptCheckpointError(
                f"its weights are not those of FLUX.1: {', '.join(wrong[:3])}"
            )
        return table
    try:
        return exported_weights(family_of(model), model, shapes)
    except KeyError as error:
        raise CorruptCheckpointError(
            f"the Hugging Face format of this model has no weight {error}"
        ) from error


def adapter_table(source: ExportSource) -> dict[str, HubWeight]:
    """Return the adapters by the exported tensors."""
    assert source.lora is not None and not isinstance(source.model, FluxConfig)
    shapes = {name: shape for name, (shape, _) in source.tensor_specs.items() if is_adapter(name)}
    return adapter_weights(family_of(source.model), source.model, source.lora, shapes)


def adapters_config(source: ExportSource) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    assert source.lora is not None and not isinstance(source.model, FluxConfig)
    base = None if source.like is None else str(source.like)
    return adapter_settings(family_of(source.model), source.lora, base)


def model_config(source: ExportSource) -> dict[str, Any]:
    """Return the content of config.json, with further keys of the model folder in `like`."""
    model = source.model
    like = {} if source.like is None else read_config(source.like)
    if isinstance(model, FluxConfig):
        settings, sizes = flux_settings(model), {}
        problems = flux_differences(like, model) if like else []
    else:
        family = family_of(model)
        settings, sizes = hub_settings(family, model), hub_sizes(family, model)
        problems = differences(like, model) if like else []
    if problems:
        raise CorruptCheckpointError(f"{source.like}: {'; '.join(problems)}")
    # Newer files use `dtype` instead.
    like.pop("torch_dtype", None)
    return {**settings, **like, **sizes}


def copy_companions(source: ExportSource, target: Path) -> None:
    """Copy the tokenizer's files."""
    if source.like is None:
        return
    for pattern in COMPANIONS:
        for path in sorted(source.like.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def write_tensors(
    source: ExportSource,
    settings: ExportSettings,
    weights: Mapping[str, HubWeight],
    folder: Path,
    prefix: str,
    merged: bool,
) -> tuple[list[dict[str, Any]], set[torch.dtype]]:
    """Write all tensor files, and their index if there are several.

    Returns each file's name and bytes, and the dtypes.
    """
    dtype = None if settings.dtype is None else DTYPES[settings.dtype]
    shards = [*split_into_shards(weights, source.tensor_specs, dtype, settings.shard_bytes)]
    files: list[dict[str, Any]] = []
    index: dict[str, str] = {}
    total_bytes, dtypes = 0, set[torch.dtype]()
    for number, shard in enumerate(shards, start=1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{prefix}{suffix}.safetensors"
        tensors = shard.tensors(source.tensor_specs, dtype)
        file = SafetensorsWriter(folder / name, tensors)
        values = load_tensors(source, shard, merged)
        for ours, weight in shard.weights.items():
            weight.write(values.pop(ours), file.tensors)
        file.sync()
        files.append({"name": name, "bytes": file.bytes})
        index |= dict.fromkeys(tensors, name)
        total_bytes += sum(bytes_of(*entry) for entry in tensors.values())
        dtypes |= {entry[1] for entry in tensors.values()}
    if len(shards) > 1:
        content = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(index.items())),
        }
        path = folder / f"{prefix}.safetensors.index.json"
        write_synced(path, json.dumps(content, indent=2) + "\n")
    return files, dtypes


@dataclass(frozen=True)
class Shard:
    """Weights of one file."""

    weights: Mapping[str, HubWeight]

    def tensors(
        self, tensor_specs: Mapping[str, tuple[Shape, torch.dtype]], dtype: torch.dtype | None
    ) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the shape and dtype of the file's tensors."""
        return {
            piece.name: (piece.shape, dtype or tensor_specs[ours][1])
            for ours, weight in self.weights.items()
            for piece in weight.slices
        }


def split_into_shards(
    weights: Mapping[str, HubWeight],
    tensor_specs: Mapping[str, tuple[Shape, torch.dtype]],
    dtype: torch.dtype | None,
    max_bytes: int,
) -> Iterator[Shard]:
    """Yield the weights by file, in order; weights that share a tensor are in the same file."""
    groups: dict[str, dict[str, HubWeight]] = {}
    for ours in sorted(weights, key=export_order):
        groups.setdefault(weights[ours].slices[0].name, {})[ours] = weights[ours]
    current: dict[str, HubWeight] = {}
    current_bytes = 0
    for group in groups.values():
        size = sum(bytes_of(*entry) for entry in Shard(group).tensors(tensor_specs, dtype).values())
        if current and current_bytes + size > max_bytes:
            yield Shard(current)
            current, current_bytes = {}, 0
        current = current | group
        current_bytes += size
    yield Shard(current)


def export_order(name: str) -> tuple[int, int, str]:
    """Return a sort key: embeddings first, then blocks by number, then the rest."""
    first, _, tail = name.partition(".")
    number = int(tail.partition(".")[0]) if first in ("blocks", "mtp") else 0
    is_input = first in ("embedding", "positions", "project_in", "image_in", "text_in")
    return (0 if is_input else {"blocks": 1, "mtp": 2}.get(first, 3), number, name)


@torch.no_grad()
def load_tensors(source: ExportSource, shard: Shard, merged: bool) -> dict[str, Tensor]:
    """Read a file's weights; raises CorruptCheckpointError if the checkpoint is damaged."""
    names = [*shard.weights]
    adapters = {
        name: [f"{name.removesuffix('.weight')}.{matrix}" for matrix in ("lora_a", "lora_b")]
        for name in names
        if merged and f"{name.removesuffix('.weight')}.lora_a" in source.tensor_specs
    }
    names += [matrix for matrices in adapters.values() for matrix in matrices]
    values = {
        name: torch.empty(source.tensor_specs[name][0], dtype=source.tensor_specs[name][1])
        for name in names
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            state_dict = {f"{WEIGHTS}{name}": value for name, value in values.items()}
            load(state_dict, storage_reader=CheckpointReader(source.folder), no_dist=True)
    except CheckpointException as error:
        raise CorruptCheckpointError(f"is corrupt: {failure_reason(error)}") from error
    for name, (first, second) in adapters.items():
        assert source.lora is not None
        values[name] = merge_adapter(values[name], values[first], values[second], source.lora)
    return values


def merge_adapter(weight: Tensor, first: Tensor, second: Tensor, lora: LoraConfig) -> Tensor:
    """Return W + (alpha / rank) B A (Hu et al., arXiv:2106.09685).

    The sum is computed in fp32 or wider and returned in W's dtype.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = second.to(wide) @ first.to(wide)
    return torch.add(weight.to(wide), update, alpha=lora.alpha / lora.rank).to(weight.dtype)
