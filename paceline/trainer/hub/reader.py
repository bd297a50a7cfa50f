"""Weights in the hub's form under the names of this trainer: OPT, GPT-2, Llama and FLUX.1.

A folder has config.json and *.safetensors. They are mapped into memory; each rank reads its own
part alone, through DCP's planner.
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
from paceline.trainer.hub.names import HubLocation, HubWeight, Shape, read_weight, stored_locations
from paceline.trainer.hub.settings import differences
from paceline.trainer.hub.tensors import SafetensorsFile
from paceline.trainer.model_config import FluxConfig, Model, ModelConfig

CONFIG, SUFFIX = "config.json", ".safetensors"
NAMED = 5
"""Tensors that a refusal names at most."""
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of what older files keep of the computation itself: masks, and the rotary frequencies."""


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with a model in the hub's form."""
    return (path / CONFIG).is_file() and any(path.glob(f"*{SUFFIX}"))


class HubReader(StorageReader):
    """DCP's reader of such a folder; raises CorruptCheckpointError for an unsound one.

    Also for a model that computes otherwise than `model` does.
    """

    def __init__(self, path: Path, model: Model) -> None:
        super().__init__()
        self.model = model
        config = read_config(path)
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, sorted(path.glob(f"*{SUFFIX}"))):
            self._file_of |= dict.fromkeys(file.stored, file)
        of_flux = isinstance(model, FluxConfig)
        problems = flux_differences(config, model) if of_flux else differences(config, model)
        if problems:
            raise CorruptCheckpointError("; ".join(problems))
        shapes = {name: file.stored[name].shape for name, file in self._file_of.items()}
        if of_flux:
            self._weights = stored_flux(model, shapes)
        else:
            self._weights = _decoder_weights(str(config["model_type"]), model, shapes)

    def tensor(self, name: str) -> Tensor:
        """A weight of this trainer's as a whole, rows of a padded vocabulary being 0."""
        return self._weights[name].read(self._stored)

    def _stored(self, name: str) -> Tensor:
        return self._file_of[name].tensor(name)

    def check_all_taken(self, weights: Iterable[str]) -> None:
        """Raise CorruptCheckpointError with the tensors that are none of the model's `weights`."""
        names = {*weights} | ({"head.weight"} if self.model.tied_embeddings else set())
        mine = [self._weights[name] for name in names if name in self._weights]
        taken = {piece.name for weight in mine for piece in weight.slices}
        left = [name for name in self._file_of if name not in taken]
        left = [name for name in left if not name.endswith(NO_WEIGHTS)]
        if left:
            shown = ", ".join(left[:NAMED]) + f" and {len(left) - NAMED} more" * (len(left) > NAMED)
            raise CorruptCheckpointError(f"the model has no weight for its {shown}"[:500])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The folder's weights by their names in this trainer's checkpoints."""
        entries: dict[str, Any] = {}
        for name, weight in self._weights.items():
            shape = torch.Size(weight.shape)
            dtype = self._stored(weight.slices[0].name).dtype
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[f"{WEIGHTS}{name}"] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape, [chunk]
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


def _decoder_weights(
    family: str, model: ModelConfig, shapes: Mapping[str, Shape]
) -> dict[str, HubWeight]:
    weights: dict[str, HubWeight] = {}
    for name, place in stored_locations(family, model, shapes).items():
        shape = shapes[place.name]
        _check_shape(name, place, shape)
        weights[name] = read_weight(name, place, shape, model)
    return weights


def _check_shape(name: str, place: HubLocation, shape: Shape) -> None:
    """Raises CorruptCheckpointError for a vector in place of a matrix, or no three in one."""
    dims = 1 if name.endswith(".bias") or "norm." in name else 2
    if len(shape) != dims or (place.third is not None and shape[-1] % 3):
        raise CorruptCheckpointError(f"its {place.name} has the shape {shape}"[:200])


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; raises CorruptCheckpointError where it is no JSON object."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.name} is no JSON: {error}"[:200]) from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path.name} holds no JSON object")
    return content
