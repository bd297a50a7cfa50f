"""How one model is kept equal over the ranks: what is exchanged, and when.

stage 0  DDP                      parameters, gradients and optimizer state on every rank
stage 1  DDP, sliced updates      optimizer state in equal slices (weight_slices.py)
stage 2  FSDP2, kept gathered     gradients and optimizer state sharded; weights between steps too
stage 3  FSDP2                    weights gathered block by block as well

All stages average gradients over the data axis (dp x cp). Stages 2 and 3 reduce them after every
micro-batch, so they are never held whole; stages 0 and 1 after the last one. In a pipeline, and
with `layout.gradient_sync: last`, all of them are exchanged after the last micro-batch, and stages
2 and 3 hold whole gradients until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import StepClock
from paceline.trainer.model.attention import prefer_cudnn_attention
from paceline.trainer.model.context_parallel import exclude_exchanges_from_compile
from paceline.trainer.model.decoder import Decoder
from paceline.trainer.model.document_attention import exclude_documents_from_compile
from paceline.trainer.model.dropout import exclude_rank_rng_from_compile
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.collectives import all_reduce, all_reduce_coalesced
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.parallel.tensor import local, tp_plan_of
from paceline.trainer.replica.compute_copies import ComputeCopies
from paceline.trainer.replica.weight_slices import LocalShards, WeightSlices


def shard(part: Network, mesh: Mesh, reshard: bool) -> None:
    """FSDP2 over the shard axis, copied over the replicate axis; `reshard` frees used blocks.

    Embedding, every block, and last norm with head are units of their own, so that blocks run
    beside the gathering of the head and the reduction of its gradient. The root has what is left.
    """
    assert mesh.device_mesh is not None
    names = ("replicate", "shard") if mesh.replicate.size > 1 else "shard"
    dtype = part.setting.dtype
    mixed = dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,  # blocks get their dtype already, and targets keep theirs
    )
    settings: dict[str, Any] = {"mesh": mesh.device_mesh[names], "mp_policy": policy}
    for block in part.blocks.values():
        fully_shard(block, **settings, reshard_after_forward=reshard)
    # The head is needed again as soon as the forward pass ends.
    for modules in ends_of(part):
        fully_shard(modules, **settings, reshard_after_forward=False)
    fully_shard(part, **settings, reshard_after_forward=False)


def ends_of(part: Network) -> list[list[nn.Module]]:
    """What is gathered at once before the blocks, and what behind them.

    A table that embeds and is the head as well is needed at both ends, so the root keeps it.
    """
    if not isinstance(part, Decoder) or part.model.tied_embeddings:
        return []
    behind = (part.final_norm, part.project_out, part.head) if part.part.last else ()
    units = ((part.embedding,), behind)
    return [[m for m in unit if m is not None] for unit in units if any(unit)]


def reshard(part: Network) -> None:
    """Free what FSDP has gathered: without a backward pass nothing else does."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


COMPILER = "inductor"


