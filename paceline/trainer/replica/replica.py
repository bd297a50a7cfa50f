"""Replicas of a model on the data axis and their communication.

ZeRO 0  DDP                         parameters, gradients and optimizer state on every rank
ZeRO 1  DDP with sliced updates     optimizer state in equal slices (weight_slices.py)
ZeRO 2  FSDP2, gathered per step    gradients and optimizer state sharded
ZeRO 3  FSDP2                       weights gathered block by block as well

Gradients are averaged over the data axis (dp x cp). ZeRO 2 and 3 reduce them after every
micro-batch, so no rank ever holds all of them; ZeRO 0 and 1 reduce them after the last one. In a
pipeline, and with `layout.gradient_sync: last`, they are reduced after the last micro-batch, and
ZeRO 2 and 3 hold whole gradients until then.

Experts that are spread over ranks (layout.ep) have the gradient of the tokens of `ep` ranks. It is
summed over the dp x cp / ep ranks that hold the same experts: by FSDP, whose unit of a block's
experts has a mesh of its own, or after the backward pass, because DDP leaves experts alone.

The weights may have copies in the compute dtype, refreshed once per step. Without them every GEMM
casts its fp32 weight in every micro-batch, and autograd casts the weight's gradient back before
adding it. That moves 26 instead of 12 bytes per parameter and micro-batch, which on a GPU is a few
percent of the step. The results are identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.measure.clock import StepClock
from paceline.trainer.model.attention import prefer_cudnn_attention
from paceline.trainer.model.context_parallel import exclude_exchanges_from_compile
from paceline.trainer.model.decoder import Decoder
from paceline.trainer.model.document_attention import exclude_documents_from_compile
from paceline.trainer.model.dropout import exclude_rank_rng_from_compile
from paceline.trainer.model.experts import (
    MixtureOfExperts,
    exclude_token_exchange_from_compile,
)
from paceline.trainer.model.layers import Linear, VocabParallelEmbedding
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.collectives import all_reduce, all_reduce_coalesced
from paceline.trainer.parallel.mesh import Mesh, World
from paceline.trainer.parallel.tensor import EXPERT_FSDP_DIM, local, tp_plan_of
from paceline.trainer.replica.weight_slices import LocalShards, WeightSlices

Layer = Linear | VocabParallelEmbedding


class ComputeCopies:
    """Copies in the compute dtype of the weights of linear layers and of the head.

    Layers whose weight has the compute dtype need none.
    """

    def __init__(self, parts: Iterable[Network]) -> None:
        self.weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        for part in parts:
            for layer in layers_with_copies(part):
                if layer.weight.dtype != part.setting.dtype:
                    self._add(layer, part.setting.dtype)

    def _add(self, layer: Layer, dtype: torch.dtype) -> None:
        weight = layer.weight
        copy = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(gradient_hook(weight))
        layer.compute_weight = copy
        self.weights.append(weight)
        self.copies.append(copy.detach())

    def refresh(self) -> None:
        """Copy the current weights."""
        if self.copies:
            weights = [weight.detach() for weight in self.weights]  # ZeRO 1 may have moved them
            torch._foreach_copy_(self.copies, weights)  # pyright: ignore[reportPrivateImportUsage]


def layers_with_copies(part: Network) -> list[Layer]:
    """Return all linear layers, and the embedding where it is tied to the head."""
    layers: list[Layer] = [module for module in part.modules() if isinstance(module, Linear)]
    if isinstance(part, Decoder) and part.part.last and part.head is None:
        layers.append(part.head_table)
    return layers


def expert_layers(part: Network) -> dict[int, MixtureOfExperts]:
    """Return a part's layers with experts by their index in the model."""
    return part.expert_layers if isinstance(part, Decoder) else {}


def gradient_hook(weight: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that moves a copy's gradient to the weight, in the weight's dtype."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None, "autograd calls this after it has set the gradient"
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)

    return add


def shard(part: Network, mesh: Mesh, reshard: bool) -> None:
    """Apply FSDP2 over the shard axis, replicated over the replicate axis.

    `reshard` frees a block's weights after use. The embedding, every block, and the last norm with
    the head are separate units, so that the head's communication overlaps with the blocks.
    """
    assert mesh.device_mesh is not None
    names = ("replicate", "shard") if mesh.replicate.size > 1 else "shard"
    dtype = part.setting.dtype
    mixed = dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,  # inputs have the right dtype, and targets must keep theirs
    )
    settings: dict[str, Any] = {"mesh": mesh.device_mesh[names], "mp_policy": policy}
    if mesh.ep.size > 1:
        of_experts = {**settings, "mesh": mesh.expert_mesh}
        for experts in spread_experts(part):
            fully_shard(
                experts,
                **of_experts,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda _: Shard(EXPERT_FSDP_DIM),
            )
    for block in part.all_blocks():
        fully_shard(block, **settings, reshard_after_forward=reshard)
    # The backward pass starts with the head, so its weights stay gathered.
    for modules in embedding_and_head_units(part):
        fully_shard(modules, **settings, reshard_after_forward=False)
    fully_shard(part, **settings, reshard_after_forward=False)


