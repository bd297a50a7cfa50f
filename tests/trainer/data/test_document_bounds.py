"""Where documents begin and end in windows, of every source that knows its documents."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.trainer.config import parse_config
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.data.samples import piece_bounds, window_bounds
from paceline.trainer.data.texts import END_OF_DOCUMENT
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.data.test_indexed import EVALUATION, written
from tests.trainer.example import settings

SEQ_LEN = 32


def documents_of(bounds: Tensor) -> list[list[int]]:
    """The lengths of each sample's documents."""
    return [[length for length in row if length] for row in bounds.diff(dim=1).tolist()]


def runs_of(ids: Tensor) -> list[list[int]]:
    """Lengths of equal neighbours, where each document is of one token only."""
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids]


def test_a_window_cuts_documents_at_its_ends() -> None:
    ends = torch.tensor([4, 10, 16, 20, 50])

    bounds = window_bounds(ends, [0, 10, 20, 45], 10)

    assert bounds.dtype == torch.int32
    assert documents_of(bounds) == [[4, 6], [6, 4], [10], [5, 5]]


def test_pieces_end_with_the_target_of_the_last_input() -> None:
    assert documents_of(piece_bounds([[3, 0, 8], [11], [10, 1]], 10)) == [[3, 7], [10], [10]]


def test_sequences_of_an_indexed_data_set_are_its_documents(tmp_path: Path) -> None:
    prefix = written(tmp_path / "numbered", 40)
    raw = settings(source="indexed", path=str(prefix), document_mask=True)
    raw["training"]["evaluation"] = {**EVALUATION, "samples": 6}
    config = parse_config(raw)

    for corpus in (load_corpus(config), load_validation(config)):
        ids, _, bounds = corpus.collate([*range(6)], ALONE)
        assert documents_of(bounds) == runs_of(ids)
        assert max(map(len, runs_of(ids))) > 1


def test_a_blend_keeps_documents_of_its_parts_apart(tmp_path: Path) -> None:
    blend = [(str(written(tmp_path / name, 9, first)), 1.0) for name, first in (("a", 0), ("b", 9))]
    raw = settings(source="indexed", blend=blend, document_mask=True)

    ids, _, bounds = load_corpus(parse_config(raw)).collate([*range(8)], ALONE)

    assert documents_of(bounds) == runs_of(ids)


def test_end_marks_end_documents_of_text_in_every_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * (1 + n % 7)}) + "\n" for n in range(200)))
    text = {"source": "jsonl", "path": str(file), "document_mask": True}

    for more in ({}, {"split": [1, 1], "split_part": 1}):
        raw = settings(**text, **more)
        raw["training"]["evaluation"] = EVALUATION
        config = parse_config(raw)
        for corpus in (load_corpus(config), load_validation(config)):
            ids, _, bounds = corpus.collate([0, 1], ALONE)
            ends = (ids == END_OF_DOCUMENT).int().sum(1).tolist()
            for row, lengths, marks in zip(ids, documents_of(bounds), ends, strict=True):
                at = torch.tensor(lengths).cumsum(0)[:marks] - 1
                assert (row[at] == END_OF_DOCUMENT).all() and sum(lengths) == SEQ_LEN


def test_without_the_mask_a_batch_has_no_bounds() -> None:
    corpus = load_corpus(parse_config(settings(source="stdlib")))

    assert len(corpus.collate([0], ALONE)) == 2
