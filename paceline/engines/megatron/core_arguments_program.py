"""Subset of Megatron-LM's pretrain_gpt.py arguments for training with Megatron-Core alone."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import os

import torch

WHOLE = (
    "num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "kv-channels",
    "num-query-groups", "max-position-embeddings", "vocab-size", "seq-length", "micro-batch-size",
    "global-batch-size", "train-iters", "train-samples", "lr-warmup-iters", "lr-warmup-samples",
    "lr-decay-iters", "lr-decay-samples", "exit-interval", "num-experts", "moe-ffn-hidden-size",
    "moe-router-num-groups", "moe-router-group-topk", "moe-shared-expert-intermediate-size",
)  # fmt: skip
WHOLE_WITH_DEFAULT = {
    "make-vocab-size-divisible-by": 128,
    "rotary-base": 10000,
    "recompute-num-layers": 1,
    "log-interval": 100,
    "seed": 1234,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "moe-router-topk": 2,
    "hysteresis": 2,
    "eval-iters": 100,
    "eval-interval": 1000,
    "distributed-timeout-minutes": 10,
    "num-workers": 2,
}
NUMBERS = {
    "lr": None,
    "min-lr": 0.0,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "norm-epsilon": 1e-5,
    "init-method-std": 0.02,
    "initial-loss-scale": 2.0**32,
    "min-loss-scale": 1.0,
    "loss-scale-window": 1000.0,
}
SWITCHES = (
    "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear",
    "fp16", "bf16", "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce",
    "overlap-param-gather", "mock-data", "embed-layernorm", "log-throughput",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "qk-layernorm", "moe-router-force-load-balancing",
)  # fmt: skip
CHOICES = {
    "position-embedding-type": (("learned_absolute", "rope"), "learned_absolute"),
    "normalization": (("LayerNorm", "RMSNorm"), "LayerNorm"),
    "lr-decay-style": (("constant", "linear", "cosine"), "linear"),
    "recompute-granularity": (("full", "selective"), None),
    "recompute-method": (("uniform", "block"), None),
    "optimizer": (("adam",), "adam"),
    "transformer-impl": (("local",), "local"),
    "tokenizer-type": (("NullTokenizer",), "NullTokenizer"),
    "distributed-backend": (("nccl", "gloo"), "nccl"),
    "moe-router-dtype": (("fp32", "fp64"), None),
    "moe-token-dispatcher-type": (("allgather", "alltoall"), "allgather"),
}


def parse_arguments() -> argparse.Namespace:
    """Return the parsed arguments with derived values: ranks, dtype, vocabulary, schedule."""
    parser = argparse.ArgumentParser(description="GPT by Megatron-Core", allow_abbrev=False)
    for name in WHOLE:
        parser.add_argument(f"--{name}", type=int)
    for name, default in WHOLE_WITH_DEFAULT.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, (choices, default) in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, default=default)
    parser.add_argument("--rampup-batch-size", nargs=3, type=int)
    parser.add_argument("--data-path", help="prefix of a .bin and an .idx file")
    parser.add_argument("--split", default="969,30,1", help="shares to train, validate, test on")
    parser.add_argument("--text", choices=("stdlib",), help="Python's own files, byte by byte")
    return add_derived_values(parser.parse_args())


def add_derived_values(args: argparse.Namespace) -> argparse.Namespace:
    """Add the values that Megatron-LM derives from the arguments; exit on contradictions."""
    if bool(args.train_iters) == bool(args.train_samples):
        raise SystemExit("set either --train-iters or --train-samples")
    if args.rampup_batch_size and args.train_iters:
        raise SystemExit("--rampup-batch-size needs --train-samples")
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.params_dtype = (
        torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    )
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    # The null tokenizer adds one end-of-document token.
    args.padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple
    unit = "samples" if args.train_samples else "iters"
    args.lr_warmup_total = getattr(args, f"lr_warmup_{unit}") or 0
    args.lr_decay_total = getattr(args, f"lr_decay_{unit}") or (
        args.train_samples or args.train_iters
    )
    if args.train_samples:
        args.iterations_of_samples = iterations(args)
    return args


def iterations(args: argparse.Namespace) -> int:
    """Return the steps that consume all samples of `--train-samples`, after a full ramp-up."""
    num_samples = count = 0
    start, increment, samples = args.rampup_batch_size or (args.global_batch_size, 1, 0)
    while samples and num_samples <= samples:
        each = samples / max(1, (args.global_batch_size - start) // increment)
        num_samples += min(args.global_batch_size, start + int(num_samples / each) * increment)
        count += 1
    return count + (args.train_samples - num_samples) // args.global_batch_size


def print_arguments(args: argparse.Namespace) -> None:
    """Print world size and arguments as Megatron-LM does, on rank 0."""
    if args.rank:
        return
    print(
        f"using world size: {args.world_size}, data-parallel size: {args.data_parallel_size}, "
        f"context-parallel size: {args.context_parallel_size}, "
        f"tensor-model-parallel size: {args.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {args.pipeline_model_parallel_size}"
    )
    print("------------------------ arguments ------------------------")
    for name, value in sorted(vars(args).items()):
        print(f"  {name} {'.' * (48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------")
    print(
        f" > padded vocab (size: {args.vocab_size + 1}) with "
        f"{args.padded_vocab_size - args.vocab_size - 1} dummy tokens "
        f"(new size: {args.padded_vocab_size})",
        flush=True,
    )
