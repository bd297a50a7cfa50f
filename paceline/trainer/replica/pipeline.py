"""Pipeline parallelism: the stages of one rank and the schedule that runs them.

The last stage computes the loss in its own forward pass, so that FSDP's wrapper covers the head as
well.

gpipe        all forward passes, then all backward passes (Huang et al., arXiv:1811.06965);
             breadth-first over several stages a rank (Lamy-Poirier, arXiv:2211.05953)
1f1b         alternating forward and backward passes (Narayanan et al., arXiv:2104.04473, 2.2)
interleaved  the same over several stages a rank
zero-bubble  delayed weight gradients fill the bubble (Qi et al., arXiv:2401.10241, ZB-H1)
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
from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.model.network import Network
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.stages import local_stages


@dataclass(frozen=True)
class StageIO:
    """Shapes of stage inputs and outputs: (B, T) tokens, (B, t, H) hidden states, a scalar loss."""

    tokens: tuple[int, int]
    hidden: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of losses, fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    def input(self, first: bool) -> Tensor:
        """Return a stage's input on the meta device."""
        if first:
            return torch.empty(self.tokens, dtype=torch.int64, device="meta")
        return self.hidden_states()

    def output(self, last: bool) -> Tensor:
        """Return a stage's output on the meta device."""
        if last:
            return torch.empty((), dtype=self.loss_dtype, device="meta", requires_grad=True)
        return self.hidden_states()

    def hidden_states(self) -> Tensor:
        """Return the hidden states between two stages on the meta device."""
        # From PyTorch 2.13 on, a tensor declared without requires_grad receives no gradient.
        return torch.empty(self.hidden, dtype=self.dtype, device="meta", requires_grad=True)


def stage_io(config: TrainerConfig, dtype: torch.dtype) -> StageIO:
    """Return the inputs and outputs of the stages for a compute dtype."""
    layout = config.layout
    tokens = config.training.seq_len // layout.cp
    part = tokens // layout.tp if layout.sequence_parallel else tokens
    return StageIO(
        (layout.micro_batch, tokens), (layout.micro_batch, part, config.model.hidden_size), dtype
    )


class LocalStage(PipelineStage):
    """A stage that allocates its receive buffers only while they are in use.

    PyTorch allocates an input and an output gradient of every micro-batch for the whole run. With
    full recompute that is more than everything else that 1f1b stores.
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
        """Callback after every forward and backward pass of a micro-batch."""
        self.empty_buffer = torch.empty(0, device=device)
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
        """Return the receive operations of a micro-batch's input."""
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], requires_grad=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive operations of a micro-batch's output gradient."""
        if not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward; autograd then owns its input."""
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
        """Run the weight gradients of a split backward pass; on the first stage, all of it."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.on_progress()

    def _allocate(self, infos: Iterable[Any], requires_grad: bool) -> None:
        for info in infos:
            info.buffer = torch.empty_like(
                self.io.hidden_states(), device=self.device, requires_grad=requires_grad
            )

    def _release(self, infos: Iterable[Any]) -> None:
        for info in infos:
            # The first stage's inputs have no buffers. PyTorch 2.11 rejects None as a buffer.
            if getattr(info, "buffer", None) is not None:
                info.buffer = self.empty_buffer


