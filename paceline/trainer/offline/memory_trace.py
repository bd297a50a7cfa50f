"""Trace the memory of an optimizer step on tensors without memory.

Run as python -m paceline.trainer.offline.memory_trace '{"trainer": {...}, ...}'.

The argument is {"trainer": trainer.json, "size": ranks, "ranks": [the traced ranks]}. The process
takes each rank's place in a world without communication, builds the trainer's own model and trains
two steps, the second with torch's memory tracker. It prints a JSON line per rank: {"event":
"trace", "rank", "torch", "kernels", "num_microbatches", "peak_bytes", "parts_bytes",
"at_peak_bytes"}.

Fakes replace what cannot run on tensors without memory: DDP, and the kernels of a GPU. Each keeps
as many bytes for as long as the original, and computes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, LocalBatch, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.measure.clock import HostClock, StepClock
from paceline.trainer.measure.event_log import EventLog
from paceline.trainer.measure.memory import MemoryWatch
from paceline.trainer.parallel.mesh import Mesh, MeshAxis, World, make_mesh
from paceline.trainer.parallel.token_exchange import TokenExchange
from paceline.trainer.replica.assembly import make_replica
from paceline.trainer.trainer import Trainer


class BucketedGradients(nn.Module):
    """Fake DistributedDataParallel; gradients are views of its buckets, which outlive steps."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self._exchanges = True
        self._buckets: dict[nn.Parameter, Tensor] = {}
        ignored_names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._trainable = [
            p
            for name, p in module.named_parameters()
            if p.requires_grad and name not in ignored_names
        ]
        for parameter in self._trainable:
            parameter.register_post_accumulate_grad_hook(self._take)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Iterable[str]
    ) -> None:
        """Leave the gradients of these parameters out of the buckets, as DDP does."""
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Do nothing, because there is no communication."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enclose a micro-batch whose gradients stay where autograd puts them."""
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def forward(self, *arguments: Tensor) -> Any:
        """Run the module; DDP rebuilds its buckets in the second step, which is traced."""
        if self._exchanges:
            self._buckets = {p: torch.zeros_like(p, requires_grad=False) for p in self._trainable}
        return self.module(*arguments)

    def _take(self, parameter: Tensor) -> None:
        if self._exchanges and isinstance(parameter, nn.Parameter):
            parameter.grad = self._buckets[parameter]


class FusedAttention(torch.autograd.Function):
    """Flash attention: (B, N, Tq, D) over (B, K, Tk, D); keeps inputs, output and a sum per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel; keeps its input, its weight and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        row = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, row)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class FusedDropout(torch.autograd.Function):
    """Dropout in one kernel; keeps a byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.empty_like(grad)


def dropout(x: Tensor, p: float = 0.5, *_: Any) -> Tensor:
    """Replace `functional.dropout`."""
    return FusedDropout.apply(x)  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace `functional.scaled_dot_product_attention`."""
    return FusedAttention.apply(q, k, v)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Replace `functional.rms_norm` over the last dimension."""
    return FusedNorm.apply(x, weight)  # type: ignore[no-any-return]


