"""Indexed data sets are read in Megatron's order; tests/frameworks holds them against its own."""

from __future__ import annotations

import random
import struct
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.staging.conversions.indexed import IndexedWriter, files_of
from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.data.batches import sampler_of
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.data.indexed_corpus import (
    IndexedCorpus,
    IndexedFile,
    NumpyShuffle,
    blending_indices,
    numpy_sum,
    read_indexed,
    shuffle_file,
)
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.parallel.mesh import MeshAxis
from tests.trainer.example import settings

ALONE = MeshAxis()
EVALUATION = {"every_samples": 4, "skip_first": 0, "samples": 2, "target": None, "path": None}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """40 documents of 1 to 99 tokens; each token is the number of its document."""
    return written(tmp_path / "numbered", 40)


def written(prefix: Path, documents: int, first: int = 0) -> Path:
    """A data set of documents of different lengths, each of one token only."""
    lengths = random.Random(0)
    with IndexedWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_documents(
            [first + number] * lengths.randint(1, 99) for number in range(documents)
        )
    return prefix


def load(steps: int = 6, **changes: Any) -> Any:
    """The corpus of these settings: by default 6 steps of 4 samples of 32 tokens."""
    return load_corpus(config(steps, **changes))


def config(steps: int = 6, **changes: Any) -> Any:
    """Settings of a training on an indexed data set."""
    return parse_config(settings(steps=steps, source="indexed", **changes))


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
def test_the_shuffle_is_numpys(seed: int) -> None:
    for length in (1, 2, 3, 64, 65, 1000):
        ours, theirs = array("i", range(length)), np.arange(length, dtype=np.int32)
        NumpyShuffle(seed).shuffle(ours)
        np.random.RandomState(seed).shuffle(theirs)
        assert [*ours] == theirs.tolist()


def test_weights_are_added_as_numpy_adds_them() -> None:
    for length in (1, 7, 8, 19, 128, 129, 300):
        values = np.random.default_rng(length).random(length)
        assert numpy_sum(values.tolist()) == float(values.sum())


def test_an_epoch_joins_every_document_once(prefix: Path) -> None:
    file = read_indexed(str(prefix))
    part = shuffle_file(file, range(40), 10, 32, seed=5)
    places = [p for number in range(part.num_samples) for p in part.pieces(number)]

    assert part.num_samples == (len(file.tokens) - 1) // 32
    windows = torch.stack(
        [
            torch.cat([file.tokens[p].long() for p in part.pieces(i)])
            for i in range(part.num_samples)
        ]
    )
    in_line = windows[torch.argsort(part.windows)]
    assert torch.equal(in_line[1:, 0], in_line[:-1, -1])
    line = torch.cat([in_line[:1, :1], in_line[:, 1:].reshape(1, -1)], 1)[0]
    order = torch.unique_consecutive(line).tolist()
    assert order == part.order[: len(order)].tolist() != sorted(order)
    assert all(piece.start < piece.stop for piece in places)


def test_a_shuffle_keeps_its_documents_in_four_bytes_each() -> None:
    documents = 50_000
    file = IndexedFile(torch.zeros(1), torch.arange(0, 10 * documents + 1, 10))
    tracemalloc.start()
    try:
        part = shuffle_file(file, range(documents), 10, 10_000, seed=5)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert part.order.dtype == torch.int32 and part.order.unique().numel() == documents
    assert peak_bytes / documents < 12


def test_other_seeds_take_other_samples_and_no_layout_does(prefix: Path) -> None:
    def ids(dp: int = 1, **changes: Any) -> list[list[int]]:
        settings = config(path=str(prefix), **changes)
        corpus = load_corpus(settings)
        sampler = sampler_of(settings, corpus.num_windows)
        sampler.dp = dp
        ranks = [sampler.windows(2, rank) for rank in range(dp)]
        return [corpus.collate(indices, ALONE)[0].tolist() for indices in ranks]

    (whole,) = ids(1)
    assert [sample for rank in ids(2) for sample in rank] == whole
    assert ids(seed=7) != ids(seed=8)


