# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false
"""Supervised fine-tuning on DeepSpeed with the arguments and log lines of DeepSpeed-Chat.

Runs once per device in an environment with deepspeed and transformers. Needs RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing from Paceline.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shlex
import socket
import sys
import time
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from sft_data_program import load_tokenizer, training_batches
from sft_model_program import DTYPES, ModelOptions, make_model, parameter_groups
from transformers import get_scheduler

BETAS = (0.9, 0.95)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of DeepSpeed-Chat's first step and those of this program only."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data_path", nargs="*", default=["synthetic"])
    add("--data_split", default="2,4,4")
    add("--data_output_path", default=None, help="accepted; nothing is written")
    add("--model_name_or_path", required=True)
    add("--per_device_train_batch_size", type=int, default=16)
    add("--per_device_eval_batch_size", type=int, default=16, help="accepted; nothing is evaluated")
    add("--max_seq_len", type=int, default=512)
    add("--learning_rate", type=float, default=1e-3)
    add("--weight_decay", type=float, default=0.0)
    add("--num_train_epochs", type=int, default=1, help="length of the learning rate's schedule")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--lr_scheduler_type", default="cosine")
    add("--num_warmup_steps", type=int, default=0, help="also the steps that are not timed")
    add("--max_steps", type=int, default=100, help="timed steps, which follow the warm-up")
    add("--seed", type=int, default=1234)
    add("--local_rank", type=int, default=-1)
    add("--gradient_checkpointing", action="store_true")
    add("--disable_dropout", action="store_true")
    add("--offload", action="store_true")
    add("--zero_stage", type=int, default=0, choices=range(4))
    add("--lora_dim", type=int, default=0)
    add("--lora_module_name", default="decoder.layers.")
    add("--lora_learning_rate", type=float, default=5e-4)
    add("--only_optimize_lora", action="store_true")
    add("--dtype", choices=tuple(DTYPES), default="fp16")
    add("--print_loss", action="store_true")
    extra = parser.add_argument_group("not in DeepSpeed-Chat")
    extra.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    extra.add_argument("--initial_scale_power", type=int, default=16)
    extra.add_argument("--loss_scale_window", type=int, default=100)
    extra.add_argument("--hysteresis", type=int, default=2)
    extra.add_argument("--gradient_clipping", type=float, default=1.0)
    extra.add_argument("--lr_decay_steps", type=int, default=None)
    extra.add_argument("--steps_per_print", type=int, default=10)
    extra.add_argument("--no_weights", action="store_true", help="do not load weights")
    return deepspeed.add_config_arguments(parser).parse_args(argv)


def deepspeed_settings(args: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration as printed by the published runs."""
    device = "cpu" if args.offload else "none"
    precision: dict[str, Any] = {"bf16": {"enabled": True}} if args.dtype == "bf16" else {}
    if args.dtype == "fp16":
        precision["fp16"] = {
            "enabled": True,
            "initial_scale_power": args.initial_scale_power,
            "loss_scale_window": args.loss_scale_window,
            "hysteresis": args.hysteresis,
        }
    micro_batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": args.steps_per_print,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
        },
        **precision,
        "gradient_clipping": args.gradient_clipping,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def main() -> None:
    """Train, print the results, and exit without DeepSpeed's shutdown."""
    args = parse_arguments(sys.argv[1:])
    enable_info_logging()
    device = init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_placement(rank, world_size)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    settings = deepspeed_settings(args, world_size)
    tokenizer = load_tokenizer(args.model_name_or_path)
    batches = training_batches(args, tokenizer, rank, world_size)
    engine = make_engine(args, settings, device, num_batches=len(batches))
    seconds = train(args, engine, batches, device)
    if rank == 0:
        print_results(args, seconds, world_size)
    dist.barrier()
    logger.info(f"Process {os.getpid()} exits successfully.")
    sys.stdout.flush()
    sys.stderr.flush()
    # At interpreter exit, DeepSpeed's threads abort some processes after all work is done.
    os._exit(0)


def enable_info_logging() -> None:
    """Enable DeepSpeed's timer and step lines: version 0.19 prints warnings only."""
    for part in (logger, *logger.handlers):
        part.setLevel(logging.INFO)


