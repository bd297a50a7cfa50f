"""Models in the hub's form begin trainings: first loss and gradients are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from paceline.staging.conversions import stdlib_corpus
from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.config import parse_config
from paceline.trainer.data.batches import sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.hub.reader import HubReader
from paceline.trainer.hub.settings import differences, hub_settings
from paceline.trainer.parallel.mesh import ALONE
from tests.trainer import peers
from tests.trainer.example import log, settings, steps, train, world_size
from tests.trainer.model.test_peers import GPT, MODELS

SEQ_LEN, BATCH = 24, 4
SHAPES = {
    **{name: MODELS[name] for name in ("opt-350m", "opt-13b", "llama", "qwen3")},
    "mistral": MODELS["mistral, window"],
    "mixtral": MODELS["mixtral"],
    "qwen3-moe": MODELS["qwen3-moe"],
    "deepseek-v3": MODELS["deepseek-v3"],
    "deepseek-v3, YaRN": MODELS["deepseek-v3, YaRN"],
    "gpt-oss": MODELS["gpt-oss"],
    "gpt": {**GPT, "activation": "gelu_tanh"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp 2": {"ranks": 2, "tp": 2, "dp": 1},
    "zero 3": {"ranks": 2, "zero_stage": 3},
}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file of random ids that any of the models knows."""
    ids = np.random.default_rng(0).integers(0, 320, 4000).astype("uint16")
    ids.tofile(tmp_path / "ids.bin")
    return tmp_path / "ids.bin"


def hub(folder: Path, raw: dict[str, Any]) -> torch.nn.Module:
    """The peer of a trainer.json with random weights, saved as the hub has it."""
    torch.manual_seed(7)
    gpt = raw["model"]["activation"] == "gelu_tanh"
    model = {**raw["model"], "activation": "gelu_new"} if gpt else raw["model"]
    peer = peers.PEERS["gpt2" if gpt else peers.family(model)](model)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, bias in peer.named_buffers():
            if name.endswith("score_correction_bias"):
                bias.normal_(std=0.1)
    peer.save_pretrained(folder)
    return peer


def begun(tokens: Path, folder: Path, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """One step of a training that begins with a folder's weights."""
    changes = {"seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": 2, **changes}
    data = {"source": "tokens", "path": str(tokens)}
    raw = settings(ranks=ranks, steps=1, **data, **changes)
    raw["training"]["initial_weights"] = str(folder)
    dp = raw["dp"]
    raw["num_microbatches"] = BATCH // (dp * raw["layout"]["micro_batch"])
    return raw


def first_step(peer: torch.nn.Module, raw: dict[str, Any]) -> tuple[float, float]:
    """The peer's mean loss on the first step's samples, and the norm of its gradients."""
    config = parse_config(raw)
    corpus = load_corpus(config)
    sampler = sampler_of(config, corpus.num_windows)
    windows = [index for rank in range(config.dp) for index in sampler.windows(0, rank)]
    inputs, targets = corpus.collate(windows, ALONE)
    loss = peers.mean_loss(peer.eval(), torch.cat([inputs, targets[:, -1:]], 1))
    loss.backward()
    gradients = [p.grad for p in peer.parameters() if p.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(gradients).item()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, "alone") for model in SHAPES),
        ("gpt", "tp 2"),
        ("llama", "tp 2"),
        ("gpt", "zero 3"),
    ],
)
def test_the_first_loss_and_gradients_are_those_of_transformers(
    model: str, layout: str, tokens: Path, tmp_path: Path
) -> None:
    raw = begun(tokens, tmp_path / "hub", **SHAPES[model], **LAYOUTS[layout])
    peer = hub(tmp_path / "hub", raw)

    assert train(tmp_path / "run", raw) == 0, log(tmp_path / "run")

    first = [steps(tmp_path / "run", rank)[0] for rank in range(world_size(raw))]
    loss, grad_norm = first_step(peer, raw)
    losses = [step["loss"] for step in first]
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=2e-6)
    assert [step["grad_norm"] for step in first] == pytest.approx([grad_norm] * len(first), 1e-5)


def other_layers(folder: Path) -> None:
    change(folder, n_layer=3)


