"""GPT training with Megatron-Core's public classes and Megatron-LM's arguments and log lines.

Runs once per device with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Without a
GPU, it runs on the CPU with gloo. Micro-batches are random tokens, an indexed data set, or files as
bytes.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import torch
import torch.distributed as dist
from core_arguments_program import parse_arguments, print_arguments
from core_model_program import build_training
from megatron.core import num_microbatches_calculator as batch_size
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from token_windows_program import MAX_TEXT_TOKENS, corpus
from torch.overrides import TorchFunctionMode

GPU = torch.cuda.is_available()
MIB = 2**20


def main() -> None:
    """Train, from process group setup to the last log line."""
    args = parse_arguments()
    initialize(args)
    print_arguments(args)
    end = train(args, *build_training(args))
    print_on_first_rank(f"[{end}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # After all work is done, Gloo's threads keep some interpreters from exiting.
    os._exit(0)


def initialize(args) -> None:
    """Initialize process groups, random states and the number of micro-batches per step."""
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        switch_on()
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=limit)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    batch_size.init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        False,
    )


def loss_of(mask, output):
    """Return one micro-batch's mean loss for backward, and its data-parallel mean for the log."""
    loss = (output.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return loss, {"lm loss": mean / parallel_state.get_data_parallel_world_size()}


def forward_step(batches, model):
    """Run one micro-batch through this rank's part of the model."""
    batch = next(batches)
    places = batch["position_ids"], batch["attention_mask"]
    output = model(batch["tokens"], *places, labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def train(args, model, optimizer, schedule) -> str:
    """Run all iterations with one line per `--log-interval`; return the reason for the end."""
    step = get_forward_backward_func()
    batches = micro_batches(args, torch.cuda.current_device())
    total = args.train_iters or args.iterations_of_samples
    log = IterationRecord(args, total)
    model.train()
    for iteration in range(1, total + 1):
        batch_size.update_num_microbatches(log.consumed_samples, consistency_check=True)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        parts = step(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=batch_size.get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        is_updated, norm, _ = optimizer.step()
        batch, rate = batch_size.get_current_global_batch_size(), optimizer.param_groups[0]["lr"]
        if is_updated:
            schedule.step(batch if args.train_samples else 1)
        log.add(iteration, batch, parts, is_updated)
        if iteration % args.log_interval == 0:
            log.print_record(iteration, batch, rate, optimizer.get_loss_scale().item(), norm)
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"exiting program at iteration {iteration}"
    return "after training is done"


@dataclass
class IterationRecord:
    """Totals of the iterations since the last log line."""

    args: Namespace
    total: int
    consumed_samples: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def add(self, iteration: int, batch: int, parts, is_updated: bool) -> None:
        """Add one iteration; only the last pipeline stage has losses."""
        self.consumed_samples += batch
        self.skipped += not is_updated
        if parts:
            self.losses.append(sum(float(part["lm loss"]) for part in parts) / len(parts))

    def print_record(
        self, iteration: int, batch: int, rate: float, scale: float, norm: float
    ) -> None:
        """Print the record on the last rank, and memory after the first record."""
        now, interval = time.perf_counter(), self.args.log_interval
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{self.total:8d}",
            f" consumed samples: {self.consumed_samples:12d}",
            f" elapsed time per iteration (ms): {(now - self.since) * 1e3 / interval:.1f}",
            f" learning rate: {rate:.6E}",
            f" global batch size: {batch:5d}",
            f" lm loss: {sum(self.losses) / max(1, len(self.losses)):.6E}",
            f" loss scale: {scale:.1f}",
            f" grad norm: {norm:.3f}",
            f" number of skipped iterations: {self.skipped:3d}",
            f" number of nan iterations: {sum(loss != loss for loss in self.losses):3d}",
        ]
        if self.args.rank == self.args.world_size - 1:
            print(" |".join(fields) + " |", flush=True)
        if iteration == interval:
            print_memory(self.args.rank, iteration)
        self.since, self.skipped = now, 0
        self.losses.clear()


def print_memory(rank: int, iteration: int) -> None:
    """Print the memory of one replica's ranks in MiB: CUDA's, or resident memory on a CPU."""
    if parallel_state.get_data_parallel_rank() != 0:
        return
    if GPU:
        figures = {
            "allocated": torch.cuda.memory_allocated(),
            "max allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "max reserved": torch.cuda.max_memory_reserved(),
        }
    else:
        figures = {"max resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    values = " | ".join(f"{name}: {value / MIB}" for name, value in figures.items())
    print(f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {values}", flush=True)


def print_on_first_rank(text: str) -> None:
    """Print on the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def micro_batches(args, device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches endlessly, the same on all ranks of one data-parallel replica."""
    rank = parallel_state.get_data_parallel_rank()
    rows = sequences(args, rank, parallel_state.get_data_parallel_world_size())
    positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1).to(device)
    weights = torch.ones(args.micro_batch_size, args.seq_length).to(device)
    ones = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool)
    later = torch.triu(ones, diagonal=1).to(device)
    while True:
        batch = torch.stack([next(rows) for _ in range(args.micro_batch_size)]).to(device)
        yield {
            "tokens": batch[:, :-1].contiguous(),
            "labels": batch[:, 1:].contiguous(),
            "position_ids": positions,
            "loss_mask": weights,
            "attention_mask": later,
        }


def sequences(args, rank: int, ranks: int) -> Iterator[torch.Tensor]:
    """Yield sequences one token longer than a sample: every `ranks`-th, starting with `rank`."""
    length = args.seq_length + 1
    if args.mock_data:
        generator = torch.Generator(device="cpu").manual_seed(args.seed + rank)
        while True:
            yield torch.randint(args.vocab_size, (length,), generator=generator)
    if args.data_path:
        tokens = indexed(args.data_path, args.split)
    else:
        tokens = corpus({"source": "stdlib"}, MAX_TEXT_TOKENS, args.seed)
    number = len(tokens) // length
    if number < ranks:
        raise SystemExit(
            f"data: {len(tokens)} tokens are too few for {ranks} ranks with {length} tokens each"
        )
    at = rank
    while True:
        yield tokens[at * length : (at + 1) * length].long()
        at = at + ranks if at + ranks < number else rank


def indexed(prefix: str, split: str) -> torch.Tensor:
    """Return the training tokens of an indexed data set, with its documents concatenated."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = IndexedDataset(prefix)
    shares = [float(share) for share in split.split(",")]
    number = round(len(documents) * shares[0] / sum(shares))
    return torch.cat([torch.from_numpy(documents[n].astype("int64")) for n in range(number)])


class CudaOnCpu(TorchFunctionMode):
    """Emulation of CUDA on the CPU, so that Megatron-Core runs without a GPU.

    Megatron-Core uses device "cuda" and torch.cuda throughout. Here its tensors are on the CPU,
    types report their CUDA names, and the random states per tensor-parallel rank are states of the
    CPU's generator. Only two functions of Megatron-Core are replaced: those that read and write
    CUDA's random state.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def switch_on() -> None:
    """Enable the emulation; call it before creating `parallel_state` and models."""
    from megatron.core.tensor_parallel import random

    CudaOnCpu().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # It warns when the CPU's random state changes instead of CUDA's; here they are the same.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
