"""Megatron-Core's side of test_megatron_data: runs in its environment, without Paceline."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


class NoTokenizer:
    """What GPTDataset asks a tokenizer for."""

    eod, pad, vocab_size = 0, -1, 320
    unique_identifiers = {"class": "none"}


def write(prefix: str, text: str, tokenizer_file: str) -> None:
    """Records as its preprocessing adds them: no sequence for one without tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for line in Path(text).read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        if ids:
            ids.append(tokenizer.token_to_id("<|endoftext|>"))
        builder.add_document(torch.IntTensor(ids), [len(ids)] if ids else [])
    builder.finalize(f"{prefix}.idx")


def samples(asked: dict[str, Any]) -> list[list[int]]:
    """The first samples of a training split."""
    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=asked["seed"],
            sequence_length=asked["seq_len"],
            blend=tuple(asked["blend"]),
            split=asked["split"],
            tokenizer=NoTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=cache,
            mid_level_dataset_surplus=0.005,
        )
        count = asked["samples"]
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [count, 0, 0], lambda: True, config)
        train = builder.build()[0]
        windows = [train[number] for number in range(count)]
        return [[*w["tokens"].tolist(), int(w["labels"][-1])] for w in windows]


if __name__ == "__main__":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    answers: list[object] = []
    for asked in json.loads(sys.argv[1]):
        if "write" in asked:
            answers.append(write(asked["write"], asked["text"], asked["tokenizer"]))
        else:
            answers.append(samples(asked))
    print(json.dumps(answers))