def spread_experts(part: Network) -> list[nn.Module]:
    """Return the modules whose parameters are stacked weights of experts."""
    return [
        module
        for module in part.modules()
        if any(plan.by_expert for plan in getattr(module, "tp_plan", {}).values())
    ]


def embedding_and_head_units(part: Network) -> list[list[nn.Module]]:
    """Return the FSDP units before and after the blocks.

    A tied embedding is used at both ends, so it belongs to the root unit.
    """
    if not isinstance(part, Decoder) or part.model.tied_embeddings:
        return []
    output = (part.final_norm, part.project_out, part.head) if part.part.last else ()
    units = ((part.embedding,), output)
    if part.mtp:
        # A unit of several modules must run all of them, but MTP modules use the head alone.
        units = ((part.embedding,), *((module,) for module in output))
    return [[m for m in unit if m is not None] for unit in units if any(unit)]


def reshard(part: Network) -> None:
    """Free the gathered weights, which FSDP does only in a backward pass."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


COMPILER = "inductor"


class Runner(Protocol):
    """Interface of `PipelineRunner`, whose module takes a second to import."""

    stages: list[Any]
    """This rank's stages; `on_progress` is called after every pass of a micro-batch."""

    def step(self, batch: LocalBatch) -> Tensor:
        """Run forward and backward passes; see `PipelineRunner.step`."""
        ...

    def evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        """Return the summed loss without gradients; see `PipelineRunner.evaluate`."""
        ...


