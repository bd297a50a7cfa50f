# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Prompts with chosen answers as batches of padded token ids."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

ANSWER_KEYS = ("chosen", "response", "completion", "text")
NUM_DISTINCT_TEXTS = 1000
MIN_STEPS = 4
"""Minimum number of steps per epoch of generated samples."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
DATA_FILES = ("*.jsonl", "*.jsonl.gz", "*.parquet")
MIN_CHARACTERS = 80


class Tokenizer(Protocol):
    """Converter from text to token ids; `eos` also pads samples."""

    eos: int
    eos_text: str

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ...


class ByteTokenizer:
    """One id per byte and one end-of-sample id, for models without a vocabulary."""

    eos = 256
    eos_text = ""

    def ids(self, text: str) -> list[int]:
        """Return the UTF-8 bytes, then the end-of-sample id."""
        return [*text.encode("utf-8", "replace"), self.eos]


class FolderTokenizer:
    """Tokenizer in a model's folder or in the Hugging Face cache."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self.eos_text = tokenizer.eos_token

    def ids(self, text: str) -> list[int]:
        """Return ids including special tokens, as in the model's training."""
        return self._tokenizer(text)["input_ids"]


def load_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a folder or Hugging Face name; bytes for a folder without one.

    Raises SystemExit for a tokenizer without an end-of-text token.
    """
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ByteTokenizer()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_bare = folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES[1:])
    if is_bare:
        hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER_FILES[0]))
        vocabulary = hf_tokenizer.get_vocab()
        ends = [t for t in ("</s>", "<|endoftext|>", "<eos>") if t in vocabulary]
        hf_tokenizer.eos_token = ends[0] if ends else None
    else:
        hf_tokenizer = AutoTokenizer.from_pretrained(model)
    if hf_tokenizer.eos_token_id is None:
        sys.exit(f"error: {model}: its tokenizer has no end-of-text token")
    return FolderTokenizer(hf_tokenizer)


@dataclass
class Batches:
    """One rank's share of the samples, in batches of equal shape, reshuffled each epoch."""

    texts: list[str]
    tokenizer: Tokenizer
    length: int
    micro_batch: int
    seed: int
    rank: int
    world_size: int
    _cached_ids: dict[int, torch.Tensor] = field(default_factory=dict)
    _orders: dict[int, list[list[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts) // (self.world_size * self.micro_batch)

    def prepare(self, num_batches: int) -> None:
        """Draw and tokenize the samples of `num_batches` in advance, so that no step waits."""
        epochs = (self._places(epoch) for epoch in itertools.count())
        for places in itertools.islice(itertools.chain.from_iterable(epochs), num_batches):
            for place in places:
                self._ids(place)

    def epoch(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's batches; samples that do not fill a batch on all ranks are dropped."""
        return map(self._batch, self._places(epoch))

    def _places(self, epoch: int) -> list[list[int]]:
        if epoch not in self._orders:
            order = list(range(len(self.texts)))
            random.Random(self.seed + epoch).shuffle(order)
            mine = order[self.rank :: self.world_size]
            size = self.micro_batch
            starts = range(0, len(self) * size, size)
            self._orders[epoch] = [mine[start : start + size] for start in starts]
        return self._orders[epoch]

    def _ids(self, place: int) -> torch.Tensor:
        if place not in self._cached_ids:
            ids = self.tokenizer.ids(self.texts[place] + self.tokenizer.eos_text)
            self._cached_ids[place] = torch.tensor(ids[: self.length], dtype=torch.int32)
        return self._cached_ids[place]

    def _batch(self, places: list[int]) -> dict[str, torch.Tensor]:
        """Return ids (micro_batch, length); labels include padding, as in DeepSpeed-Chat."""
        ids = torch.full((len(places), self.length), self.tokenizer.eos)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(map(self._ids, places)):
            ids[row, : len(sample)] = sample
            mask[row, : len(sample)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def training_batches(
    args: argparse.Namespace, tokenizer: Tokenizer, rank: int, world_size: int
) -> Batches:
    """Return the training part of the data, split and shuffled by seed, the same on every rank.

    Raises SystemExit for less than one batch on all ranks.
    """
    sizes = [float(size) for size in args.data_split.split(",")]
    share = sizes[0] / sum(sizes)
    samples_per_step = world_size * args.per_device_train_batch_size
    num_generated = math.ceil(MIN_STEPS * samples_per_step / share)
    texts: list[str] = []
    for source in args.data_path:
        texts += _first_part(list(samples(source, args.seed, num_generated)), share, args.seed)
    batches = Batches(
        texts=texts,
        tokenizer=tokenizer,
        length=args.max_seq_len,
        micro_batch=args.per_device_train_batch_size,
        seed=args.seed,
        rank=rank,
        world_size=world_size,
    )
    if len(batches) == 0:
        sys.exit(
            f"error: --data_path {' '.join(args.data_path)}: the training part of --data_split "
            f"{args.data_split} has {len(texts)} samples, but one step needs {samples_per_step}"
        )
    steps = args.num_warmup_steps + args.max_steps
    batches.prepare(steps * args.gradient_accumulation_steps)
    return batches


def _first_part(texts: list[str], share: float, seed: int) -> list[str]:
    """Return DeepSpeed-Chat's first training share, shuffled by the seed."""
    random.Random(seed).shuffle(texts)
    return texts[: round(len(texts) * share)]


def samples(source: str, seed: int, num_generated: int) -> Iterator[str]:
    """Yield prompt plus answer: `made` generated texts, or those of files or a hub data set."""
    if source == "synthetic":
        yield from itertools.islice(itertools.cycle(_synthetic(seed)), num_generated)
    elif source == "stdlib":
        yield from _paragraphs(Path(sysconfig.get_paths()["stdlib"]))
    else:
        yield from _training_texts(_records(source), source)


def _synthetic(seed: int) -> Iterator[str]:
    """Yield distinct texts of random words, all with the same word count."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(997)]
    for _ in range(NUM_DISTINCT_TEXTS):
        question, answer = draw.choices(words, k=24), draw.choices(words, k=72)
        yield f"\n\nHuman: {' '.join(question)}?\n\nAssistant: {' '.join(answer)}."


def _paragraphs(folder: Path) -> Iterator[str]:
    """Yield paragraphs of the interpreter's own sources, in the same order on all ranks."""
    for path in sorted(folder.glob("*.py")):
        for paragraph in path.read_text("utf-8", "replace").split("\n\n"):
            if len(paragraph) >= MIN_CHARACTERS:
                yield paragraph


def _training_texts(records: Iterable[dict[str, Any]], source: str) -> Iterator[str]:
    """Yield `prompt` plus the chosen answer, or the full text of records without a prompt."""
    for number, record in enumerate(records, 1):
        key = next((key for key in ANSWER_KEYS if isinstance(record.get(key), str)), None)
        if key is None:
            sys.exit(f"error: {source}: record {number} has none of {', '.join(ANSWER_KEYS)}")
        yield str(record.get("prompt") or "") + record[key]


def _records(source: str) -> Iterator[dict[str, Any]]:
    """Yield records of a file, of a folder's files, or of a data set in the Hugging Face cache."""
    path = Path(source)
    if path.is_file():
        yield from _file_records(path)
        return
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(source, repo_type="dataset", allow_patterns=[*DATA_FILES]))
    files = sorted(file for pattern in DATA_FILES for file in path.rglob(pattern))
    training = [file for file in files if "test" not in file.name and "valid" not in file.name]
    if not training:
        sys.exit(f"error: {source}: contains no {', '.join(DATA_FILES)} for training")
    for file in training:
        yield from _file_records(file)


def _file_records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(os.fspath(path)).iter_batches():
            yield from batch.to_pylist()
        return
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from (json.loads(line) for line in lines if line.strip())
