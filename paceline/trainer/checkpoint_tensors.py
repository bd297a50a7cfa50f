"""The tensors of a training by their key in a checkpoint, each knowing its part of the whole one.

weights/<name>, exp_avg/<name>, exp_avg_sq/<name> and step/<name>, by names in the whole model.
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

from paceline.trainer.parallel.mesh import Mesh, MeshAxis
from paceline.trainer.parallel.tensor import ParamPlan
from paceline.trainer.replica.replica import Replica

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "weights/"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle."""


def tensors(replica: Replica, optimizer: torch.optim.Optimizer, mine: bool) -> dict[str, Tensor]:
    """The training's state by key; sharing memory with it, so that loading fills it.

    `mine` leaves out what another rank writes: copies of tied weights, and, where replicas hold
    equal tensors, those that fall to another replica.
    """
    mesh, slices, states = replica.mesh, replica.slices, optimizer.state
    copies = mesh.replicate if replica.sharded else mesh.data
    tied = {part.tied_copy for part in replica.parts} if mine else set[str | None]()
    by_key: dict[str, Tensor] = {}

    def updated(parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer has of it."""
        return replica.shards.weights.get(parameter, parameter) if replica.shards else parameter

    for i, (name, parameter) in enumerate(replica.named_parameters()):
        if name in tied:
            continue
        plan = replica.tp_plan[name]
        falls_to_me = not mine or i % copies.size == copies.index
        if falls_to_me:
            by_key[f"{WEIGHTS}{name}"] = as_dtensor(plan, parameter.detach(), mesh)
        if slices is not None and parameter in slices.pieces:
            piece = slices.pieces[parameter]
            state, shape = states[piece.weight], tuple(parameter.shape)
            for moment in MOMENTS:
                values = state[moment]
                by_key[f"{moment}/{name}"] = piece_of(plan, values, shape, piece.begin, mesh.tp)
        elif slices is None and updated(parameter) in states and falls_to_me:
            state = states[updated(parameter)]
            for moment in MOMENTS:
                values = spread_like(parameter, state[moment])
                by_key[f"{moment}/{name}"] = as_dtensor(plan, values, mesh)
        else:
            continue
        by_key[f"step/{name}"] = state["step"]
    return by_key


def spread_like(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """`values` of this rank's shard, as a part of the whole that the parameter is spread over."""
    if not isinstance(parameter, DTensor):
        return values
    whole = parameter.device_mesh, parameter.placements
    size = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(values, *whole, run_check=False, **size)


def as_dtensor(plan: ParamPlan, tensor: Tensor, mesh: Mesh) -> Tensor:
    """A tensor that knows which part of the whole one it is."""
    if isinstance(tensor, DTensor) or mesh.tp.size == 1:
        return tensor
    assert mesh.device_mesh is not None
    return DTensor.from_local(tensor, mesh.device_mesh["tp"], [plan.placement], run_check=False)


def piece_of(
    plan: ParamPlan, values: Tensor, local: tuple[int, ...], begin: int, tp: MeshAxis
) -> FlatPiece:
    """`values` (n,), which are elements `begin` on of this tensor rank's part of shape `local`."""
    whole, origin, dim = list(local), [0] * len(local), plan.shard_dim
    if dim is not None:
        whole[dim] *= tp.size
        origin[dim] = tp.index * local[dim]
    boxes = [
        (tuple(o + at for o, at in zip(origin, offsets, strict=True)), sizes)
        for offsets, sizes in rectangles(local, begin, begin + len(values))
    ]
    return FlatPiece(values, torch.Size(whole), boxes)


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Elements `begin` to `end`, row by row, of a tensor, as rectangles in their order."""
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


class FlatPiece(Tensor):
    """A run of a whole tensor's elements in row-major order, which DCP sees as rectangles.

    It has the whole one's size, and takes part in no operation. DCP asks what it asks a DTensor.
    """

    elements: Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(cls, elements: Tensor, whole: torch.Size, boxes: list[Box]) -> FlatPiece:
        """`elements` (n,) in the order of `boxes`, which it fills."""
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, whole, dtype=elements.dtype, device=elements.device
        )

    def __init__(self, elements: Tensor, whole: torch.Size, boxes: list[Box]) -> None:
        assert len(elements) == sum(prod(sizes) for _, sizes in boxes), "boxes hold them"
        self.elements, self.boxes = elements, boxes

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{function} of a piece of a tensor")

    def to(self, *args: Any, **settings: Any) -> FlatPiece:
        """The same piece elsewhere."""
        return FlatPiece(self.elements.to(*args, **settings), self.shape, self.boxes)

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
        raise ValueError(f"{index.fqn} has no part at {index.offset} on this rank")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that its first step would make; fp16 may skip the first steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
                optimizer.state[parameter] = {"step": step, **moments}
