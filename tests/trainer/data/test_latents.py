"""Samples of a diffusion transformer: what is drawn, what files hold, what no layout changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.core.flops import FlopsInput, flops_per_sample
from paceline.core.mmdit import MMDiTShape
from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.data.latents import (
    TEXT,
    EncodedFiles,
    LatentCorpus,
    RandomSource,
    patches,
    shapes,
)
from paceline.trainer.model.decoder import LayerSetting
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from tests.trainer.example import settings
from tests.trainer.flux_peer import FULL, SMALL, flux_config

MODEL = flux_config(SMALL)


def corpus(seed: int = 1, **changes: Any) -> LatentCorpus:
    """Random samples."""
    model = flux_config(SMALL.model_copy(update=changes))
    return LatentCorpus(model, RandomSource(model), SMALL.seq_len, seed)


def encoded(folder: Path, counts: tuple[int, ...] = (2, 3)) -> Path:
    """An index of files whose samples hold their own number everywhere; no text is -1."""
    parts, number = [], 0
    for at, count in enumerate(counts):
        names = {name: f"{at}.{name}.bin" for name in shapes(MODEL)}
        for name, shape in shapes(MODEL).items():
            rows = [torch.full(shape, float(number + i)) for i in range(count)]
            save(folder / names[name], torch.stack(rows))
        parts.append({"samples": count, **names})
        number += count
    empty = {name: f"empty.{name}.bin" for name in TEXT}
    for name in TEXT:
        save(folder / empty[name], torch.full(shapes(MODEL)[name], -1.0))
    index = folder / "index.json"
    index.write_text(json.dumps({"schema": 1, "parts": parts, "empty": empty}))
    return index


def save(path: Path, x: torch.Tensor) -> None:
    """The bytes of a tensor in bf16."""
    path.write_bytes(bytes(x.to(torch.bfloat16).flatten().view(torch.uint8).tolist()))


@pytest.mark.parametrize("shape", [SMALL, FULL], ids=["small", "full"])
def test_a_sample_takes_the_flops_of_the_formula(shape: MMDiTShape) -> None:
    model = flux_config(shape)
    with torch.device("meta"):
        net = MMDiT(model, LayerSetting(shape.seq_len, torch.float32))
        net.rope = (
            torch.empty(shape.seq_len, 1, shape.head_dim),
            torch.empty(shape.seq_len, 1, shape.head_dim),
        )
        net.frequencies = torch.empty(128)
        latent = torch.empty(1, shape.image_tokens, shape.in_channels)
        text = torch.empty(1, shape.text_len, shape.text_width)
        pooled = torch.empty(1, shape.pooled_width)
        with FlopCounterMode(display=False) as counter:
            net(latent, latent, torch.empty(1), text, pooled).backward()

    wanted = flops_per_sample("full-attention", FlopsInput(shape, shape.seq_len))
    assert counter.get_total_flops() == pytest.approx(wanted, rel=1e-12)


def test_inputs_and_targets_are_one_straight_path() -> None:
    """x + (1 - t) v is the noise and x - t v the latent, whatever was drawn."""
    noisy, velocity, time, *_ = corpus().collate([*range(200)], ALONE)
    t = time.view(-1, 1, 1)
    noise, latent = noisy + (1 - t) * velocity, noisy - t * velocity

    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, rel=0.02)
    assert latent.mean().item() == pytest.approx(-0.3611 * 0.1159, abs=0.02)
    assert time.min() >= 0 and time.max() < 1 and time.mean().item() == pytest.approx(0.5, abs=0.1)


def test_a_patch_is_the_channels_of_a_square() -> None:
    latent = torch.arange(2 * 4 * 4).view(2, 4, 4)
    found = patches(latent, 2)

    assert found.shape == (4, 8)
    assert found[1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


def test_context_ranks_hold_equal_parts_of_what_one_rank_holds() -> None:
    whole = corpus().collate([3, 4], ALONE)
    parts = [corpus().collate([3, 4], MeshAxis(2, i)) for i in range(2)]

    for field in (0, 1, 3):
        assert torch.equal(torch.cat([part[field] for part in parts], dim=1), whole[field])
    for field in (2, 4):
        assert all(torch.equal(part[field], whole[field]) for part in parts)


def test_draws_depend_on_seed_and_number_alone() -> None:
    (first,), (again,) = (c.collate([7], ALONE)[:1] for c in (corpus(), corpus()))

    assert torch.equal(first, again)
    assert not torch.equal(first, corpus(seed=2).collate([7], ALONE)[0])
    assert not torch.equal(first, corpus().collate([8], ALONE)[0])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_the_stated_share_of_texts_is_dropped(share: float) -> None:
    text = corpus(text_dropout=share).collate([*range(400)], ALONE)[3]

    assert (text == 0).all(dim=(1, 2)).double().mean() == pytest.approx(share, abs=0.05)


def test_every_sample_of_the_files_is_used_once_an_epoch(tmp_path: Path) -> None:
    files = EncodedFiles(str(encoded(tmp_path)), MODEL, seed=1)
    epochs = [
        [int(files.sample(5 * epoch + i, torch.Generator())["pooled"][0]) for i in range(5)]
        for epoch in range(4)
    ]

    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert files.no_text()["text"].unique().tolist() == [-1]


def test_a_sample_met_again_gets_other_noise(tmp_path: Path) -> None:
    files = EncodedFiles(str(encoded(tmp_path, (1,))), MODEL, seed=1)
    drawn = LatentCorpus(MODEL, files, SMALL.seq_len, 1)

    assert not torch.equal(drawn.training_sample(0, ALONE)[0], drawn.training_sample(1, ALONE)[0])


def spoil_size(index: Path) -> None:
    (index.parent / "1.mean.bin").write_bytes(b"12")


def spoil_schema(index: Path) -> None:
    index.write_text('{"schema": 2}')


def spoil_parts(index: Path) -> None:
    index.write_text('{"schema": 1, "parts": [{"samples": 1}]}')


def spoil_json(index: Path) -> None:
    index.write_text("{")


@pytest.mark.parametrize("spoil", [spoil_size, spoil_schema, spoil_parts, spoil_json])
def test_files_that_are_not_what_they_should_be_are_refused(tmp_path: Path, spoil: Any) -> None:
    index = encoded(tmp_path)
    spoil(index)

    with pytest.raises(ConfigError, match=r"data\.path: "):
        EncodedFiles(str(index), MODEL, seed=1)


def test_a_text_file_is_no_source_of_latents() -> None:
    raw = settings(source="stdlib")
    raw["model"] = SMALL.model_dump(mode="json")

    with pytest.raises(ConfigError, match="an mmdit needs synthetic"):
        load_corpus(parse_config(raw))