class Replica:
    """This rank's parts of a model; subclasses communicate between replicas."""

    sharded = False

    def __init__(self, parts: list[Network], mesh: Mesh) -> None:
        self.parts, self.mesh = parts, mesh
        self.tp_plan = {n: plan for part in parts for n, plan in tp_plan_of(part).items()}
        """Sharding of each parameter over tensor ranks, by its name in the whole model."""
        spread = mesh.ep.size > 1
        self.experts = {n for n, plan in self.tp_plan.items() if spread and plan.by_expert}
        """Names of the parameters that expert ranks share out."""
        self.stages: list[Any] = []
        """The pipeline stages of this rank; empty without a pipeline."""
        self.module: nn.Module = parts[0]
        """The module that runs a micro-batch; unused in a pipeline."""
        self.acc_dtype = torch.promote_types(parts[0].setting.dtype, torch.float32)
        """The dtype in which losses and norms are summed."""
        self.copies: ComputeCopies | None = None
        """Weights in the compute dtype, where they are stored between steps."""
        self.slices: WeightSlices | None = None
        """The weights that this rank updates with ZeRO 1."""
        self.shards: LocalShards | None = None
        """The weights of this rank with ZeRO 2 and 3."""

    def zero(self) -> Tensor:
        """Return a fp64 zero on the model's device."""
        device = local(next(self.parts[0].parameters())).device
        return torch.zeros((), dtype=torch.float64, device=device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by their name in the whole model, tied copies included."""
        for part in self.parts:
            yield from part.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the choice biases of this rank's routers, which are equal on all data ranks."""
        for part in self.parts:
            yield from part.named_buffers()

    def train(self, batch: LocalBatch, scale: float) -> Tensor:
        """Run forward and backward passes of all micro-batches and reduce the gradients.

        Return the summed loss times `scale`; 0 on a pipeline's other stages.
        """
        for part in self.parts:
            part.scale = scale
        self._refresh_copies()
        with prefer_cudnn_attention(batch.inputs.device):
            loss = self._train(batch).to(self.acc_dtype)
        self._finalize_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        """Return this rank's summed loss of all micro-batches, without gradients or dropout.

        `weights` (M, B) are the weights of each sample's targets; None for equal weights. The
        result is 0 on a pipeline's other stages.
        """
        self._refresh_copies()
        for part in self.parts:
            part.eval()
            part.scale = 1.0
        try:
            with prefer_cudnn_attention(batch.inputs.device):
                return self._evaluate(batch, weights).to(self.acc_dtype)
        finally:
            for part in self.parts:
                part.train()
                part.sample_weights = None
                reshard(part)

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return this rank's gradients as plain tensors."""
        return [local(gradient) for _, gradient in self._named_gradients()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad()

    @torch.no_grad()
    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return (L2 norm of the whole model's gradients, the last stage's loss)."""
        mesh, gradients = self.mesh, self._gradients_of_norm()
        squares = _squares(gradients[False], loss)
        if self.experts:
            of_experts = _squares(gradients[True], loss)
            # Sharded parts are summed with all others below.
            squares += of_experts if self.sharded else all_reduce(of_experts, mesh.ep)
        all_reduce(squares, mesh.tp)
        if self.sharded:
            all_reduce(squares, mesh.shard)
        squares, loss = all_reduce(torch.stack([squares, loss]), mesh.pp)
        return squares.sqrt(), loss

    def expert_load(self) -> tuple[list[int], Tensor] | None:
        """Return this rank's layers with experts, and their rows (L, E) in the last step.

        They are summed over all ranks with other tokens. None without such layers.
        """
        layers = {i: ffn for part in self.parts for i, ffn in expert_layers(part).items()}
        if not layers:
            return None
        rows = torch.stack([layers[i].take_load() for i in sorted(layers)])
        return sorted(layers), all_reduce(all_reduce(rows, self.mesh.shard), self.mesh.replicate)

    def take_mtp_loss(self) -> Tensor | None:
        """Return the scaled mean loss of the replica's MTP modules in the last step, if any."""
        *_, part = self.parts
        if not isinstance(part, Decoder) or not part.model.mtp_layers:
            return None
        loss = part.take_mtp_loss() if part.mtp else self.zero()
        return None if loss is None else all_reduce(loss.to(self.zero()), self.mesh.pp)

    def update_choice_biases(self, load: tuple[list[int], Tensor] | None) -> None:
        """Move the routers' choice biases towards balance, by the load of a step on all ranks."""
        if load is None:
            return
        layers = {i: ffn for part in self.parts for i, ffn in expert_layers(part).items()}
        for i, rows in zip(*load, strict=True):
            layers[i].router.update_choice_bias(rows)

    def _refresh_copies(self) -> None:
        if self.copies is not None:
            self.copies.refresh()

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained parameter's gradient; raise RuntimeError where one is missing."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad
            elif parameter.requires_grad:
                raise RuntimeError(f"{name} has no gradient in this layout")

    def _train(self, batch: LocalBatch) -> Tensor:
        last = len(batch.inputs) - 1
        total = torch.zeros((), device=batch.inputs.device)
        for i, (inputs, targets, extras) in enumerate(batch.microbatches()):
            total = total + self._train_one(inputs, targets, extras, last=i == last)
        return total

    def _evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        total = torch.zeros((), dtype=self.acc_dtype, device=batch.inputs.device)
        part = self.parts[0]  # without the DDP wrapper
        for i, (inputs, targets, extras) in enumerate(batch.microbatches()):
            part.sample_weights = None if weights is None else weights[i]
            total += part(inputs, targets, **extras)
        return total

    def _train_one(
        self, inputs: Tensor, targets: Tensor, extras: dict[str, Tensor], last: bool
    ) -> Tensor:
        """Run one micro-batch and return its scaled loss; `last` is the last one of a step."""
        loss = self.module(inputs, targets, **extras)
        loss.backward()
        return loss.detach()

    def _finalize_gradients(self) -> None:
        """Sum partial gradients over tensor ranks and over tied pipeline stages.

        Gradients of experts are averages over `expert_data` by now, of sums over `ep` ranks.
        """
        if self.experts:
            by_name = self._named_gradients()
            of_experts = [local(grad) for name, grad in by_name if name in self.experts]
            torch._foreach_mul_(of_experts, 1 / self.mesh.ep.size)  # pyright: ignore[reportPrivateImportUsage]
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
        """Sum the gradient of an embedding that the first and the last stage share."""
        pp = self.mesh.pp
        ends = {0: pp.size - 1, pp.size - 1: 0}
        gradient = dict(self._named_gradients()).get("embedding.weight")
        if pp.index not in ends or gradient is None or not self.parts[0].shares_embedding:
            return
        local_grad = local(gradient)
        other = torch.empty_like(local_grad)
        peer = pp.ranks[ends[pp.index]]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, local_grad, peer, pp.group),
                dist.P2POp(dist.irecv, other, peer, pp.group),
            ]
        )
        for work in works:
            work.wait()
        local_grad.add_(other)

    def _gradients_of_norm(self) -> dict[bool, list[Tensor]]:
        """Return the gradients that this rank contributes to the replica's norm.

        Those of experts that ranks share out are the list `True`, all others `False`.
        """
        copies, first = {part.tied_copy for part in self.parts}, self.mesh.tp.index == 0
        gradients: dict[bool, list[Tensor]] = {False: [], True: []}
        for name, gradient in self._named_gradients():
            if name not in copies and (first or self.tp_plan[name].shard_dim is not None):
                gradients[name in self.experts].append(local(gradient))
        return gradients

    def _reduce_gradients(self, of_experts: bool) -> None:
        """Average gradients over the data ranks with the same weights (ZeRO 0 and 1)."""
        gradients = (
            g for name, g in self._named_gradients() if (name in self.experts) == of_experts
        )
        axis = self.mesh.expert_data if of_experts else self.mesh.data
        all_reduce_coalesced(gradients, axis, 1 / axis.size)


