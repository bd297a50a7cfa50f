"""Drawings and what stands for encoders: every word is seen, and latents are as the model wants."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.mmdit import MMDiTShape
from paceline.files.recipe import load_recipe
from paceline.staging.conversions.random_data import (
    COLOURS,
    FACTOR,
    SHAPES,
    SHIFT,
    Encoder,
    Picture,
    bfloat16_bits,
    draw,
    pictures,
)

PICTURE = Picture("medium", "red", "square", "blue", "centre", "middle")


@pytest.fixture(scope="module")
def shape() -> MMDiTShape:
    model = load_recipe("flux1-schnell-tiny").model
    assert isinstance(model, MMDiTShape)
    return model


def test_a_square_is_drawn_in_its_colour_on_its_ground():
    image = draw(PICTURE, 16)

    assert image.shape == (16, 16, 4)
    assert image[8, 8].tolist() == [1, 0, 0, 1]
    assert image[0, 0].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_covers_some_of_the_image_and_no_two_are_alike(name: str):
    mask = draw(Picture("large", "red", name, "blue", "centre", "middle"), 16)[..., 3]

    assert 0.1 < mask.mean() < 0.8
    others = [
        draw(Picture("large", "red", other, "blue", "centre", "middle"), 16)[..., 3]
        for other in SHAPES
        if other != name
    ]
    assert all(abs(mask - other).mean() > 0.02 for other in others)


def test_the_place_is_where_the_words_say():
    mask = draw(Picture("small", "red", "disc", "blue", "upper", "right"), 16)[..., 3]
    rows, columns = np.nonzero(mask > 0.5)

    assert rows.mean() < 7 and columns.mean() > 8


def test_pictures_are_the_same_every_time_and_use_every_word():
    draw = pictures(400)

    assert draw[:10] == pictures(10)
    assert all(picture.colour != picture.ground for picture in draw)
    assert {picture.shape for picture in draw} == set(SHAPES)
    assert (
        {picture.colour for picture in draw} == {picture.ground for picture in draw} == set(COLOURS)
    )
    assert len(set(draw)) > 350


def test_latents_have_about_mean_0_and_deviation_1_for_the_model(shape: MMDiTShape):
    encoder = Encoder.of(shape)
    means = np.stack([encoder.sample(picture)["mean"] for picture in pictures(200)])
    latents = FACTOR * (means - SHIFT)

    assert abs(latents.mean()) < 0.3
    assert 0.6 < latents.std() < 1.4


def test_other_words_are_other_encodings(shape: MMDiTShape):
    encoder = Encoder.of(shape)
    red = encoder.sample(PICTURE)
    green = encoder.sample(Picture("medium", "red", "square", "green", "centre", "middle"))

    assert not np.allclose(red["pooled"], green["pooled"])
    differing = np.nonzero((red["text"] != green["text"]).any(axis=1))[0]
    assert differing.tolist() == [5]


def test_numbers_are_rounded_to_bf16_as_torch_rounds_them():
    torch = pytest.importorskip("torch")
    values = np.random.RandomState(0).standard_normal(1000).astype(np.float32)
    values[:3] = [1.00390625, 1.01171875, 0.0]

    rounded = bfloat16_bits(values).view(np.int16)

    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert (rounded == expected).all()
