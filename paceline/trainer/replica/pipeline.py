"""Pipeline parallelism: the stages of one rank and the schedule that runs all of them.

Activations and their gradients go from rank to rank. The last stage turns targets into the loss
inside its own forward pass, so that whatever wraps a stage (FSDP's gathering, above all) covers the
head as well.

gpipe        all forward passes, then all backward passes (Huang et al., arXiv:1811.06965);
             breadth-first over several stages a rank (Lamy-Poirier, arXiv:2211.05953)
1f1b         forward and backward passes in turn (Narayanan et al., arXiv:2104.04473, section 2.2)
interleaved  the same over several stages a rank
zero-bubble  weight gradients, taken later, fill the bubble (Qi et al., arXiv:2401.10241, ZB-H1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from paceline.trainer.config import TrainerConfig
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.stages import stages_of


@dataclass(frozen=True)
class StageIO:
    """What travels: (B, T) tokens into the first stage, (B, t, H) between stages, a scalar loss."""

    tokens: tuple[int, int]
    hidden: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def loss_dtype(self) -> torch.dtype:
        """Losses are summed in fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    def input(self, first: bool) -> Tensor:
        """A stage's input, without memory."""
        if first:
            return torch.empty(self.tokens, dtype=torch.int64, device="meta")
        return self.between()

    def output(self, last: bool) -> Tensor:
        """A stage's output, without memory."""
        if last:
            return torch.empty((), dtype=self.loss_dtype, device="meta", requires_grad=True)
        return self.between()

    def between(self) -> Tensor:
        """What one stage sends to the next, without memory."""
        # From PyTorch 2.13 on, no gradient comes back for what is declared to need none.
        return torch.empty(self.hidden, dtype=self.dtype, device="meta", requires_grad=True)


def stage_io(config: TrainerConfig, dtype: torch.dtype) -> StageIO:
    """What travels between the stages of a training that computes in `dtype`."""
    layout = config.layout
    tokens = config.training.seq_len // layout.cp
    part = tokens // layout.tp if layout.sequence_parallel else tokens
    return StageIO(
        (layout.micro_batch, tokens), (layout.micro_batch, part, config.model.hidden_size), dtype
    )


class LocalStage(PipelineStage):
    """A stage whose receive buffers live only while they are in use.

    PyTorch's own hold an input and an output gradient of every micro-batch for good: with full
    recompute that is more than all else that 1f1b keeps.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        num_stages: int,
        axis: MeshAxis,
        io: StageIO,
        device: torch.device,
    ) -> None:
        self.io = io
        self.on_progress: Callable[[], None] = lambda: None
        """Called after every forward and backward pass of a micro-batch."""
        self.nothing = torch.empty(0, device=device)
        super().__init__(
            part,
            index,
            num_stages,
            device,
            input_args=io.input(index == 0),
            output_args=io.output(index == num_stages - 1),
            group=axis.group,
        )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            self._release(infos)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            self._release(infos)
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a micro-batch's input."""
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], requires_grad=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradient of a micro-batch's output."""
        if not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward; its input then lives as long as its gradient needs it."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._release(self.args_recv_info[fwd_chunk_id])
        self.on_progress()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a micro-batch backward."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._release(self.grad_recv_info[bwd_chunk_id])
        # gloo and NCCL send contiguous memory only.
        self.bwd_cache[bwd_chunk_id] = tuple(
            grad if grad is None else grad.contiguous() for grad in self.bwd_cache[bwd_chunk_id]
        )
        self.on_progress()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the later part of a split backward pass; on the first stage that is all of it."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.on_progress()

    def _allocate(self, infos: Iterable[Any], requires_grad: bool) -> None:
        for info in infos:
            info.buffer = torch.empty_like(
                self.io.between(), device=self.device, requires_grad=requires_grad
            )

    def _release(self, infos: Iterable[Any]) -> None:
        for info in infos:
            # The first stage's inputs have no buffers. PyTorch 2.11 cannot stand None for one.
            if getattr(info, "buffer", None) is not None:
                info.buffer = self.nothing


