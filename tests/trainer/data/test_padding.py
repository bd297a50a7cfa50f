"""Padded data: one record a sample, its padding known, and the loss over all of it or the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.ranks import merge_ranks
from paceline.core.steps import Steps
from paceline.files.events import read_rank
from paceline.trainer.config import parse_config
from paceline.trainer.data.corpus import PaddedCorpus, load_corpus, pad
from paceline.trainer.data.texts import END_OF_DOCUMENT
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.example import lines, log, settings, train, world_size

END = END_OF_DOCUMENT


def load(**changes: Any) -> PaddedCorpus:
    """The records of these settings; samples have 32 tokens."""
    found = load_corpus(parse_config(settings(packing="padded", **changes)))
    assert isinstance(found, PaddedCorpus)
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_records_are_cut_or_padded_with_end_marks(masked: bool) -> None:
    corpus = pad([b"ab", b"", b"abcdefgh"], seq_len=4, limit=100, masked=masked)
    inputs, targets = corpus.collate([0, 1], ALONE)
    ignored = IGNORE_INDEX if masked else END

    assert corpus.num_windows == 2 and corpus.num_tokens == 3 + 5
    assert inputs.tolist() == [[97, 98, END, END], [97, 98, 99, 100]]
    assert targets.tolist() == [[98, END, ignored, ignored], [98, 99, 100, 101]]
    assert corpus.real_tokens([0]) == 3 and corpus.real_tokens([1, 0, 1]) == 4 + 3 + 4


def test_records_beyond_the_limit_are_left_out() -> None:
    assert pad([b"abc"] * 9, seq_len=8, limit=10, masked=False).num_windows == 2
    assert pad([], seq_len=8, limit=10, masked=False).num_windows == 0


def test_a_texts_records_are_its_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\none\n  more\r\n\r\ntwo\n \n\n\nthree")
    corpus = load(source="text", path=str(tmp_path / "a.txt"))
    texts = [
        bytes(corpus.tokens[start : end - 1].tolist())
        for start, end in zip(corpus.ends, corpus.ends[1:], strict=False)
    ]

    assert texts == [b"one\n  more", b"two", b"three"]


def test_the_standard_librarys_paragraphs_need_padding() -> None:
    corpus = load(source="stdlib", steps=50)

    assert corpus.num_windows == 50 * 4
    assert 0.3 < corpus.real_tokens([*range(200)]) / (200 * 32) < 1


def test_no_more_records_are_read_than_the_run_can_use(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 24 + "{\n")

    assert load(source="jsonl", path=str(tmp_path / "a.jsonl")).num_windows == 6 * 4


def test_random_samples_are_full(tmp_path: Path) -> None:
    corpus = load_corpus(parse_config(settings(packing="padded", source="synthetic")))
    inputs, targets = corpus.collate([0, 1], ALONE)

    assert corpus.real_tokens([0, 1]) == inputs.numel() == 64
    assert not (targets == IGNORE_INDEX).any()


RECORDS = ["word " * n for n in (1, 2, 9, 3, 1, 6, 2)]
"""Fewer than a step takes, and most shorter than a sample."""
LAYOUTS: list[dict[str, Any]] = [{"ranks": 2}, {"cp": 2}]


def trained(folder: Path, ranks: int = 1, **changes: Any) -> Steps:
    """The merged steps of a training on RECORDS with the loss over the text."""
    path = folder / "a.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in RECORDS))
    raw = settings(
        ranks, 4, source="jsonl", path=str(path), packing="padded", loss_on="text",
        global_batch=8, micro_batch=2, lr=1e-2, memory_parts=False, **changes,
    )  # fmt: skip
    assert train(folder, raw) == 0, log(folder)
    files = [folder / "steps" / f"rank-{r:05d}.jsonl" for r in range(world_size(raw))]
    return merge_ranks({
        rank: Steps.of(read_rank(file.read_text().splitlines()).steps)
        for rank, file in enumerate(files)
    })  # fmt: skip


def test_ranks_with_more_padding_weigh_less_whatever_the_layout(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = trained(tmp_path / "alone")
    data = lines(tmp_path / "alone")[0]["data"]
    lengths = [min(32, len(text) + 1) for text in RECORDS]

    assert data["windows"] == 7 and data["packing"] == "padded" and data["loss_on"] == "text"
    assert data["real_tokens_per_sample"] == pytest.approx(sum(lengths) / 7)
    assert sum(lengths) < alone["tokens"][0] < 8 * 32
    for layout in LAYOUTS:
        folder = tmp_path / str(layout)
        folder.mkdir()
        steps = trained(folder, **layout)
        assert steps["tokens"].tolist() == pytest.approx(alone["tokens"].tolist())
        assert steps["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert steps["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert torch.tensor(alone["loss"]).diff().max() < 0
