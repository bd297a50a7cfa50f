"""Megatron's side of tokenization.py: python _megatron_tokens.py FOLDER WORKERS prints seconds and
processor seconds.

A pool of workers encodes records 32 at a time, one process writes them by Megatron-Core's own
builder: what its tools/preprocess_data.py does with `--append-eod`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing import Pool
from pathlib import Path

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer

END = "<|endoftext|>"
RECORDS_AT_ONCE = 32


class Encoder:
    """Store what a worker needs."""

    tokenizer: Tokenizer
    end: int

    @classmethod
    def prepare(cls, path: str) -> None:
        """Load the tokenizer once in a worker."""
        cls.tokenizer = Tokenizer.from_file(path)
        cls.end = cls.tokenizer.token_to_id(END)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        """The tokens of a record and the end mark."""
        ids = cls.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return [*ids, cls.end] if ids else ids


def main(folder: Path, workers: int) -> tuple[float, float]:
    """Seconds until both files are written, and processor seconds of all processes."""
    tokenizer = str(folder / "tokenizer.json")
    vocab_size = Tokenizer.from_file(tokenizer).get_vocab_size()
    begin, used = time.perf_counter(), sum(os.times()[:4])
    builder = IndexedDatasetBuilder(
        str(folder / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size)
    )
    with (
        (folder / "text.jsonl").open(encoding="utf-8") as lines,
        Pool(workers, Encoder.prepare, (tokenizer,)) as pool,
    ):
        for ids in pool.imap(Encoder.encode, lines, RECORDS_AT_ONCE):
            builder.add_document(torch.IntTensor(ids), [len(ids)] if ids else [])
        pool.close()
        pool.join()
    builder.finalize(str(folder / "theirs.idx"))
    return time.perf_counter() - begin, sum(os.times()[:4]) - used


if __name__ == "__main__":
    print(*main(Path(sys.argv[1]), int(sys.argv[2])))