class Runner(Protocol):
    """What runs a pipeline's micro-batches."""

    stages: list[Any]
    """This rank's stages; their `on_progress` is called after every pass of a micro-batch."""

    def step(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Summed scaled loss of (M, B, T) tokens, 0 without the last stage; gradients are added."""
        ...

    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """As `step` without gradients, of any number of micro-batches; (M, B) `weights`."""
        ...


class Replica:
    """This rank's parts of a model; subclasses differ in what they exchange between replicas."""

    sharded = False

    def __init__(self, parts: list[Network], mesh: Mesh) -> None:
        self.parts, self.mesh = parts, mesh
        self.tp_plan = {n: plan for part in parts for n, plan in tp_plan_of(part).items()}
        """How tensor ranks hold each parameter, by its name in the whole model."""
        self.stages: list[Any] = []
        """What runs the parts in a pipeline."""
        self.module: nn.Module = parts[0]
        """What a micro-batch goes through; a pipeline has a runner instead."""
        self.wide = torch.promote_types(parts[0].setting.dtype, torch.float32)
        """What losses and norms are summed in."""
        self.copies: ComputeCopies | None = None
        """Weights in the compute dtype, where they are kept between steps."""
        self.slices: WeightSlices | None = None
        """What this rank updates of the weights, where ranks share that (ZeRO 1)."""
        self.shards: LocalShards | None = None
        """What this rank has of the weights, where they are spread (ZeRO 2 and 3)."""

    def zero(self) -> Tensor:
        """A double 0 on the model's device."""
        device = local(next(self.parts[0].parameters())).device
        return torch.zeros((), dtype=torch.float64, device=device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of this rank by their name in the whole model, tied copies included."""
        for part in self.parts:
            yield from part.named_parameters()

    def train(self, batch: LocalBatch, scale: float) -> Tensor:
        """Summed loss of all micro-batches times `scale`, with its gradients exchanged.

        A pipeline's other stages see 0 instead of the loss.
        """
        for part in self.parts:
            part.scale = scale
        self._refresh_copies()
        with prefer_cudnn_attention(batch.inputs.device):
            loss = self._train(batch).to(self.wide)
        self._finalize_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        """Summed loss of all micro-batches, of this rank alone and without gradients or dropping.

        `weights` (M, B) are what each target of a sample counts, None where all count the same. A
        pipeline's other stages see 0.
        """
        self._refresh_copies()
        for part in self.parts:
            part.eval()
            part.scale = 1.0
        try:
            with prefer_cudnn_attention(batch.inputs.device):
                return self._evaluate(batch, weights).to(self.wide)
        finally:
            for part in self.parts:
                part.train()
                part.sample_weights = None
                reshard(part)

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """This rank's gradients, as plain tensors."""
        return [local(gradient) for _, gradient in self._named_gradients()]

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for part in self.parts:
            part.zero_grad()

    @torch.no_grad()
    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """(L2 norm over the whole model's gradients, the loss that the last stage found)."""
        mesh, gradients = self.mesh, self._own_gradients()
        squares = torch.zeros_like(loss)
        if gradients:
            squares += torch.nn.utils.get_total_norm(gradients, foreach=True).square()
        all_reduce(squares, mesh.tp)
        if self.sharded:
            all_reduce(squares, mesh.shard)
        squares, loss = all_reduce(torch.stack([squares, loss]), mesh.pp)
        return squares.sqrt(), loss

    def _refresh_copies(self) -> None:
        if self.copies is not None:
            self.copies.refresh()

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter's gradient; raises RuntimeError where one is missing."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad
            elif parameter.requires_grad:
                raise RuntimeError(f"{name} got no gradient in this layout")

    def _train(self, batch: LocalBatch) -> Tensor:
        last = len(batch.inputs) - 1
        total = torch.zeros((), device=batch.inputs.device)
        for i, arguments in enumerate(batch.microbatches()):
            total = total + self._train_one(arguments, last=i == last)
        return total

    def _evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        total = torch.zeros((), dtype=self.wide, device=batch.inputs.device)
        part = self.parts[0]  # without DDP around it, which has nothing to do here
        for i, arguments in enumerate(batch.microbatches()):
            part.sample_weights = None if weights is None else weights[i]
            total += part(*arguments)
        return total

    def _train_one(self, arguments: tuple[Tensor, ...], last: bool) -> Tensor:
        """Scaled loss of one micro-batch, with its gradients added; `last` of its step."""
        loss = self.module(*arguments)
        loss.backward()
        return loss.detach()

    def _finalize_gradients(self) -> None:
        """Sum what tensor ranks and tied stages each hold a share of."""
        if self.mesh.tp.size > 1:
            sequence_parallel = self.parts[0].setting.tp.sequence_parallel
            partial = (
                grad
                for name, grad in self._named_gradients()
                if self.tp_plan[name].sums_grad(sequence_parallel)
            )
            all_reduce_coalesced(map(local, partial), self.mesh.tp)
        if self.mesh.pp.size > 1:
            self._exchange_tied()

    def _exchange_tied(self) -> None:
        """First and last stage hold one weight: each adds the other's gradient to its own."""
        pp = self.mesh.pp
        ends = {0: pp.size - 1, pp.size - 1: 0}
        gradient = dict(self._named_gradients()).get("embedding.weight")
        if not self.parts[0].model.tied_embeddings or pp.index not in ends or gradient is None:
            return
        mine = local(gradient)
        other = torch.empty_like(mine)
        peer = pp.ranks[ends[pp.index]]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, peer, pp.group),
                dist.P2POp(dist.irecv, other, peer, pp.group),
            ]
        )
        for work in works:
            work.wait()
        mine.add_(other)

    def _own_gradients(self) -> list[Tensor]:
        """Gradients that no other rank of the replica counts."""
        copies, first = {part.tied_copy for part in self.parts}, self.mesh.tp.index == 0
        return [
            local(gradient)
            for name, gradient in self._named_gradients()
            if name not in copies and (first or self.tp_plan[name].shard_dim is not None)
        ]