class PipelineRunner:
    """This rank's pipeline stages and their schedule."""

    def __init__(
        self,
        parts: list[Network],
        axis: MeshAxis,
        config: TrainerConfig,
        device: torch.device,
    ) -> None:
        """Create the stages of `parts`, in pipeline order, with or without FSDP."""
        io = stage_io(config, parts[0].setting.dtype)
        num_stages = axis.size * len(parts)
        if config.layout.schedule == "zero-bubble":
            keep_weights_gathered(parts)
        self.stages = [
            LocalStage(part, index, num_stages, axis, io, device)
            for part, index in zip(
                parts, local_stages(axis.index, axis.size, len(parts)), strict=True
            )
        ]
        self.axis = axis
        self.first, self.last = self.stages[0].is_first, self.stages[-1].is_last
        self.no_loss = torch.zeros((), dtype=io.loss_dtype, device=device)
        self.name = config.layout.schedule
        self.num_microbatches = config.num_microbatches
        self.schedule = make_schedule(self.name, self.stages, self.num_microbatches)

    def step(self, batch: LocalBatch) -> Tensor:
        """Return the summed scaled loss of (M, B, T) tokens; 0 on ranks without the last stage.

        Gradients are summed over micro-batches; FSDP reduces them once, at the end. Further
        arguments, such as the bounds of documents, come from each stage's own loader.
        """
        if len(batch.inputs) != self.num_microbatches:
            # During a batch ramp-up. A schedule is built for one number of micro-batches.
            self.num_microbatches = len(batch.inputs)
            self.schedule = make_schedule(self.name, self.stages, self.num_microbatches)
        labels = batch.targets.flatten(0, 1)
        losses: list[Tensor] = []
        self.schedule.step(
            *([batch.inputs.flatten(0, 1)] if self.first else []),
            # The stage needs "targets" for its loss; PyTorch requires "target" as well.
            **({"targets": labels, "target": labels} if self.last else {}),
            **{name: extra.flatten(0, 1) for name, extra in batch.extras.items()},
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).detach().sum() if losses else self.no_loss

    def evaluate(self, batch: LocalBatch, weights: Tensor | None = None) -> Tensor:
        """Return the summed loss without gradients; (M, B) `weights` of samples.

        Any number of micro-batches is allowed. Every stage runs all of them in turn. The last rank
        sends its outputs back to the first rank only when its stage is complete; otherwise both
        would wait for a receiver.
        """
        losses = self.no_loss.clone()
        for stage in self.stages:
            sends: list[Any] = []
            outputs: list[Tensor] = []
            stage_inputs = self._inputs(stage, batch.inputs)
            microbatches = zip(stage_inputs, batch.microbatches(), strict=True)
            for i, (x, (_, labels, extras)) in enumerate(microbatches):
                if stage.is_last and weights is not None:
                    stage.submod.sample_weights = weights[i]  # type: ignore[assignment]
                out = stage.submod(x, **({"targets": labels} if stage.is_last else {}), **extras)
                if stage.is_last:
                    losses += out
                    continue
                outputs.append(out.contiguous())
                if self.axis.index + 1 < self.axis.size:
                    sends.append(self._send(outputs[-1]))
            if not stage.is_last and self.axis.index + 1 == self.axis.size:
                sends = [self._send(out) for out in outputs]
            for work in sends:
                work.wait()
        return losses

    def _inputs(self, stage: LocalStage, tokens: Tensor) -> Iterator[Tensor]:
        """Yield a stage's inputs, one micro-batch after the other.

        The first rank receives all outputs of the last one before it sends anything: NCCL runs
        sends and receives in the order of the calls, and the last rank calls its sends first.
        """
        if stage.is_first:
            return iter(tokens)
        if self.axis.index > 0:
            return (self._receive(stage) for _ in tokens)
        return iter([self._receive(stage) for _ in tokens])

    def _send(self, out: Tensor) -> Any:
        next_rank = self.axis.ranks[(self.axis.index + 1) % self.axis.size]
        return dist.isend(out, next_rank, group=self.axis.group)

    def _receive(self, stage: LocalStage) -> Tensor:
        x = torch.empty_like(stage.io.hidden_states(), device=stage.device, requires_grad=False)
        previous = self.axis.ranks[(self.axis.index - 1) % self.axis.size]
        work = dist.irecv(x, previous, group=self.axis.group)
        assert work is not None, "the rank belongs to the pipeline"
        work.wait()
        return x


def keep_weights_gathered(parts: list[Network]) -> None:
    """Keep FSDP's weights gathered from a step's first forward pass to its last backward pass.

    Before it splits a backward pass, PyTorch reads the weights from the module. If FSDP has put the
    shards back by then, PyTorch finds those, and the gradients are lost silently.
    """
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False)


def make_schedule(name: str, stages: list[LocalStage], num_microbatches: int) -> Any:
    """Return PyTorch's schedule of this name over this rank's stages."""
    # The last stage's output is the loss itself.
    settings: dict[str, Any] = {"loss_fn": lambda loss, _targets: loss, "scale_grads": False}
    if name == "zero-bubble":
        return ScheduleInterleavedZeroBubble([*stages], num_microbatches, **settings)
    if len(stages) > 1:
        schedule = ScheduleLoopedBFS if name == "gpipe" else ScheduleInterleaved1F1B
        return schedule([*stages], num_microbatches, **settings)
    if name == "gpipe":
        return ScheduleGPipe(stages[0], num_microbatches, **settings)
    # PyTorch's 1f1b runs fewer micro-batches than stages; only its constructor rejects them.
    schedule = Schedule1F1B(stages[0], max(num_microbatches, stages[0].num_stages), **settings)
    schedule._n_microbatches = num_microbatches
    return schedule