class PipelineRunner:
    """The stages on this rank and the schedule that runs them together with the other ranks'."""

    def __init__(
        self,
        parts: list[Network],
        axis: MeshAxis,
        config: TrainerConfig,
        device: torch.device,
    ) -> None:
        """`parts` are this rank's stages in their order, wrapped by FSDP or not."""
        io = stage_io(config, parts[0].setting.dtype)
        num_stages = axis.size * len(parts)
        if config.layout.schedule == "zero-bubble":
            keep_gathered(parts)
        self.stages = [
            LocalStage(part, index, num_stages, axis, io, device)
            for part, index in zip(parts, stages_of(axis.index, axis.size, len(parts)), strict=True)
        ]
        self.axis = axis
        self.first, self.last = self.stages[0].is_first, self.stages[-1].is_last
        self.no_loss = torch.zeros((), dtype=io.loss_dtype, device=device)
        self.name = config.layout.schedule
        self.num_microbatches = config.num_microbatches
        self.schedule = make_schedule(self.name, self.stages, self.num_microbatches)

    def step(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """The losses of (M, B, T) tokens' micro-batches summed, 0 where the last stage is not.

        Gradients are added up and divided by nothing; FSDP reduces them once, at the end. Every
        stage has the (M, B, n + 1) bounds of the documents from its own loader, if they matter.
        """
        if len(inputs) != self.num_microbatches:
            # While a batch ramps up. A schedule prepares the stages for its own number.
            self.num_microbatches = len(inputs)
            self.schedule = make_schedule(self.name, self.stages, self.num_microbatches)
        labels = targets.flatten(0, 1)
        losses: list[Tensor] = []
        self.schedule.step(
            *([inputs.flatten(0, 1)] if self.first else []),
            # The loss needs the targets, and PyTorch wants to see its own as well.
            **({"targets": labels, "target": labels} if self.last else {}),
            **({} if documents is None else {"documents": documents.flatten(0, 1)}),
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).detach().sum() if losses else self.no_loss

    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """As `step` without gradients, of any number of micro-batches; (M, B) `weights` of samples.

        Every stage takes all micro-batches in turn. What goes back to the first rank, for its next
        stage, is sent when this one is done: it would wait there for a receiver that sends as well.
        """
        losses = self.no_loss.clone()
        for stage in self.stages:
            sent: list[Any] = []
            kept: list[Tensor] = []
            for i, (x, labels) in enumerate(zip(self._inputs(stage, inputs), targets, strict=True)):
                if stage.is_last and weights is not None:
                    stage.submod.sample_weights = weights[i]  # type: ignore[assignment]
                out = stage.submod(
                    x,
                    **({"targets": labels} if stage.is_last else {}),
                    documents=None if documents is None else documents[i],
                )
                if stage.is_last:
                    losses += out
                    continue
                kept.append(out.contiguous())
                if self.axis.index + 1 < self.axis.size:
                    sent.append(self._send(kept[-1]))
            if not stage.is_last and self.axis.index + 1 == self.axis.size:
                sent = [self._send(out) for out in kept]
            for work in sent:
                work.wait()
        return losses

    def _inputs(self, stage: LocalStage, tokens: Tensor) -> Iterator[Tensor]:
        """A stage's inputs, one micro-batch after the other.

        The first rank takes in all that the last one has kept for it before it sends anything on:
        NCCL does a rank's sends and receives in the order in which they were asked for, and the
        last rank asks for its sends first.
        """
        if stage.is_first:
            return iter(tokens)
        if self.axis.index > 0:
            return (self._received(stage) for _ in tokens)
        return iter([self._received(stage) for _ in tokens])

    def _send(self, out: Tensor) -> Any:
        following = self.axis.ranks[(self.axis.index + 1) % self.axis.size]
        return dist.isend(out, following, group=self.axis.group)

    def _received(self, stage: LocalStage) -> Tensor:
        x = torch.empty_like(stage.io.between(), device=stage.device, requires_grad=False)
        before = self.axis.ranks[(self.axis.index - 1) % self.axis.size]
        work = dist.irecv(x, before, group=self.axis.group)
        assert work is not None, "the rank belongs to the pipeline"
        work.wait()
        return x


def keep_gathered(parts: list[Network]) -> None:
    """Keep FSDP's weights gathered from a step's first forward pass to its last backward pass.

    Before it splits a backward pass, PyTorch looks the weights up in the module. Where FSDP has put
    the shards back after the forward pass, it finds those, and the gradients are lost silently.
    """
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False)


def make_schedule(name: str, stages: list[LocalStage], num_microbatches: int) -> Any:
    """PyTorch's schedule of that name over this rank's stages."""
    settings: dict[str, Any] = {"loss_fn": _computed_in_the_stage, "scale_grads": False}
    if name == "zero-bubble":
        return ScheduleInterleavedZeroBubble([*stages], num_microbatches, **settings)
    if len(stages) > 1:
        looped = ScheduleLoopedBFS if name == "gpipe" else ScheduleInterleaved1F1B
        return looped([*stages], num_microbatches, **settings)
    if name == "gpipe":
        return ScheduleGPipe(stages[0], num_microbatches, **settings)
    # PyTorch's 1f1b runs fewer micro-batches than stages; only its constructor refuses them.
    schedule = Schedule1F1B(stages[0], max(num_microbatches, stages[0].num_stages), **settings)
    schedule._n_microbatches = num_microbatches
    return schedule


def _computed_in_the_stage(loss: Tensor, targets: Tensor) -> Tensor:
    return loss
