"""The drawings of the small diffusion transformer, in the form that the trainer reads."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.mmdit import MMDiTShape
from paceline.files.recipe import load_recipe
from paceline.mlperf.run.tiny_images import write_images


def test_files_have_the_sizes_that_the_trainer_asks_for(tmp_path: Path):
    shape = load_recipe("flux1-schnell-tiny").model
    assert isinstance(shape, MMDiTShape)
    index = json.loads(write_images(tmp_path, shape, 3).read_text())

    (part,) = index["parts"]
    sizes = {name: (tmp_path / part[name]).stat().st_size for name in part if name != "samples"}
    latent = 2 * shape.latent_channels * shape.latent_size**2
    text = 2 * shape.text_len * shape.text_width
    assert part["samples"] == 3
    assert sizes == {
        "text": 3 * text,
        "pooled": 6 * shape.pooled_width,
        "mean": 3 * latent,
        "logvar": 3 * latent,
    }
    assert (tmp_path / index["empty"]["text"]).stat().st_size == text
    assert not any((tmp_path / index["empty"]["pooled"]).read_bytes())
