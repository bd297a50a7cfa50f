"""A run trains on its part of the samples alone, and is evaluated by that part's last ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.training import Data
from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.data.corpus import Corpus, data_record, load_corpus, load_validation
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.example import settings, steps, train

SPLIT = [2, 4, 4]
SEQ_LEN = 32
HELD_OUT = {"every_samples": 8, "skip_first": 0, "samples": 3, "target": None}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Sources of 100 different samples."""
    texts = [f"record {i:04d} of a hundred " for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    (tmp_path / "windows.txt").write_text("".join(f"{i:07d}|" for i in range(400)))
    ids = torch.arange(100 * SEQ_LEN + 1, dtype=torch.int16)
    (tmp_path / "tokens.bin").write_bytes(ids.numpy().tobytes())
    padded = {"packing": "padded"}
    return {
        "jsonl": {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), **padded},
        "paragraphs": {"source": "text", "path": str(tmp_path / "a.txt"), **padded},
        "packed": {"source": "text", "path": str(tmp_path / "windows.txt")},
        "tokens": {"source": "tokens", "path": str(tmp_path / "tokens.bin")},
    }


def config(part: int, evaluation: dict[str, Any] | None = None, **changes: Any) -> TrainerConfig:
    raw = settings(vocab_size=4096, **{"seq_len": SEQ_LEN, "steps": 2, **changes})
    raw["data"] |= {"split": SPLIT, "split_part": part}
    raw["training"]["evaluation"] = evaluation
    return parse_config(raw)


def samples(corpus: Corpus) -> list[tuple[int, ...]]:
    inputs, *_ = corpus.collate([*range(corpus.num_windows or 0)], ALONE)
    return [tuple(row.tolist()) for row in inputs]


@pytest.mark.parametrize("name", ["jsonl", "paragraphs", "packed", "tokens"])
def test_parts_are_shares_of_all_samples_and_have_none_in_common(sources: Any, name: str) -> None:
    parts = [samples(load_corpus(config(part, **sources[name]))) for part in range(3)]
    again = samples(load_corpus(config(1, **sources[name], seed=99, steps=500)))

    assert [len(part) for part in parts] == pytest.approx([20, 40, 40], abs=1)
    assert len({sample for part in parts for sample in part}) == sum(map(len, parts))
    assert again == parts[1]
    assert parts[0] != sorted(parts[0]), "the share is drawn, not cut off the beginning"


@pytest.mark.parametrize("name", ["jsonl", "paragraphs", "packed", "tokens"])
def test_what_evaluates_is_of_the_same_part_and_not_trained_on(sources: Any, name: str) -> None:
    whole = samples(load_corpus(config(2, **sources[name])))
    asked = config(2, {**HELD_OUT, "path": None}, **sources[name])
    other = config(2, {**HELD_OUT, "path": sources[name]["path"]}, **sources[name])

    assert samples(load_corpus(asked)) == whole[:-3]
    assert samples(load_validation(asked)) == whole[-3:]
    assert samples(load_corpus(other)) == whole
    assert samples(load_validation(other)) == whole[:3]


def test_masks_and_counts_go_with_the_samples(sources: Any, tmp_path: Path) -> None:
    mask = torch.arange(100 * SEQ_LEN + 1).remainder(2).to(torch.uint8)
    (tmp_path / "mask.bin").write_bytes(mask.numpy().tobytes())
    masked = config(0, **sources["tokens"], loss_mask=str(tmp_path / "mask.bin"))
    corpus, padded = load_corpus(masked), load_corpus(config(0, **sources["jsonl"]))
    _, targets = corpus.collate([0, 1], ALONE)

    assert corpus.masked and (targets >= 0).sum() == SEQ_LEN
    assert corpus.num_tokens == 20 * SEQ_LEN
    assert padded.num_tokens == sum(len([t for t in s if t != 256]) + 1 for s in samples(padded))
    record = data_record(masked.data, corpus)
    assert (record["windows"], record["split"], record["split_part"]) == (20, SPLIT, 0)


def test_a_part_that_holds_nothing_is_refused(sources: Any) -> None:
    with pytest.raises(ValueError, match="split_part 3 of split"):
        Data(split=(2, 4, 4), split_part=3)
    with pytest.raises(ValueError, match="split_part 1 of split"):
        Data(split=(10, 0, 0), split_part=1)
    with pytest.raises(ConfigError, match="leaves nothing of part 0"):
        load_corpus(config(0, {**HELD_OUT, "samples": 20, "path": None}, **sources["jsonl"]))


def test_a_training_takes_its_part(sources: Any, tmp_path: Path) -> None:
    raw = settings(**sources["jsonl"], steps=2)
    losses = []
    for part in (0, 1):
        raw["data"] |= {"split": SPLIT, "split_part": part}
        assert train(tmp_path / str(part), raw) == 0
        losses.append(steps(tmp_path / str(part))[0]["loss"])
    assert losses[0] != losses[1]
