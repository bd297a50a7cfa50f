"""What was trained becomes a model's folder of the hub, whatever layout wrote the checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from paceline.core.shape import DecoderShape, lora_parameters
from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.data.batches import sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.hub.export import ExportSettings, export
from paceline.trainer.hub.settings import family_of
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer import peers
from tests.trainer.example import log, settings, steps, train
from tests.trainer.test_hub_weights import SHAPES, begun, change, hub, tokens
from tests.trainer.test_pretrained import STILL
from tests.trainer.test_randomness import LORA

__all__ = ["tokens"]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"ranks": 2, "tp": 2, "dp": 1},
    "zero 3": {"ranks": 2, "zero_stage": 3},
    "pp 2": {"ranks": 2, "pp": 2, "dp": 1},
}


def trained(folder: Path, raw: dict[str, Any], num_steps: int, lr: float = 1e-3) -> None:
    """A training with a checkpoint at its end."""
    raw["training"] |= {"steps": num_steps, "lr": lr, "weight_decay": 0.0}
    raw["checkpoint"]["every"] = num_steps
    assert train(folder, raw) == 0, log(folder)


def first_loss(folder: Path, raw: dict[str, Any], weights: Path) -> float:
    """What the trainer itself makes of some weights on the first step's samples, on one rank."""
    raw["training"]["initial_weights"] = str(weights)
    assert train(folder, raw) == 0, log(folder)
    return steps(folder)[0]["loss"]


def loss_of(model: nn.Module, raw: dict[str, Any]) -> float:
    """The mean loss of another library's model on the same samples."""
    config = parse_config(raw)
    corpus = load_corpus(config)
    windows = sampler_of(config, corpus.num_windows).windows(0, 0)
    inputs, targets = corpus.collate(windows, ALONE)
    with torch.no_grad():
        return peers.mean_loss(model.eval(), torch.cat([inputs, targets[:, -1:]], 1)).item()


def exported(run: Path, to: Path, **asked: Any) -> dict[str, Any]:
    return export(ExportSettings(str(run), str(to), **asked))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("opt-350m", "tp 2"),
        ("gpt", "zero 3"),
        ("llama", "pp 2"),
        ("mistral", "tp 2"),
        ("mixtral", "zero 3"),
    ],
)
def test_what_was_trained_computes_the_same_in_transformers(
    model: str, layout: str, tokens: Path, tmp_path: Path
) -> None:
    raw = begun(tokens, tmp_path / "hub", **SHAPES[model], **LAYOUTS[layout])
    hub(tmp_path / "hub", raw)
    trained(tmp_path / "run", raw, 2)

    answer = exported(tmp_path / "run", tmp_path / "out", shard_bytes=40_000)

    alone = begun(tokens, tmp_path / "hub", **SHAPES[model])
    ours = first_loss(tmp_path / "alone", alone, tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loss_of(theirs, alone) == pytest.approx(ours, rel=2e-6)
    assert ours < steps(tmp_path / "run")[0]["loss"] * 0.999
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(answer["files"]) == len({*index["weight_map"].values()}) > 1
    assert index["weight_map"].keys() == tensors_in(tmp_path / "out").keys()
    assert not [*tmp_path.glob(".out*")]


@pytest.mark.parametrize("model", ["opt-350m", "gpt", "llama", "qwen3", "qwen3-moe"])
def test_tensors_that_nothing_changed_come_back_bit_by_bit(
    model: str, tokens: Path, tmp_path: Path
) -> None:
    raw = begun(tokens, tmp_path / "hub", **SHAPES[model], vocab_multiple=77)
    unpadded = {**raw, "model": {**raw["model"], "padded_vocab": raw["model"]["vocab_size"]}}
    hub(tmp_path / "hub", unpadded)
    change(tmp_path / "hub", bos_token_id=3)
    (tmp_path / "hub" / "tokenizer.json").write_text("{}")
    trained(tmp_path / "run", raw, 1, lr=STILL)

    answer = exported(tmp_path / "run", tmp_path / "out")
    exported(tmp_path / "run", tmp_path / "half", dtype="bf16")

    before, after = tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "out")
    assert raw["model"]["padded_vocab"] > raw["model"]["vocab_size"]
    assert before.keys() == after.keys() and answer["like"] == str(tmp_path / "hub")
    assert all(torch.equal(before[name], after[name]) for name in before)
    half = tensors_in(tmp_path / "half")
    assert all(torch.equal(before[name].bfloat16(), half[name]) for name in before)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["dtype"], config["bos_token_id"]) == ("bfloat16", 3)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_adapters_are_read_by_peft_and_can_be_merged(tokens: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    raw = with_adapters(begun(tokens, tmp_path / "hub", **SHAPES["llama"], **LAYOUTS["zero 3"]))
    base = hub(tmp_path / "hub", raw)
    trained(tmp_path / "run", raw, 2, lr=1e-2)

    answer = exported(tmp_path / "run", tmp_path / "adapters")
    merged = exported(tmp_path / "run", tmp_path / "merged", merged=True)

    alone = with_adapters(begun(tokens, tmp_path / "hub", **SHAPES["llama"]))
    before = loss_of(base, alone)
    ours = first_loss(tmp_path / "alone", alone, tmp_path / "run")
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by a name that is going away.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert ours < before * 0.999
    assert loss_of(adapted, alone) == pytest.approx(ours, rel=2e-6)
    assert loss_of(whole, alone) == pytest.approx(ours, rel=2e-6)
    assert (answer["form"], merged["form"]) == ("adapters", "llama")

    state = tmp_path / "run/checkpoints/step-000002/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "lora": None}))
    exported(tmp_path / "run", tmp_path / "older")
    assert (tmp_path / "older/adapter_config.json").read_bytes() == (
        tmp_path / "adapters/adapter_config.json"
    ).read_bytes(), "the run says what an older checkpoint does not"


def with_adapters(raw: dict[str, Any]) -> dict[str, Any]:
    """The same training with adapters, which drop nothing."""
    lora = LORA.model_copy(update={"dropout": 0.0, "targets": ("q", "v", "o", "down")})
    shape = {key: value for key, value in raw["model"].items() if key != "padded_vocab"}
    count = lora_parameters(DecoderShape(**shape), lora)
    raw["lora"] = lora.model_dump(mode="json")
    raw["expected_trainable"] = count
    raw["expected_parameters"] += count
    return raw


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"embedding_norm": True}, "not gpt2: embedding_norm True"),
        ({"positions": "rope"}, "not llama: norm layernorm"),
        ({"norm_eps": 1e-6, "position_offset": 2}, "its norms' eps is 1e-05"),
    ],
)
def test_a_model_that_the_hub_has_no_form_for_is_refused(
    changes: dict[str, Any], what: str
) -> None:
    model = parse_config(settings(**{**SHAPES["gpt"], **changes})).model

    with pytest.raises(CorruptCheckpointError, match=what):
        family_of(model)  # type: ignore[arg-type]


def test_where_no_checkpoint_is_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        exported(tmp_path, tmp_path / "out")