def to_empty_unshared(module: nn.Module, *, device: torch.device) -> nn.Module:
    """Replace `nn.Module.to_empty`, which cannot replace a fake tensor that has references."""
    if any(isinstance(p, DTensor) for p in module.parameters()):
        return _to_empty(module, device=device)
    replacements: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replacements:
                empty = torch.empty_like(parameter, device=device)
                replacements[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            setattr(part, name, replacements[id(parameter)])
    return module


_to_empty, _item = nn.Module.to_empty, Tensor.item
_concatenate: Any = getattr(DeviceMesh, "_concatenate", None)


def item_or_one(tensor: Tensor) -> bool | float | int:
    """Replace `Tensor.item`; a tensor without memory gives 1."""
    return 1.0 if isinstance(tensor, FakeTensor) else _item(tensor)


def concatenate_meshes(*meshes: Any) -> Any:
    """Replace `DeviceMesh._concatenate`, which looks up its rank in a tensor of ranks."""
    with unset_fake_temporarily():
        return _concatenate(*meshes)


def exchange_equal_tokens(
    rows: Tensor, counts: Tensor, axis: MeshAxis
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Exchange rows (S, H) as if each rank got equally many, because fake counts have no values."""
    per_rank, remainder = divmod(rows.shape[0], axis.size)
    messages = [per_rank + (rank < remainder) for rank in range(axis.size)]
    order = counts.new_empty(rows.shape[0])
    plan = TokenExchange(
        axis, messages, messages, counts.new_empty(counts.shape[0] // axis.size), order
    )
    return plan.dispatch(rows), plan.counts, plan.combine


@contextmanager
def patched_torch(as_cuda: bool) -> Iterator[None]:
    """Enable training on tensors without memory; with `as_cuda` by a GPU's kernels."""
    from paceline.trainer.model import decoder
    from paceline.trainer.replica import replica

    with (
        patch.object(replica, "DistributedDataParallel", BucketedGradients),
        patch.object(decoder, "exchange_tokens", exchange_equal_tokens),
        patch.object(nn.Module, "to_empty", to_empty_unshared),
        patch.object(Tensor, "item", item_or_one),
        patch.object(DeviceMesh, "_concatenate", concatenate_meshes, create=True),
    ):
        if not as_cuda:
            yield
            return
        with _kernels_of_cuda():
            yield


@contextmanager
def _kernels_of_cuda() -> Iterator[None]:
    from paceline.trainer.model import attention as model_attention
    from paceline.trainer.model import layers, loss
    from paceline.trainer.replica import assembly

    with (
        patch.object(assembly, "COMPUTE_COPY_DEVICES", ("cpu",)),
        patch.object(functional, "scaled_dot_product_attention", attention),
        patch.object(functional, "rms_norm", rms_norm),
        patch.object(functional, "dropout", dropout),
        patch.object(layers, "HALF_GRAD_SUM_DEVICES", ()),
        patch.object(model_attention, "MAX_BLOCKED_TOKENS", 0),
        patch.object(model_attention, "MAX_PLAIN_TOKENS", 0),
        patch.object(model_attention, "CausalAttentionInParts", _CausalAttentionInParts),
        patch.object(model_attention, "_expand_kv_heads", lambda _, x: x),
        patch.dict(loss.CHUNK_BYTES, {"cpu": loss.CHUNK_BYTES["cuda"]}),
    ):
        yield


class _CausalAttentionInParts:
    """Fake attention of queries at the end of a sequence, (B, T, N, D), by the same kernel."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is not None:
            q = q + 0 * sinks.sum().to(q.dtype)  # so that sinks have a gradient
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


MAX_TRACED = 2
"""Traced micro-batches outside pipelines; each further one needs as much as the second."""
TRACED_ROUNDS = (2, 3)
"""Traced micro-batches per pipeline rank of long steps; beyond them memory grows linearly."""
SYNTHETIC = {"source": "synthetic", "loss_mask": None, "document_mask": False}
NO_CHECKPOINT = {"every": None, "resume": None, "asynchronous": False}


def main(request: dict[str, Any]) -> None:
    """Trace every requested rank."""
    raw, size = request["trainer"], int(request["size"])
    problems = config_problems(settings(raw, raw["num_microbatches"]), size)
    if problems:
        raise ConfigError("; ".join(problems))
    counts = traced_counts(raw["layout"]["pp"], raw["num_microbatches"])
    for rank in request["ranks"]:
        traces = [trace(settings(raw, count), rank, size) for count in counts]
        whole = extrapolate(traces, raw["num_microbatches"]) if len(traces) > 1 else traces[0]
        print(json.dumps({"event": "trace", **whole}), flush=True)


def traced_counts(pp: int, num_microbatches: int) -> list[int]:
    """Return the numbers of micro-batches to trace for a step of `num_microbatches`."""
    if pp == 1:
        return [min(num_microbatches, MAX_TRACED)]
    rounds = [count * pp for count in TRACED_ROUNDS]
    return rounds if num_microbatches > rounds[-1] else [num_microbatches]


def extrapolate(traces: list[dict[str, Any]], num_microbatches: int) -> dict[str, Any]:
    """Return the memory of a longer step, extrapolated linearly from two shorter ones."""
    first, last = traces
    counts = [trace["num_microbatches"] for trace in traces]
    steps = (num_microbatches - counts[1]) / (counts[1] - counts[0])

    def at(shorter: int, longer: int) -> int:
        return round(longer + steps * (longer - shorter))

    parts = {
        key: {name: at(first[key][name] or 0, value or 0) for name, value in last[key].items()}
        for key in ("parts_bytes", "at_peak_bytes")
    }
    return {**last, **parts, "peak_bytes": at(first["peak_bytes"], last["peak_bytes"])}


def settings(raw: dict[str, Any], count: int) -> TrainerConfig:
    """Return the run's settings with synthetic data and `count` micro-batches per step.

    Compiled blocks are traced uncompiled, because the tracker cannot see into them.
    """
    batch = count * raw["layout"]["micro_batch"] * raw["dp"]
    overrides = {
        "global_batch": batch,
        "ramp_up": [],
        "compile": "none",
        "evaluation": None,
        "initial_weights": None,
    }
    return parse_config(
        {
            **raw,
            "training": {**raw["training"], **overrides},
            "data": {**raw["data"], **SYNTHETIC},
            "num_microbatches": count,
            "checkpoint": NO_CHECKPOINT,
            "mlperf": None,
        }
    )


def trace(config: TrainerConfig, rank: int, size: int) -> dict[str, Any]:
    """Return the memory of one rank's second step."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = World(rank, 0, size, torch.device("cpu"), "fake")
        mesh = make_mesh(world, config.layout, config.dp)
        with patched_torch(as_cuda=config.device == "cuda"):
            return {
                "rank": rank,
                "torch": torch.__version__,
                "kernels": config.device,
                "num_microbatches": config.num_microbatches,
                **memory_of_step(replace(config, device="cpu"), world, mesh),
            }
    finally:
        dist.destroy_process_group()


def memory_of_step(config: TrainerConfig, world: World, mesh: Mesh) -> dict[str, Any]:
    """Return the memory record of the traced step, as far as tensors determine it."""
    (batch, masked), steps = first_batch(config, mesh), StepClock(HostClock())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        replica = make_replica(config, world, mesh, steps)
        memory = MemoryWatch(world.device)
        # A trace writes no events: its steps are not steps of a run.
        trainer = Trainer(
            config=config,
            replica=replica,
            world=world,
            steps=steps,
            events=cast(EventLog, None),
            memory=memory,
            masked=masked,
        )
        fake = LocalBatch(
            mode.from_tensor(batch.inputs),
            mode.from_tensor(batch.targets),
            batch.num_valid_targets,
            {name: mode.from_tensor(extra) for name, extra in batch.extras.items()},
            batch.real_tokens,
        )
        # The first step only creates the optimizer state, so one micro-batch is enough.
        for step in (fake if mesh.pp.size > 1 else first_of(fake), fake):
            with memory.step(replica.parts, [trainer.optimizer]):
                trainer.step(step)
    record = memory.record()
    parts = {name: size for name, size in record["parts_bytes"].items() if name != "context"}
    return {
        "peak_bytes": record["peak_bytes"]["tracked"],
        "parts_bytes": parts,
        "at_peak_bytes": record["at_peak_bytes"],
    }


def first_of(batch: LocalBatch) -> LocalBatch:
    """Return a batch with only the first micro-batch."""
    extras = {name: extra[:1] for name, extra in batch.extras.items()}
    inputs, targets = batch.inputs[:1], batch.targets[:1]
    return replace(
        batch, inputs=inputs, targets=targets, num_valid_targets=targets.numel(), extras=extras
    )


def first_batch(config: TrainerConfig, mesh: Mesh) -> tuple[LocalBatch, bool]:
    """Return the first batch of the run, and whether it masks targets."""
    corpus = load_corpus(config)
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, mesh, pin=False)
    try:
        return loader.next()[0], corpus.masked
    finally:
        loader.close()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except (ConfigError, NotImplementedError) as error:  # PyTorch's, for what it cannot trace
        sys.exit(f"memory_trace: {type(error).__name__}: {error}")