def scaled_positions(folder: Path) -> None:
    change(folder, rope_scaling={"rope_type": "llama3"})


def other_activation(folder: Path) -> None:
    change(folder, activation_function="gelu")


def other_scale(folder: Path) -> None:
    change(folder, scale_attn_by_inverse_layer_idx=True)


def unscaled(folder: Path) -> None:
    change(folder, scale_attn_weights=False)


def own_head(folder: Path) -> None:
    change(folder, tie_word_embeddings=False)


def unknown_kind(folder: Path) -> None:
    change(folder, model_type="bert")


def list_of_kinds(folder: Path) -> None:
    change(folder, model_type=["gpt2"])


def list_of_scales(folder: Path) -> None:
    change(folder, rope_scaling=["llama3"])


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def deep_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(headed(b"[" * 200_000))


def outside(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}
    (folder / "model.safetensors").write_bytes(headed(json.dumps({"x": entry}).encode()))


def below_nothing(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}
    content = headed(json.dumps({"x": entry}).encode()) + bytes(24)
    (folder / "model.safetensors").write_bytes(content)


def vector(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"transformer.wte.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(headed(header) + bytes(8))


def headed(header: bytes) -> bytes:
    """The beginning of a safetensors file."""
    return len(header).to_bytes(8, "little") + header


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def change(folder: Path, **fields: Any) -> None:
    """Other values in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (other_layers, "its n_layer is 3, but model.num_layers is 2"),
        (scaled_positions, "its positions are scaled"),
        (other_activation, "its activation_function is gelu, but model.activation is gelu_tanh"),
        (other_scale, "its scale_attn_by_inverse_layer_idx is True"),
        (unscaled, "its scale_attn_weights is False"),
        (own_head, "its tie_word_embeddings is False, but model.tied_embeddings is True"),
        (
            unknown_kind,
            "its model_type is bert; use one of opt, gpt2, llama, qwen3, mistral, mixtral",
        ),
        (torn, "model.safetensors is truncated"),
        (list_of_kinds, r"its model_type is \['gpt2'\]; use one of"),
        (list_of_scales, r"its rope_scaling is \['llama3'\], which is not an object"),
        (deep_config, "config.json is not valid JSON"),
        (empty, "model.safetensors is truncated or not a safetensors file"),
        (deep_header, "model.safetensors is corrupt: RecursionError"),
        (outside, "model.safetensors is truncated or corrupt: x"),
        (below_nothing, "model.safetensors is corrupt: x has no valid size"),
        (vector, r"its transformer.wte.weight has the wrong shape \(2,\)"),
    ],
)
def test_what_cannot_be_taken_is_named(
    break_it: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    stdlib_corpus.make_gpt2(tmp_path)
    config = parse_config(settings(**made_shape())).model
    reader = HubReader(tmp_path, config)  # type: ignore[arg-type]
    assert reader.tensor("blocks.1.attention.k.weight").shape == (64, 64)
    break_it(tmp_path)

    with pytest.raises(CorruptCheckpointError, match=what):
        HubReader(tmp_path, config)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [{}, {"ranks": 2, "pp": 2, "dp": 1}])
def test_tensors_that_the_model_has_no_place_for_are_named(
    layout: dict[str, Any], tokens: Path, tmp_path: Path
) -> None:
    shape = {**SHAPES["gpt"], "bias": False}
    raw = begun(tokens, tmp_path / "hub", **shape, **layout)
    hub(tmp_path / "hub", {**raw, "model": {**raw["model"], "bias": True}})
    file = tmp_path / "hub" / "model.safetensors"
    weights = load_file(file)
    masks = {f"transformer.h.0.attn.{name}": torch.ones(2, 2) for name in ("bias", "masked_bias")}
    save_file({**weights, **masks, "lm_head.weight": torch.ones(2, 2)}, file)

    assert train(tmp_path / "run", raw) != 0

    biases = [name for name in weights if name.endswith(("attn.bias", "proj.bias", "fc.bias"))]
    words = f"the model has no weight for {', '.join(sorted(biases)[:2])}"
    assert words in log(tmp_path / "run") and "masked" not in log(tmp_path / "run")


def test_masks_of_integers_are_passed_over(tmp_path: Path) -> None:
    stdlib_corpus.make_gpt2(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.uint8, torch.bool, torch.int64):
        weights[f"transformer.h.0.attn.bias_{dtype}"] = torch.ones(4, 4).to(dtype)
    save_file(weights, tmp_path / "model.safetensors")

    reader = HubReader(tmp_path, parse_config(settings(**made_shape())).model)  # type: ignore[arg-type]

    assert torch.equal(reader.tensor("embedding.weight"), weights["transformer.wte.weight"])


@pytest.mark.parametrize(
    ("family", "model", "fields", "what"),
    [
        ("llama", "llama", {"rope_theta": 500_000.0}, "its rope_theta is 10000.0, but model."),
        ("llama", "llama", {"norm_eps": 1e-5}, "its rms_norm_eps is 1e-06, but model.norm_eps"),
        ("llama", "llama", {"activation": "gelu"}, "its hidden_act is silu, but model.activation"),
        (
            "llama",
            "llama",
            {"scale_embedding": True},
            "model.scale_embedding is True, which a llama",
        ),
        ("qwen3", "qwen3", {"sliding_window": 4096}, "model.sliding_window is 4096, which a qwen3"),
        ("mistral", "mistral", {"sliding_window": None}, "its sliding_window is 4096, but model."),
        ("opt", "opt-13b", {"norm_eps": 1e-6}, "its norms' eps is 1e-05, but model.norm_eps"),
        ("opt", "opt-13b", {"activation": "gelu"}, "its activation_function is relu"),
        ("gpt2", "gpt", {"norm_eps": 1e-6}, "its layer_norm_epsilon is 1e-05, but model.norm_eps"),
        ("gpt2", "gpt", {"activation": "relu"}, "its activation_function is gelu_new"),
    ],
)
def test_a_key_that_is_absent_means_the_default_of_transformers(
    family: str, model: str, fields: dict[str, Any], what: str
) -> None:
    of_llama = family in ("llama", "qwen3", "mistral")
    usual = {"norm_eps": 1e-6, "rope_theta": 10_000.0} if of_llama else {}
    usual |= {"sliding_window": 4096} if family == "mistral" else {}
    same, other = (
        parse_config(settings(**{**SHAPES[model], **usual, **changes})).model
        for changes in ({}, fields)
    )

    assert differences({"model_type": family}, same) == []  # type: ignore[arg-type]
    (difference,) = differences({"model_type": family}, other)  # type: ignore[arg-type]
    assert what in difference


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        ({"beta_fast": 1}, "its rope_scaling has beta_fast 1, but the model needs 32"),
        ({"rope_type": "linear"}, "its rope_scaling has rope_type linear"),
        ({"factor": None}, "its rope_scaling has factor None, but the model needs 40.0"),
        ({"attention_factor": 1.1}, "model.rope_attention_factor is not that of its rope_scaling"),
        ({"mscale_all_dim": 1.0}, "model.query_pre_attn_scalar is not that of its rope_scaling"),
        ({"mscale": "1"}, "its rope_scaling has a factor that is not a number"),
    ],
)
def test_other_yarn_settings_of_a_deepseek_v3_are_named(scaling: dict[str, Any], what: str) -> None:
    model = parse_config(settings(**SHAPES["deepseek-v3, YaRN"])).model
    config = hub_settings("deepseek_v3", model)  # type: ignore[arg-type]
    peer = peers.deepseek_v3(settings(**SHAPES["deepseek-v3, YaRN"])["model"]).config

    assert differences(config, model) == []  # type: ignore[arg-type]
    theirs = {name: peer.rope_parameters[name] for name in ("mscale", "mscale_all_dim")}
    assert {name: config["rope_scaling"][name] for name in theirs} == pytest.approx(theirs)
    config["rope_scaling"] |= scaling
    (difference,) = differences(config, model)  # type: ignore[arg-type]
    assert what in difference


def made_shape() -> dict[str, Any]:
    """The model that tiny recipes are staged with."""
    sizes = {"hidden_size": 64, "ffn_size": 256, "vocab_size": 2048, "max_positions": 256}
    return {**SHAPES["gpt"], **sizes}
