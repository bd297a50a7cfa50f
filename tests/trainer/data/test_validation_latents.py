"""Held-out latents: the files' last samples, tried at fixed times, each time counting as much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engines import native
from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.data.latents import RandomSource, ValidationLatents
from paceline.trainer.evaluation import sample_weights
from paceline.trainer.parallel.mesh import ALONE
from tests.example import make_spec
from tests.trainer.data.test_latents import encoded
from tests.trainer.flux_peer import SMALL, flux_config

MODEL = flux_config(SMALL)


def config(folder: Path, samples: int, own: Path | None = None) -> TrainerConfig:
    """A training on five encoded samples, of which some are held out."""
    training = make_spec().training.model_copy(update={"seq_len": SMALL.seq_len})
    spec = make_spec(ranks=1, model=SMALL, training=training)
    raw = native.settings(spec)
    raw["data"] |= {"source": "latents", "path": str(encoded(folder))}
    raw["training"]["evaluation"] = {
        "every_samples": 8, "skip_first": 0, "samples": samples, "target": None,
        "path": str(own) if own else None,
    }  # fmt: skip
    return parse_config(raw)


def held(num: int) -> ValidationLatents:
    """Return `num` random samples."""
    return ValidationLatents(MODEL, RandomSource(MODEL), SMALL.seq_len, 0, num)


def pooled(corpus: object, numbers: list[int]) -> list[float]:
    """Which encoded samples these are."""
    *_, text = corpus.collate(numbers, ALONE)  # type: ignore[attr-defined]
    return [row[0].item() for row in text]


def test_the_last_samples_of_the_files_are_never_trained_on(tmp_path: Path) -> None:
    made = config(tmp_path, samples=2)

    assert pooled(load_validation(made), [0, 1]) == [3.0, 4.0]
    assert set(pooled(load_corpus(made), [*range(60)])) <= {-1.0, 0.0, 1.0, 2.0}


def test_files_of_their_own_are_taken_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    made = config(tmp_path, samples=2, own=encoded(tmp_path / "own"))

    assert pooled(load_validation(made), [0, 1]) == [0.0, 1.0]
    assert 4.0 in pooled(load_corpus(made), [*range(60)])


def test_too_few_samples_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 samples, all held out"):
        load_corpus(config(tmp_path, samples=5))
    with pytest.raises(ConfigError, match=r"evaluation\.samples 6: .* has only 5 samples"):
        load_validation(config(tmp_path, samples=6))


def test_sample_i_is_tried_at_i_eighths_and_always_alike() -> None:
    first, again = (held(11).collate([*range(11)], ALONE) for _ in range(2))

    assert first[2].tolist() == [i % 8 / 8 for i in range(11)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1][0], first[1][8])


@pytest.mark.parametrize("num", [8, 11, 3])
def test_every_time_counts_as_much_as_another(num: int) -> None:
    """The weighted mean of losses is the mean over the times of their means."""
    losses, weights = torch.rand(num, dtype=torch.float64), sample_weights(held(num), num)

    means = [losses[time::8].mean() for time in range(min(num, 8))]
    assert (weights * losses).sum() / weights.sum() == pytest.approx(sum(means) / len(means))
    assert weights.sum().item() == pytest.approx(num)
