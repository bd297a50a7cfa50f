"""Reader of Hugging Face folders under this trainer's names: OPT, GPT-2, Llama and FLUX.1.

A folder has config.json and *.safetensors. The files are mapped into memory; each rank reads only
its own part, through DCP's planner.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
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

from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.checkpoint_tensors import WEIGHTS
from paceline.trainer.hub.flux import flux_differences, stored_flux
from paceline.trainer.hub.names import (
    VOCABULARY,
    HubLocation,
    HubWeight,
    Shape,
    mtp_copies,
    read_weight,
    stacked_weights,
    stored_locations,
)
from paceline.trainer.hub.settings import differences
from paceline.trainer.hub.tensors import SafetensorsFile
from paceline.trainer.model_config import FluxConfig, Model, ModelConfig

CONFIG, SUFFIX = "config.json", ".safetensors"
MAX_LISTED = 5
"""Maximum number of tensors that an error message lists."""
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of computed tensors in older files: masks, and the rotary frequencies."""


def is_hub_folder(path: Path) -> bool:
    """Return whether a path is a Hugging Face model folder."""
    return (path / CONFIG).is_file() and any(path.glob(f"*{SUFFIX}"))


class HubReader(StorageReader):
    """DCP storage reader of a Hugging Face folder.

    Raises CorruptCheckpointError for a damaged folder, and for a model that computes something else
    than `model`.
    """

    def __init__(self, path: Path, model: Model) -> None:
        super().__init__()
        self.model = model
        config = read_config(path)
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, sorted(path.glob(f"*{SUFFIX}"))):
            self._file_of |= dict.fromkeys(file.locations, file)
        self._copies: set[str] = set()
        of_flux = isinstance(model, FluxConfig)
        problems = flux_differences(config, model) if of_flux else differences(config, model)
        if problems:
            raise CorruptCheckpointError("; ".join(problems))
        shapes = {name: file.locations[name].shape for name, file in self._file_of.items()}
        if of_flux:
            self._weights = stored_flux(model, shapes)
        else:
            family = str(config["model_type"])
            self._weights = _decoder_weights(family, model, shapes)
            self._copies = {name for ours in VOCABULARY for name in mtp_copies(family, model, ours)}

    def tensor(self, name: str) -> Tensor:
        """Return a whole weight of the trainer; padded vocabulary rows are 0."""
        return self._weights[name].read(self._read_tensor)

    def _read_tensor(self, name: str) -> Tensor:
        return self._file_of[name].tensor(name)

    def check_all_used(self, weights: Iterable[str]) -> None:
        """Raise CorruptCheckpointError for tensors that belong to none of the model's `weights`."""
        names = {*weights} | ({"head.weight"} if self.model.tied_embeddings else set())
        mine = [self._weights[name] for name in names if name in self._weights]
        used = {piece.name for weight in mine for piece in weight.slices} | self._copies
        unused = [name for name in self._file_of if name not in used]
        unused = [name for name in unused if not name.endswith(NO_WEIGHTS)]
        if unused:
            listed_names = ", ".join(
                unused[:MAX_LISTED]
            ) + f" and {len(unused) - MAX_LISTED} more" * (len(unused) > MAX_LISTED)
            raise CorruptCheckpointError(f"the model has no weight for {listed_names}"[:500])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because no state is kept between loads."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the folder's weights by their names in this trainer's checkpoints."""
        entries: dict[str, Any] = {}
        for name, weight in self._weights.items():
            shape = torch.Size(weight.shape)
            dtype = self._read_tensor(weight.slices[0].name).dtype
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[f"{WEIGHTS}{name}"] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape, [chunk]
            )
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """Do nothing, because the reader is already set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the tensor of each item of the plan."""
        for item in plan.items:
            tensor = self.tensor(item.storage_index.fqn.removeprefix(WEIGHTS))
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the path is such a folder."""
        return is_hub_folder(Path(checkpoint_id))


def _decoder_weights(
    family: str, model: ModelConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    weights: dict[str, HubWeight] = {}
    for name, place in stored_locations(family, model, shapes).items():
        shape = shapes[place.name]
        _check_shape(name, place, shape)
        weights[name] = read_weight(name, place, shape, model)
    of_experts = stacked_weights(family, model)
    for part in (part for weight in of_experts.values() for part in weight.slices):
        shape = shapes.get(part.name)
        if shape != part.shape:
            state = "is missing" if shape is None else f"has the wrong shape {shape}"
            message = f"its {part.name} {state}; the model needs {part.shape}"
            raise CorruptCheckpointError(message[:200])
    return weights | of_experts


def _check_shape(name: str, place: HubLocation, shape: Shape) -> None:
    """Raise CorruptCheckpointError for a wrong rank, or for a fused layer not divisible by 3."""
    dims = 1 if name.endswith(("bias", ".sinks")) or "norm." in name else 2
    if len(shape) != dims or (place.third is not None and shape[-1] % 3):
        raise CorruptCheckpointError(f"its {place.name} has the wrong shape {shape}"[:200])


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json; raises CorruptCheckpointError if it is not a JSON object."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.name} is not valid JSON: {error}"[:200]) from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path.name} is not a JSON object")
    return content