class DdpReplica(Replica):
    """DDP: buckets of gradients are averaged while the backward pass still runs."""

    def __init__(self, parts: list[Network], mesh: Mesh, world: World, steps: StepClock) -> None:
        super().__init__(parts, mesh)
        self.steps = steps
        ids = [world.device.index] if world.device.type == "cuda" else None
        group = mesh.data.group
        self.ddp = DistributedDataParallel(
            parts[0], device_ids=ids, process_group=group, gradient_as_bucket_view=True
        )
        # DDP reads a hook's annotations and refuses postponed ones, so it gets a hook without any.
        self.ddp.register_comm_hook(
            steps, lambda steps, bucket: average_bucket(steps, bucket, group)
        )
        self.module = self.ddp

    def _train_one(self, arguments: tuple[Tensor, ...], last: bool) -> Tensor:
        """Gradients are exchanged in the last micro-batch."""
        if not last:
            with self.ddp.no_sync():
                return super()._train_one(arguments, last)
        loss = super()._train_one(arguments, last)
        self.steps.end_wait()
        return loss


class ShardedReplica(Replica):
    """FSDP2: blocks are gathered before use, gradients reduced to the part that a rank owns."""

    sharded = True

    def __init__(
        self, parts: list[Network], mesh: Mesh, keep_gathered: bool, sync_once: bool
    ) -> None:
        """`parts` were made by `shard`; `keep_gathered` gathers weights once a step (stage 2).

        `sync_once` reduces gradients after the last micro-batch, and holds them whole until then.
        """
        super().__init__(parts, mesh)
        self.keep_gathered, self.sync_once = keep_gathered, sync_once

    def _train_one(self, arguments: tuple[Tensor, ...], last: bool) -> Tensor:
        """Stage 2 gathers the weights once a step."""
        assert isinstance(self.module, FSDPModule)
        if self.sync_once:
            self.module.set_requires_gradient_sync(last)
        if self.keep_gathered:
            self.module.set_reshard_after_backward(last)
        return super()._train_one(arguments, last)


class PipelineReplica(Replica):
    """One or more stages of a pipeline; `sharded` ones were made by `shard`."""

    def __init__(self, parts: list[Network], mesh: Mesh, runner: Runner, sharded: bool) -> None:
        super().__init__(parts, mesh)
        self.runner, self.sharded = runner, sharded
        self.stages = runner.stages

    def _train(self, batch: LocalBatch) -> Tensor:
        loss = self.runner.step(batch.inputs, batch.targets, *batch.extras)
        if not self.sharded:
            all_reduce_coalesced(self.gradients(), self.mesh.data, 1 / self.mesh.data.size)
        return loss

    def _evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        return self.runner.evaluate(batch.inputs, batch.targets, weights, *batch.extras)


def compile_blocks(parts: list[Network]) -> None:
    """torch.compile for every block; the first step pays for it."""
    exclude_exchanges_from_compile()
    exclude_documents_from_compile()
    exclude_rank_rng_from_compile()
    # Blocks are compiled one by one: DDP's splitter would cut them again at its buckets' ends.
    torch._dynamo.config.optimize_ddp = False  # pyright: ignore[reportPrivateImportUsage]
    for part in parts:
        part.compiled = True
        for block in part.blocks.values():
            block.compile(backend=COMPILER)


def average_bucket(
    steps: StepClock, bucket: Any, group: dist.ProcessGroup | None
) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the mean over ranks; after the last bucket it only waits."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    if bucket.is_last():
        steps.begin_wait()
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[Any]) -> Tensor:
    return future.value()[0]