class DdpReplica(Replica):
    """DDP: gradient buckets are averaged while the backward pass still runs."""

    def __init__(self, parts: list[Network], mesh: Mesh, world: World, steps: StepClock) -> None:
        super().__init__(parts, mesh)
        self.steps = steps
        ids = [world.device.index] if world.device.type == "cuda" else None
        group = mesh.data.group
        # Buffers are equal, as all ranks update them by the same load.
        buffers = (name for name, _ in parts[0].named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            parts[0], {*self.experts, *buffers}
        )
        self.ddp = DistributedDataParallel(
            parts[0], device_ids=ids, process_group=group, gradient_as_bucket_view=True
        )
        # DDP inspects a hook's annotations and rejects postponed ones, so this hook has none.
        self.ddp.register_comm_hook(
            steps, lambda steps, bucket: average_bucket(steps, bucket, group)
        )
        self.module = self.ddp

    def _train_one(
        self, inputs: Tensor, targets: Tensor, extras: dict[str, Tensor], last: bool
    ) -> Tensor:
        """Run one micro-batch; the last one reduces the gradients."""
        if not last:
            with self.ddp.no_sync():
                return super()._train_one(inputs, targets, extras, last)
        loss = super()._train_one(inputs, targets, extras, last)
        self.steps.end_wait()
        if self.experts:
            self._reduce_gradients(of_experts=True)
        return loss


class ShardedReplica(Replica):
    """FSDP2: blocks are gathered before use, gradients are reduce-scattered."""

    sharded = True

    def __init__(
        self, parts: list[Network], mesh: Mesh, keep_gathered: bool, sync_once: bool
    ) -> None:
        """Wrap parts that `shard` has sharded.

        `keep_gathered` gathers weights once per step (ZeRO 2). `sync_once` reduces gradients after
        the last micro-batch, and holds them whole until then.
        """
        super().__init__(parts, mesh)
        self.keep_gathered, self.sync_once = keep_gathered, sync_once

    def _train_one(
        self, inputs: Tensor, targets: Tensor, extras: dict[str, Tensor], last: bool
    ) -> Tensor:
        """Run one micro-batch with the configured communication."""
        assert isinstance(self.module, FSDPModule)
        if self.sync_once:
            self.module.set_requires_gradient_sync(last)
        if self.keep_gathered:
            self.module.set_reshard_after_backward(last)
        return super()._train_one(inputs, targets, extras, last)


class PipelineReplica(Replica):
    """One or more stages of a pipeline, `sharded` if `shard` was applied to them."""

    def __init__(self, parts: list[Network], mesh: Mesh, runner: Runner, sharded: bool) -> None:
        super().__init__(parts, mesh)
        self.runner, self.sharded = runner, sharded
        self.stages = runner.stages

    def _train(self, batch: LocalBatch) -> Tensor:
        loss = self.runner.step(batch)
        if not self.sharded:
            self._reduce_gradients(of_experts=False)
            if self.experts:
                self._reduce_gradients(of_experts=True)
        return loss

    def _evaluate(self, batch: LocalBatch, weights: Tensor | None) -> Tensor:
        return self.runner.evaluate(batch, weights)


def _squares(gradients: list[Tensor], like: Tensor) -> Tensor:
    """Return the sum of squares of all elements, with the dtype and device of `like`."""
    squares = torch.zeros_like(like)
    if gradients:
        squares += torch.nn.utils.get_total_norm(gradients, foreach=True).square()
    return squares


def compile_blocks(parts: list[Network]) -> None:
    """Apply torch.compile to every block; the first step compiles."""
    exclude_exchanges_from_compile()
    exclude_documents_from_compile()
    exclude_rank_rng_from_compile()
    # Each block is compiled by itself; DDP's splitter would split it again at bucket boundaries.
    torch._dynamo.config.optimize_ddp = False  # pyright: ignore[reportPrivateImportUsage]
    for part in parts:
        part.compiled = True
        exclude_token_exchange_from_compile(part)
        for block in part.all_blocks():
            block.compile(backend=COMPILER)


def average_bucket(
    steps: StepClock, bucket: Any, group: dist.ProcessGroup | None
) -> torch.futures.Future[Tensor]:
    """Average a gradient bucket over ranks (DDP communication hook)."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    if bucket.is_last():
        steps.begin_wait()
    return work.get_future().then(lambda future: future.value()[0])
