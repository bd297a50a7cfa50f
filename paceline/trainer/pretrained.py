"""Taking a model's weights, and nothing else, from any layout's checkpoint or a hub's folder."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.trainer.checkpoint import cause, find_checkpoint
from paceline.trainer.checkpoint_reader import CheckpointReader, UnsoundCheckpointError
from paceline.trainer.checkpoint_tensors import WEIGHTS, as_dtensor
from paceline.trainer.config import ConfigError
from paceline.trainer.hub.reader import HubReader, is_hub_folder
from paceline.trainer.model_config import Model
from paceline.trainer.replica.replica import Replica

FIELD = "training.initial_weights"
ADAPTERS = ("lora_a", "lora_b")


@torch.no_grad()
def load_weights(replica: Replica, source: str, model: Model) -> None:
    """Fill a replica's weights; adapters that the checkpoint does not have stay as they are.

    Raises ConfigError when it is missing or broken, or lacks a weight of that shape.
    """
    weights = {
        f"{WEIGHTS}{name}": as_dtensor(replica.tp_plan[name], parameter.detach(), replica.mesh)
        for name, parameter in replica.named_parameters()
    }
    folder = Path(source) if is_hub_folder(Path(source)) else find_checkpoint(Path(source), FIELD)
    # All ranks need a group of their own that knows main memory, whatever they find.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    assert group is None or isinstance(group, dist.ProcessGroup)
    try:
        reader = _reader(folder, model)
        if isinstance(reader, HubReader):
            reader.check_all_taken(_names(replica, group))
        chosen = _chosen(weights, sizes_in(reader), folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(chosen, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ConfigError(f"{FIELD} {folder}: is broken: {cause(error)}") from error
    except UnsoundCheckpointError as error:
        raise ConfigError(f"{FIELD} {folder}: {error}; name another checkpoint") from error
    except OSError as error:
        raise ConfigError(f"{FIELD} {folder}: cannot be read: {error!r}") from error


def _reader(folder: Path, model: Model) -> CheckpointReader | HubReader:
    return HubReader(folder, model) if is_hub_folder(folder) else CheckpointReader(folder)


def _names(replica: Replica, group: dist.ProcessGroup | None) -> set[str]:
    """The weights of all pipeline stages."""
    mine = [name for name, _ in replica.named_parameters()]
    if group is None or replica.mesh.pp.size == 1:
        return set(mine)
    stages: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, mine, group=group)
    return {name for names in stages for name in names}


def sizes_in(reader: CheckpointReader | HubReader) -> dict[str, torch.Size]:
    """The shape of every tensor of a checkpoint."""
    entries = reader.read_metadata().state_dict_metadata
    return {
        key: kept.size for key, kept in entries.items() if isinstance(kept, TensorStorageMetadata)
    }


def _chosen(
    weights: dict[str, Tensor], sizes: dict[str, torch.Size], folder: Path
) -> dict[str, Tensor]:
    """What the checkpoint has of what is wanted."""
    for key, tensor in weights.items():
        if key not in sizes and key.rpartition(".")[2] in ADAPTERS:
            continue
        if key not in sizes:
            raise ConfigError(f"{FIELD} {folder}: has no {key.removeprefix(WEIGHTS)}")
        if sizes[key] != tensor.shape:
            raise ConfigError(
                f"{FIELD} {folder}: {key.removeprefix(WEIGHTS)} is {tuple(sizes[key])} there and "
                f"{tuple(tensor.shape)} here"
            )
    return {key: tensor for key, tensor in weights.items() if key in sizes}
