"""Multi-token prediction: transformers' loss and gradients, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import DecoderShape
from paceline.trainer.config import parse_config
from paceline.trainer.data.batches import sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer import peers
from tests.trainer.example import lines, log, settings, steps, train, world_size
from tests.trainer.model.test_peers import (
    DEEPSEEK_V3,
    content,
    in_dtype,
    native_loss,
    native_model,
    worst,
)
from tests.trainer.test_export import exported, tensors_in, trained
from tests.trainer.test_hub_weights import begun, change, tokens
from tests.trainer.test_pretrained import STILL

__all__ = ["tokens"]

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


def hub(folder: Path, raw: dict[str, Any]) -> WithMtpLayer:
    """A model and its module, saved with the names and copies of the published folder."""
    torch.manual_seed(7)
    theirs = WithMtpLayer(raw)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    theirs.peer.save_pretrained(folder)
    number = raw["model"]["num_layers"]
    change(folder, num_hidden_layers=number, num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    tensors, block = load_file(file), f"model.layers.{number}"
    own = dict(theirs.mtp.named_parameters())
    for ours, name in {**OUTSIDE_THE_BLOCK, "final_norm": "shared_head.norm"}.items():
        tensors[f"{block}.{name}.weight"] = own[f"{OUTSIDE_THE_BLOCK[ours]}.weight"].detach()
    tensors[f"{block}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{block}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    return theirs


def test_weights_come_from_the_hub_and_go_there(tokens: Path, tmp_path: Path) -> None:
    raw = begun(tokens, tmp_path / "hub", **DEEPSEEK_V3, mtp_layers=1)
    theirs = hub(tmp_path / "hub", raw)
    raw["training"]["router_bias_update_rate"] = 0.0
    trained(tmp_path / "run", raw, 1, lr=STILL)

    exported(tmp_path / "run", tmp_path / "out")

    (step,) = steps(tmp_path / "run")
    config = parse_config(raw)
    corpus = load_corpus(config)
    windows = sampler_of(config, corpus.num_windows).windows(0, 0)
    inputs, targets = corpus.collate(windows, ALONE)
    with torch.no_grad():
        wanted = theirs.loss(torch.cat([inputs, targets[:, -1:]], 1)).item()
    assert step["loss"] + WEIGHT * step["mtp_loss"] == pytest.approx(wanted, rel=2e-6)
    before, after = tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    main = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    number = raw["model"]["num_layers"]  # transformers has that of the published model
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\."]
    layer = MtpModel.from_pretrained(main).layers[0]  # refuses a folder with missing weights
    read, own = dict(layer.named_parameters()), dict(theirs.mtp.named_parameters())
    assert all(torch.equal(read[name], own[name]) for name in own)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2, ep": {"zero_stage": 2, "ep": 2},
    "zero 3": {"zero_stage": 3},
    "zero 3, ep, recompute": {"zero_stage": 3, "ep": 2, "recompute": "full"},
    "tp": {"ranks": 1, "tp": 2},
    "tp, sp, recompute": {"ranks": 1, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "cp, all-gather": {"ranks": 1, "cp": 2},
    "cp, all-to-all, zero 3": {"ranks": 1, "cp": 2, "cp_exchange": "all-to-all", "zero_stage": 3},
    "cp, ring, ep": {"ranks": 1, "cp": 2, "cp_exchange": "ring", "ep": 2},
    "pp, gpipe": {"ranks": 1, "pp": 2, "schedule": "gpipe"},
    "pp, 1f1b": {"ranks": 1, "pp": 2},
    "pp, interleaved": {"ranks": 1, "pp": 2, "vp": 2, "schedule": "interleaved"},
    "pp, ep, zero 2": {"pp": 2, "ep": 2, "zero_stage": 2},
}


def run(folder: Path, ranks: int, **layout: Any) -> list[dict[str, float]]:
    """Loss, gradient norm and MTP loss of two steps, as means over the ranks."""
    sizes = {"num_layers": 4, "seq_len": 24, "global_batch": 4, "micro_batch": 1}
    raw = settings(ranks, 2, **{**DEEPSEEK_V3, **sizes, "dtype": "fp64", "mtp_layers": 2, **layout})
    assert train(folder, raw) == 0, log(folder)
    by_rank = [steps(folder, rank) for rank in range(world_size(raw))]
    names = ("loss", "grad_norm", "mtp_loss")
    return [
        {name: sum(line[name] for line in lines) / len(lines) for name in names}
        for lines in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize("layout", [{"zero_stage": 1}, {"pp": 2}])
def test_weights_take_the_memory_of_the_formula(layout: dict[str, Any], tmp_path: Path) -> None:
    """The last stage has an embedding for its MTP modules next to the head."""
    pp = layout.get("pp", 1)
    equal = {**DEEPSEEK_V3, "num_layers": 4, "first_dense_layers": 0, "dense_ffn_size": None}
    raw = settings(2 // pp, 3, **{**equal, "mtp_layers": 2, **layout})

    assert train(tmp_path, raw) == 0, log(tmp_path)

    fields = DecoderShape.model_fields
    shape = DecoderShape(**{key: raw["model"][key] for key in fields.keys() & raw["model"]})
    run = ParallelRun(Layout(micro_batch=1, **layout), shape, 2, seq_len=24, dtype="fp32")
    (memory,) = [line for line in lines(tmp_path, rank=1) if line["event"] == "memory"]
    assert memory["parts_bytes"]["weights"] == memory_per_device(run).weights_bytes


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"mtp_layers": 1}, {"vp": 2, "schedule": "zero-bubble"}),
        ({"tied_embeddings": True}, {"schedule": "1f1b"}),
    ],
    ids=["zero-bubble", "tied embeddings"],
)
def test_mtp_modules_train_in_a_pipeline(
    model: dict[str, Any], layout: dict[str, Any], tmp_path: Path
) -> None:
    alone = run(tmp_path / "alone", 1, **model)

    spread = run(tmp_path / "spread", 1, pp=2, **model, **layout)

    for one, two in zip(alone, spread, strict=True):
        assert two == pytest.approx(one, rel=1e-10)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The training in one process."""
    return run(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_mtp_modules_train_in_a_layout_as_in_one_process(
    layout: str, alone: list[dict[str, float]], tmp_path: Path
) -> None:
    spread = run(tmp_path / "spread", **{"ranks": 2, **LAYOUTS[layout]})

    for one, two in zip(alone, spread, strict=True):
        assert two == pytest.approx(one, rel=1e-10)
        assert one["mtp_loss"] != pytest.approx(one["loss"], rel=1e-3)
