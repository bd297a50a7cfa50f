"""What is held out is the end of the data, the same for every seed, and never trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.data.corpus import Corpus, load_corpus, load_validation
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer.example import settings

SAMPLES, SEQ_LEN = 5, 32


def config(**changes: Any) -> TrainerConfig:
    """A training that is evaluated on SAMPLES samples of its data, for more steps than it has."""
    path = changes.pop("held_out", None)
    raw = settings(steps=5000, **changes)
    raw["training"]["evaluation"] = {
        "every_samples": 8, "skip_first": 0, "samples": SAMPLES, "target": None, "path": path,
    }  # fmt: skip
    return parse_config(raw)


def words(folder: Path, num: int, width: int = 40) -> list[str]:
    """Different texts that nothing else says."""
    source = random.Random(3)
    return [
        f"{i}:" + "".join(source.choices("abcdefgh", k=source.randint(5, width)))
        for i in range(num)
    ]


def tokens(corpus: Corpus) -> list[bytes]:
    """The inputs of all samples as text, end marks left out."""
    assert corpus.num_windows is not None
    inputs, *_ = corpus.collate([*range(corpus.num_windows)], ALONE)
    return [bytes(row[row < 256].to(torch.uint8).tolist()) for row in inputs]


def test_the_last_tokens_of_a_file_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(torch.arange(300, dtype=torch.int16).numpy().tobytes())

    made = config(source="tokens", path=str(path), token_dtype="uint16")

    held, trained = load_validation(made), load_corpus(made)
    assert held.num_windows == SAMPLES
    first = held.collate([0], ALONE)[0][0, 0].item()
    last = max(x.max().item() for x in trained.collate([*range(trained.num_windows or 0)], ALONE))
    assert first == 300 - SAMPLES * SEQ_LEN - 1 > last


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(words(tmp_path, 60)))
    whole = path.read_bytes()

    made = config(source="text", path=str(path))

    held = b"".join(tokens(load_validation(made)))
    trained = b"".join(tokens(load_corpus(made)))
    assert whole.endswith(held[-20:]) or held[-20:] in whole[-60:]
    assert len(trained) + len(held) <= len(whole) and whole.startswith(trained)


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("num", [40, 4000])
def test_no_record_is_both_trained_on_and_held_out(tmp_path: Path, packing: str, num: int) -> None:
    texts = words(tmp_path, num)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    made = config(source="jsonl", path=str(path), packing=packing)

    held, trained = (b" ".join(tokens(c)) for c in (load_validation(made), load_corpus(made)))
    numbers = [{i for i in range(num) if texts[i][:8].encode() in part} for part in (held, trained)]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]
    assert min(numbers[0]) > max(numbers[1])


def test_paragraphs_are_held_out_whole(tmp_path: Path) -> None:
    texts = words(tmp_path, 50, width=20)
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(texts))

    held = load_validation(config(source="text", path=str(path), packing="padded"))

    assert [text.decode() for text in tokens(held)] == texts[-SAMPLES:]


def test_the_seed_changes_what_is_trained_on_first_and_not_what_is_held_out() -> None:
    one, other = (config(source="stdlib", seed=seed) for seed in (1, 2))

    held = [load_validation(made).collate([*range(SAMPLES)], ALONE)[0] for made in (one, other)]
    first = [load_corpus(made).collate([0], ALONE)[0] for made in (one, other)]

    assert torch.equal(*held) and not torch.equal(*first)


def test_a_file_of_its_own_leaves_all_data_to_the_training(tmp_path: Path) -> None:
    mine, own = tmp_path / "a.txt", tmp_path / "b.txt"
    mine.write_text("x" * 400)
    own.write_text("y" * 400)

    made = config(source="text", path=str(mine), held_out=str(own))

    assert set(b"".join(tokens(load_validation(made)))) == {ord("y")}
    assert load_corpus(made).num_windows == 400 // SEQ_LEN


def test_random_samples_that_are_held_out_are_others() -> None:
    made = config(source="synthetic")

    held, trained = (
        c.collate([*range(SAMPLES)], ALONE)[0] for c in (load_validation(made), load_corpus(made))
    )
    assert not any(torch.equal(a, b) for a in held for b in trained)


def test_data_that_is_too_short_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)

    with pytest.raises(ConfigError, match=r"leaves nothing of .*a\.txt to train on"):
        load_corpus(config(source="text", path=str(path)))
    with pytest.raises(ConfigError, match=r"evaluation\.samples 5: .*a\.txt has only 3 samples"):
        load_validation(config(source="text", path=str(path), held_out=str(path)))
