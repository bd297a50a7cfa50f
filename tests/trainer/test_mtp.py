"""Multi-token prediction: transformers' loss and gradients, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")

from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from paceline.trainer.config import parse_config
from tests.trainer import peers
from tests.trainer.example import log, settings, steps, train, world_size
from tests.trainer.model.test_peers import (
    DEEPSEEK_V3,
    content,
    in_dtype,
    native_loss,
    native_model,
    worst,
)

WEIGHT = 0.3
OUTSIDE_THE_BLOCK = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "post_norm",
}


class WithMtpLayer(nn.Module):
    """A peer whose last block is that of a layer for the second token, in transformers' form."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.size = {**raw["model"], "num_layers": raw["model"]["num_layers"] + 1}
        self.peer = peers.deepseek_v3(self.size)
        *_, block = self.peer.model.layers
        self.mtp = MtpLayer(self.peer.config, lambda *_: block, DeepseekV3RMSNorm, 0)

    def loss(self, ids: Tensor) -> Tensor:
        """The mean loss of (B, T + 1) tokens and, weighted, that of the tokens behind the next."""
        model, inputs, targets = self.peer.model, ids[:, :-1], ids[:, 1:]
        *blocks, _ = every = model.layers
        model.layers = nn.ModuleList(blocks)
        hidden = model(input_ids=inputs).last_hidden_state
        model.layers = every
        length = inputs.shape[1] - 1
        positions = torch.arange(length).unsqueeze(0)
        mask = torch.full((length, length), -torch.inf, dtype=hidden.dtype).triu(1)
        later = self.mtp(
            inputs_embeds=model.embed_tokens(inputs[:, 1:]),
            previous_hidden_state=hidden[:, :-1],
            position_embeddings=model.rotary_emb(hidden[:, :-1], positions),
            attention_mask=mask[None, None],
            position_ids=positions,
            past_key_values=None,
        )
        losses = [
            functional.cross_entropy(
                self.peer.lm_head(x).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            for x, labels in ((hidden, targets), (later, targets[:, 1:]))
        ]
        return (losses[0] + WEIGHT * losses[1]) / targets.numel()

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the peer's names, by those of the trainer."""
        inner = {
            name.removeprefix("peer."): tensor
            for name, tensor in tensors.items()
            if name.startswith("peer.")
        }
        last = f"blocks.{self.size['num_layers'] - 1}."
        found = {
            name.replace(last, "mtp.0.block."): tensor
            for name, tensor in peers.weights_of(self.size, inner).items()
        }
        for ours, theirs in OUTSIDE_THE_BLOCK.items():
            found[f"mtp.0.{ours}.weight"] = tensors[f"mtp.{theirs}.weight"]
        return found


def test_loss_and_every_gradient_are_those_of_transformers() -> None:
    raw = content("deepseek-v3", mtp_layers=1)
    ours = native_model(parse_config(raw), torch.float64)
    with in_dtype(torch.float64):
        theirs = WithMtpLayer(raw).double()
    places = theirs.by_our_names(dict(theirs.named_parameters()))
    own = dict(ours.named_parameters())
    assert set(places) == set(own)
    biases = [b for n, b in theirs.named_buffers() if n.endswith("score_correction_bias")]
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(own[name])
        for bias, buffer in zip(biases, ours.buffers(), strict=True):
            bias.copy_(buffer)
    ids = torch.randint(raw["model"]["vocab_size"], (3, 25))

    with in_dtype(torch.float64):
        wanted = theirs.loss(ids)
        wanted.backward()
    loss = native_loss(ours, ids)
    loss.backward()

    mtp_loss = ours.take_mtp_loss()
    assert mtp_loss is not None and mtp_loss > 0 and ours.take_mtp_loss() is None
    total = loss.item() + WEIGHT * mtp_loss.item()
    assert total == pytest.approx(wanted.item(), rel=1e-12)
    named = dict(theirs.named_parameters())
    grads = {n: p.grad for n, p in named.items() if p.grad is not None}
    error, name = worst(ours, theirs.by_our_names(grads))
    assert error < 1e-10, name


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2, ep": {"zero_stage": 2, "ep": 2},
    "zero 3": {"zero_stage": 3},
    "zero 3, ep, recompute": {"zero_stage": 3, "ep": 2, "recompute": "full"},
}


def run(folder: Path, ranks: int, **layout: Any) -> list[dict[str, float]]:
    """Loss, gradient norm and MTP loss of two steps, as means over the ranks."""
    sizes = {"seq_len": 24, "global_batch": 4, "micro_batch": 1}
    raw = settings(ranks, 2, **{**DEEPSEEK_V3, **sizes, "dtype": "fp64", "mtp_layers": 2, **layout})
    assert train(folder, raw) == 0, log(folder)
    by_rank = [steps(folder, rank) for rank in range(world_size(raw))]
    names = ("loss", "grad_norm", "mtp_loss")
    return [
        {name: sum(line[name] for line in lines) / len(lines) for name in names}
        for lines in zip(*by_rank, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The training in one process."""
    return run(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_mtp_modules_train_in_a_layout_as_in_one_process(
    layout: str, alone: list[dict[str, float]], tmp_path: Path
) -> None:
    spread = run(tmp_path / "spread", 2, **LAYOUTS[layout])

    for one, two in zip(alone, spread, strict=True):
        assert two == pytest.approx(one, rel=1e-10)
        assert one["mtp_loss"] != pytest.approx(one["loss"], rel=1e-3)
