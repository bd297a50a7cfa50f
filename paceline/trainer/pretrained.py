"""Load a model's weights from a checkpoint of any layout or from a Hugging Face folder."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.trainer.checkpoint import failure_reason, find_checkpoint
from paceline.trainer.checkpoint_reader import CheckpointReader, CorruptCheckpointError
from paceline.trainer.checkpoint_tensors import WEIGHTS, as_dtensor, buffer_tensors
from paceline.trainer.config import ConfigError
from paceline.trainer.hub.reader import HubReader, is_hub_folder
from paceline.trainer.model_config import Model
from paceline.trainer.replica.replica import Replica

FIELD = "training.initial_weights"
ADAPTERS = ("lora_a", "lora_b")


@torch.no_grad()
def load_weights(replica: Replica, source: str, model: Model) -> None:
    """Load a replica's weights; adapters that are missing in the checkpoint are unchanged.

    Raise ConfigError when the checkpoint is missing or corrupt, or lacks a weight of that shape.
    """
    weights = {
        f"{WEIGHTS}{name}": as_dtensor(replica.tp_plan[name], parameter.detach(), replica.mesh)
        for name, parameter in replica.named_parameters()
    } | buffer_tensors(replica)
    folder = Path(source) if is_hub_folder(Path(source)) else find_checkpoint(Path(source), FIELD)
    # Loading exchanges objects in CPU memory, which needs a gloo group. All ranks must create it.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    assert group is None or isinstance(group, dist.ProcessGroup)
    try:
        reader = _reader(folder, model)
        if isinstance(reader, HubReader):
            reader.check_all_used(_weight_names(replica, group))
        available = _available_weights(weights, tensor_sizes(reader), folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(available, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ConfigError(f"{FIELD} {folder}: is corrupt: {failure_reason(error)}") from error
    except CorruptCheckpointError as error:
        raise ConfigError(f"{FIELD} {folder}: {error}; use another checkpoint") from error
    except OSError as error:
        raise ConfigError(f"{FIELD} {folder}: cannot be read: {error!r}") from error


def _reader(folder: Path, model: Model) -> CheckpointReader | HubReader:
    return HubReader(folder, model) if is_hub_folder(folder) else CheckpointReader(folder)


def _weight_names(replica: Replica, group: dist.ProcessGroup | None) -> set[str]:
    """Return the names of the weights of all pipeline stages."""
    names = [name for name, _ in (*replica.named_parameters(), *replica.named_buffers())]
    if group is None or replica.mesh.pp.size == 1:
        return set(names)
    stages: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, names, group=group)
    return {name for names in stages for name in names}


def tensor_sizes(reader: CheckpointReader | HubReader) -> dict[str, torch.Size]:
    """Return the shape of every tensor of a checkpoint."""
    entries = reader.read_metadata().state_dict_metadata
    return {
        key: entry.size
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _available_weights(
    weights: dict[str, Tensor], sizes: dict[str, torch.Size], folder: Path
) -> dict[str, Tensor]:
    """Return the weights that the checkpoint has; raise ConfigError for a missing one."""
    for key, tensor in weights.items():
        if key not in sizes and key.rpartition(".")[2] in ADAPTERS:
            continue
        if key not in sizes:
            raise ConfigError(f"{FIELD} {folder}: has no {key.removeprefix(WEIGHTS)}")
        if sizes[key] != tensor.shape:
            raise ConfigError(
                f"{FIELD} {folder}: {key.removeprefix(WEIGHTS)} has shape {tuple(sizes[key])}, but "
                f"this model needs {tuple(tensor.shape)}"
            )
    return {key: tensor for key, tensor in weights.items() if key in sizes}
