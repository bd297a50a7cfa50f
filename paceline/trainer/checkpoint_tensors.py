"""State of a training as sharded tensors by checkpoint key.

Keys are weights/<name>, exp_avg/<name>, exp_avg_sq/<name> and step/<name>, with the parameter names
of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from paceline.trainer.parallel.mesh import ALONE, Mesh, MeshAxis
from paceline.trainer.parallel.tensor import EXPERT_FSDP_DIM, ParamPlan
from paceline.trainer.replica.replica import Replica

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "weights/"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle."""


def state_tensors(
    replica: Replica, optimizer: torch.optim.Optimizer, to_save: bool
) -> dict[str, Tensor]:
    """Return the training's state by key; the tensors share its memory, so loading fills it.

    `to_save` omits tensors that another rank writes: copies of tied weights, and a part of the
    tensors that are equal on all replicas.
    """
    mesh, slices, states = replica.mesh, replica.slices, optimizer.state
    all_copies = mesh.replicate if replica.sharded else mesh.data
    tied = {part.tied_copy for part in replica.parts} if to_save else set[str | None]()
    by_key: dict[str, Tensor] = {}

    def optimizer_parameter(parameter: nn.Parameter) -> nn.Parameter:
        return replica.shards.weights.get(parameter, parameter) if replica.shards else parameter

    for i, (name, parameter) in enumerate(replica.named_parameters()):
        if name in tied:
            continue
        plan = replica.tp_plan[name]
        is_spread = name in replica.experts
        copies = mesh.expert_data if is_spread and not replica.sharded else all_copies
        owner = not to_save or i % copies.size == copies.index
        if owner:
            by_key[f"{WEIGHTS}{name}"] = as_dtensor(plan, parameter.detach(), mesh)
        if slices is not None and parameter in slices.slices:
            part = slices.slices[parameter]
            state, shape = states[part.weight], tuple(parameter.shape)
            for moment in MOMENTS:
                values = state[moment]
                by_key[f"{moment}/{name}"] = as_flat_slice(plan, values, shape, part.begin, mesh)
        elif slices is None and optimizer_parameter(parameter) in states and owner:
            state = states[optimizer_parameter(parameter)]
            for moment in MOMENTS:
                values = as_dtensor_like(parameter, state[moment])
                by_key[f"{moment}/{name}"] = as_dtensor(plan, values, mesh)
        else:
            continue
        by_key[f"step/{name}"] = state["step"]
    if not to_save or mesh.data.index == 0:
        by_key |= buffer_tensors(replica)
    return by_key


def buffer_tensors(replica: Replica) -> dict[str, Tensor]:
    """Return the routers' choice biases by key, which all data and tensor ranks hold whole."""
    return {
        f"{WEIGHTS}{name}": as_dtensor(ParamPlan(), buffer, replica.mesh)
        for name, buffer in replica.named_buffers()
    }


def as_dtensor_like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """Return this rank's `values` as a DTensor sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def as_dtensor(plan: ParamPlan, tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's part of a parameter as a DTensor, of spread experts as a FlatSlice."""
    if plan.by_expert and mesh.ep.size > 1:
        return _expert_slice(plan, tensor, mesh)
    if isinstance(tensor, DTensor) or mesh.tp.size == 1:
        return tensor
    assert mesh.device_mesh is not None
    return DTensor.from_local(tensor, mesh.device_mesh["tp"], [plan.placement], run_check=False)


def _expert_slice(plan: ParamPlan, tensor: Tensor, mesh: Mesh) -> FlatSlice:
    """Return this rank's part of stacked experts, which FSDP may have sharded."""
    fsdp = mesh.expert_data if isinstance(tensor, DTensor) else ALONE
    values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    shape = tuple(values.shape)
    return as_flat_slice(plan, values.view(-1), shape, 0, mesh, fsdp)


def as_flat_slice(
    plan: ParamPlan,
    values: Tensor,
    local: tuple[int, ...],
    begin: int,
    mesh: Mesh,
    fsdp: MeshAxis = ALONE,
) -> FlatSlice:
    """Return `values` (n,), this rank's elements from `begin` on, as a slice of the tensor.

    The rank's part has the shape `local`. `fsdp` are the ranks over which FSDP shards experts.
    """
    whole, origin = list(local), [0] * len(local)
    # From the innermost part outwards: FSDP shards what tensor and expert ranks hold.
    shards = [(EXPERT_FSDP_DIM, fsdp), (plan.shard_dim, mesh.tp)]
    shards += [(0, mesh.ep)] if plan.by_expert else []
    for dim, axis in shards:
        if dim is not None and axis.size > 1:
            origin[dim] += axis.index * whole[dim]
            whole[dim] *= axis.size
    boxes = [
        (tuple(o + i for o, i in zip(origin, offsets, strict=True)), sizes)
        for offsets, sizes in rectangles(local, begin, begin + len(values))
    ]
    return FlatSlice(values, torch.Size(whole), boxes)


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield the rectangles that cover elements `begin` to `end` in row-major order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    inner = prod(shape[1:])
    row, last = begin // inner, end // inner
    if begin % inner:
        stop = min(end - row * inner, inner)
        yield from _in_row(row, rectangles(shape[1:], begin % inner, stop))
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if row <= last:
        yield from _in_row(last, rectangles(shape[1:], 0, end % inner))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for offsets, sizes in boxes:
        yield (row, *offsets), (1, *sizes)


class FlatSlice(Tensor):
    """Consecutive elements of a tensor in row-major order, which DCP stores as rectangles.

    It has the shape of the whole tensor and supports no operations. It implements the interface
    that DCP uses for DTensors.
    """

    elements: Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(cls, elements: Tensor, whole: torch.Size, boxes: list[Box]) -> FlatSlice:
        """Create a slice of `elements` (n,) that fill `boxes` in order."""
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, whole, dtype=elements.dtype, device=elements.device
        )

    def __init__(self, elements: Tensor, whole: torch.Size, boxes: list[Box]) -> None:
        assert len(elements) == sum(prod(sizes) for _, sizes in boxes)
        self.elements, self.boxes = elements, boxes

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{function} of a slice of a tensor")

    def to(self, *args: Any, **settings: Any) -> FlatSlice:
        """Move the elements to another device or dtype."""
        return FlatSlice(self.elements.to(*args, **settings), self.shape, self.boxes)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.boxes]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.elements)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        start = 0
        for offsets, sizes in self.boxes:
            count = prod(sizes)
            if torch.Size(offsets) == index.offset:
                return self.elements[start : start + count].view(sizes)
            start += count
        raise ValueError(f"{index.fqn} has no rectangle at {index.offset} on this rank")


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state, which its first step would create; fp16 may skip the first steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
                optimizer.state[parameter] = {"step": step, **moments}