def init_process_group() -> torch.device:
    """Initialize the process group and return this rank's device."""
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    if accelerator.device_name() == "cpu":
        # Gloo only: otherwise DeepSpeed first compiles its own shared-memory kernel.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    deepspeed.init_distributed()
    return torch.device(accelerator.device_name(local_rank))


def print_placement(rank: int, world_size: int) -> None:
    """Print hosts and command in the form of the published runs' launcher and scripts."""
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, socket.gethostname())
    if rank == 0:
        for host in dict.fromkeys(names):
            print(f"{host} slots={names.count(host)}")
        logger.info(f"cmd = {shlex.join([sys.executable, '-u', *sys.argv])}")
        logger.info(f"dist_world_size={world_size}")


def make_engine(
    args: argparse.Namespace, settings: dict[str, Any], device: torch.device, num_batches: int
) -> Any:
    """Return DeepSpeed's engine with model, optimizer and schedule."""
    options = ModelOptions(
        name=args.model_name_or_path,
        dtype=args.dtype,
        attention=args.attention,
        dropout=not args.disable_dropout,
        load_weights=not args.no_weights,
        checkpointing=args.gradient_checkpointing,
        lora_rank=args.lora_dim,
        lora_modules=args.lora_module_name,
        only_lora=args.only_optimize_lora,
    )
    model = make_model(options, device, args.zero_stage)
    if dist.get_rank() == 0:
        logger.info(f"model parameters: {sum(p.numel() for p in model.parameters())}")
    groups = parameter_groups(model, args.weight_decay, args.lora_learning_rate)
    optimizer = make_optimizer(groups, args.learning_rate, device, args.offload)
    updates = -(-num_batches // args.gradient_accumulation_steps)
    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.lr_decay_steps or args.num_train_epochs * updates,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, lr_scheduler=schedule
    )
    return engine


def make_optimizer(
    groups: list[dict[str, Any]], lr: float, device: torch.device, offload: bool
) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPU Adam for offloading, else its fused Adam if it can be built."""
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=lr, betas=BETAS)
    if device.type == "cuda":
        from deepspeed.ops.adam import FusedAdam
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is not None:
            return FusedAdam(groups, lr=lr, betas=BETAS)
        logger.warning("no CUDA toolkit to build FusedAdam: using torch's fused AdamW instead")
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=device.type in ("cpu", "cuda"))


def train(args: argparse.Namespace, engine: Any, batches: Any, device: torch.device) -> float:
    """Train for as many epochs as needed; return the seconds of the steps after warmup."""
    rank = dist.get_rank()
    steps = args.num_warmup_steps + args.max_steps
    accumulation = args.gradient_accumulation_steps
    engine.train()
    begin, num_micro_batches, epoch = time.monotonic(), 0, 0
    losses: list[torch.Tensor] = []
    if rank == 0:
        print("***** Running training *****")
    while True:
        if rank == 0:
            print(
                f"Beginning of Epoch {epoch + 1}/{args.num_train_epochs}, "
                f"Total Micro Batches {len(batches)}"
            )
        for batch in batches.epoch(epoch):
            if num_micro_batches == args.num_warmup_steps * accumulation:
                get_accelerator().synchronize()
                begin = time.monotonic()
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = engine(**inputs, use_cache=False).loss
            losses = [*losses[:1], loss.detach()]
            if args.print_loss:
                print(
                    f"Epoch: {epoch}, Step: {num_micro_batches}, Rank: {rank}, loss = {loss.item()}"
                )
            engine.backward(loss)
            engine.step()
            num_micro_batches += 1
            if num_micro_batches == steps * accumulation:
                get_accelerator().synchronize()
                seconds = time.monotonic() - begin
                if rank == 0:
                    print(f"loss: {losses[0].item():.4f} at first, {losses[-1].item():.4f} at last")
                return seconds
        engine.tput_timer.update_epoch_count()
        epoch += 1


def print_results(args: argparse.Namespace, seconds: float, world_size: int) -> None:
    """Print the two result lines of Lambda's benchmark: all steps after warmup, all devices."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size
    print("=" * 70)
    print(f"Execution time: {seconds:.4f} seconds for {args.max_steps} steps")
    print(f"Throughput: {batch * args.max_steps / seconds:.4f} samples/sec")


if __name__ == "__main__":
    main()
