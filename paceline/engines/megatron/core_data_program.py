"""Micro-batches for Megatron-Core: random tokens, an indexed data set, or files as bytes."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from token_windows_program import MAX_TEXT_TOKENS, corpus


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