def test_a_blend_takes_from_each_part_by_its_weight(tmp_path: Path) -> None:
    paths = [written(tmp_path / "low", 20), written(tmp_path / "high", 20, first=100)]
    corpus = load(100, blend=[(str(paths[0]), 3.0), (str(paths[1]), 1.0)], path=None)

    samples = corpus.collate(list(range(400)), ALONE)[0]
    assert ((samples >= 100).sum() / samples.numel()).item() == pytest.approx(0.25, abs=0.01)
    assert not ((samples < 100).any(1) & (samples >= 100).any(1)).any()
    assert blending_indices(8, [3, 1])[0].tolist() == [0, 1, 0, 0, 0, 1, 0, 0]


def test_a_split_is_cut_through_the_documents_in_their_order(prefix: Path) -> None:
    low, high = (load(path=str(prefix), split=(8, 2), split_part=part) for part in (0, 1))
    seen = [part.collate(list(range(24)), ALONE)[0] for part in (low, high)]

    assert seen[0].max() < 32 <= seen[1].min()


def test_the_last_documents_are_held_out(prefix: Path) -> None:
    settings = config(path=str(prefix), evaluation=EVALUATION)
    trained = load_corpus(settings).collate(list(range(24)), ALONE)[0]
    tried = load_validation(settings)

    assert tried.num_windows >= 2
    assert trained.max() < tried.collate([0, 1], ALONE)[0].min()
    with pytest.raises(ConfigError, match="leaves nothing of"):
        load_corpus(config(path=str(prefix), evaluation={**EVALUATION, "samples": 2000}))


def test_a_mask_goes_with_its_tokens(prefix: Path, tmp_path: Path) -> None:
    ids = read_indexed(str(prefix)).tokens.to(torch.int64)
    mask = tmp_path / "mask"
    mask.write_bytes((ids % 2).to(torch.uint8).numpy().tobytes())
    corpus = load(path=str(prefix), loss_mask=str(mask))

    targets = corpus.collate(list(range(24)), ALONE)[1]
    plain = load(path=str(prefix)).collate(list(range(24)), ALONE)[1]
    assert torch.equal(targets, torch.where(plain % 2 == 1, plain, IGNORE_INDEX))


def test_a_document_is_a_sample_where_they_are_padded(prefix: Path) -> None:
    corpus = load(path=str(prefix), packing="padded", loss_on="text")
    lengths = read_indexed(str(prefix)).lengths

    inputs, targets = corpus.collate([3, 4], ALONE)
    assert corpus.num_windows == 40
    assert inputs.unique(dim=1).tolist() == [[3], [4]]
    kept = (targets != IGNORE_INDEX).sum(1)
    assert kept.tolist() == [min(int(lengths[i]) - 1, 32) for i in (3, 4)]
    parts = [
        load(path=str(prefix), packing="padded", split=(2, 4, 4), split_part=part).num_windows
        for part in range(3)
    ]
    assert parts == [8, 16, 16]


def test_files_that_are_none_are_named(prefix: Path, tmp_path: Path) -> None:
    data, index = files_of(prefix)
    with pytest.raises(ConfigError, match="not an indexed dataset"):
        load(path=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="outside the vocabulary of 30"):
        load(path=str(prefix), vocab_size=30).collate([*range(24)], ALONE)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="but its index lists"):
        load(path=str(prefix))
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="is truncated or empty"):
        load(path=str(prefix))
    index.write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="not the index of a Megatron dataset"):
        load(path=str(prefix))


def test_a_sequence_of_less_than_nothing_is_named(tmp_path: Path) -> None:
    data, index = files_of(tmp_path / "a")
    data.write_bytes(bytes(20))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, 3, 1)
    index.write_bytes(head + struct.pack("<3i3qq", 10, -5, 10, 0, 10, 5, 0))

    with pytest.raises(ConfigError, match=r"a\.idx has a sequence of -5 tokens"):
        read_indexed(str(tmp_path / "a"))


def test_the_corpus_says_what_it_is(prefix: Path) -> None:
    corpus = load(path=str(prefix))

    assert isinstance(corpus, IndexedCorpus) and corpus.num_windows is None and not corpus.masked
