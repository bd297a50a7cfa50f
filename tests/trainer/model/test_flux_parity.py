"""Our Flux computes what diffusers' does: size, output, loss, all gradients, from equal weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.mmdit import MMDiTShape
from paceline.core.shape import num_parameters
from paceline.trainer.model.decoder import LayerSetting
from paceline.trainer.model.flux import MMDiT
from tests.trainer.flux_peer import (
    FULL,
    SMALL,
    copy_weights,
    flux_config,
    in_our_order,
    peer_settings,
    peer_velocity,
)

TOLERANCE = {torch.float32: 2e-5, torch.float64: 2e-7}
"""diffusers makes the tables of the angles in fp32, whatever the model's dtype."""


@pytest.fixture(scope="module")
def peer_of() -> Callable[[MMDiTShape], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    return lambda shape: flux.FluxTransformer2DModel(**peer_settings(shape))


def sample(shape: MMDiTShape, dtype: torch.dtype) -> list[Tensor]:
    """Noisy latents, velocities, times, texts and pooled texts of three samples."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(shape.image_tokens, shape.in_channels)] * 2
    sizes += [(), (shape.text_len, shape.text_width), (shape.pooled_width,)]
    drawn = [torch.randn(3, *size, generator=generator).to(dtype) for size in sizes]
    drawn[2] = torch.tensor([0.1, 0.5, 0.875], dtype=dtype)
    return drawn


def both(
    peer_of: Callable[[MMDiTShape], Any], dtype: torch.dtype, recompute: str = "none"
) -> tuple[Any, MMDiT]:
    """diffusers' model and ours with the same random weights."""
    torch.manual_seed(1)
    peer = peer_of(SMALL).to(dtype)
    for name, parameter in peer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm_" in name else 0.0, 0.1)
    ours = MMDiT(flux_config(SMALL), LayerSetting(SMALL.seq_len, dtype, recompute)).to(dtype)
    copy_weights(peer, ours, SMALL)
    ours.make_tables(torch.device("cpu"))
    if dtype == torch.float64:
        peer.time_text_embed.time_proj.forward = exact_waves
    return peer, ours


def exact_waves(time: Tensor) -> Tensor:
    """The waves of (B,) times that diffusers would make, had it not made them in fp32."""
    rates = 10_000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    angle = time.double()[:, None] * rates
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def far(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 distance."""
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_output_loss_and_gradients_are_those_of_diffusers(
    peer_of: Callable[[MMDiTShape], Any], dtype: torch.dtype, recompute: str
) -> None:
    peer, ours = both(peer_of, dtype, recompute)
    noisy, velocity, *rest = sample(SMALL, dtype)
    theirs = peer_velocity(peer, SMALL, noisy, *rest)
    wanted = (theirs - velocity).square().mean()
    wanted.backward()
    ours.scale = 1 / velocity.numel()

    found = ours(noisy, velocity, *rest)
    found.backward()

    assert far(ours.velocity(noisy, *rest), theirs) < TOLERANCE[dtype]
    assert found.item() == pytest.approx(wanted.item(), rel=TOLERANCE[dtype])
    gradients = in_our_order({n: p.grad for n, p in peer.named_parameters()}, SMALL)
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        norm = gradients[name].norm().item()
        apart = (parameter.grad - gradients[name]).norm().item()
        assert apart < TOLERANCE[dtype] * norm + 1e-7, name


def test_a_wrong_order_of_weights_would_be_seen(peer_of: Callable[[MMDiTShape], Any]) -> None:
    peer, ours = both(peer_of, torch.float64)
    noisy, _, *rest = sample(SMALL, torch.float64)
    with torch.no_grad():
        weight = ours.get_parameter("blocks.2.linear2.weight")
        weight.copy_(weight.roll(1, dims=1))

    assert far(ours.velocity(noisy, *rest), peer_velocity(peer, SMALL, noisy, *rest)) > 1e-3


@pytest.mark.parametrize("shape", [SMALL, FULL], ids=["small", "full"])
def test_the_parameter_count_is_that_of_diffusers(
    peer_of: Callable[[MMDiTShape], Any], shape: MMDiTShape
) -> None:
    with torch.device("meta"):
        peer = peer_of(shape)

    assert sum(p.numel() for p in peer.parameters()) == num_parameters(shape)
