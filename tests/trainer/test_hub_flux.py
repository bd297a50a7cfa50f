"""FLUX.1 in the hub's form: read as diffusers has it, trained, written, read by diffusers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.shape import num_parameters
from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.hub.export import ExportSettings, export
from paceline.trainer.hub.flux import flux_weights
from paceline.trainer.hub.reader import HubReader
from tests.trainer.example import log, settings, steps, train
from tests.trainer.flux_peer import SMALL, flux_config, in_our_order, peer_settings
from tests.trainer.test_pretrained import STILL

FILE = "diffusion_pytorch_model.safetensors"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"ranks": 2, "tp": 2, "dp": 1},
    "zero": {"ranks": 2, "zero_stage": 3},
}
SHAPE = SMALL.model_copy(update={"hidden_size": 32, "num_heads": 2})


def flux() -> Any:
    """diffusers' module of FLUX.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("diffusers.models.transformers.transformer_flux")


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FLUX.1 with random weights, saved by diffusers."""
    folder = tmp_path_factory.mktemp("flux") / "transformer"
    torch.manual_seed(3)
    peer = flux().FluxTransformer2DModel(**peer_settings(SHAPE))
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    peer.save_pretrained(folder)
    return folder


def weights_of(reader: HubReader) -> dict[str, Tensor]:
    return {name: reader.tensor(name) for name in flux_weights(flux_config(SHAPE))}


def test_the_weights_are_those_of_diffusers_in_our_order(transformer: Path) -> None:
    expected = in_our_order(load_file(transformer / FILE), SHAPE)

    reader = HubReader(transformer, flux_config(SHAPE))

    assert weights_of(reader).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(reader).items())
    reader.check_all_used(expected)


def begun(weights: Path, **layout: Any) -> dict[str, Any]:
    """One step of a training that begins with some weights, and leaves them as they are."""
    sizes = {"global_batch": 4, "micro_batch": 2, "steps": 1}
    raw = settings(**{"source": "synthetic", "lr": STILL, **sizes, **layout})
    raw["model"] = SHAPE.model_dump(mode="json")
    raw["training"] |= {"initial_weights": str(weights), "weight_decay": 0.0, "seq_len": 22}
    raw["expected_parameters"] = raw["expected_trainable"] = num_parameters(SHAPE)
    raw["checkpoint"]["every"] = 1
    batch = raw["dp"] * raw["layout"]["micro_batch"]
    raw["num_microbatches"] = raw["training"]["global_batch"] // batch
    return raw


def test_every_layout_begins_with_them_and_gives_them_back(
    transformer: Path, tmp_path: Path
) -> None:
    single = begun(transformer)
    assert train(tmp_path / "alone", single) == 0, log(tmp_path / "alone")
    loss, before = steps(tmp_path / "alone")[0]["loss"], load_file(transformer / FILE)
    for name, layout in LAYOUTS.items():
        run, out = tmp_path / name, tmp_path / f"{name} out"
        assert train(run, begun(transformer, **layout)) == 0, log(run)

        export(ExportSettings(str(run), str(out)))

        losses = [steps(run, rank)[0]["loss"] for rank in range(2)]
        assert sum(losses) / 2 == pytest.approx(loss, rel=1e-5)
        after = load_file(out / FILE)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    peer = flux().FluxTransformer2DModel.from_pretrained(tmp_path / "zero out")
    assert all(torch.equal(before[name], value) for name, value in peer.state_dict().items())


def guided(folder: Path) -> None:
    change(folder, guidance_embeds=True)


def other_axes(folder: Path) -> None:
    change(folder, axes_dims_rope=[8, 4, 4])


def other_kind(folder: Path) -> None:
    change(folder, _class_name="SD3Transformer2DModel")


def narrow(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    save_file(tensors | {"proj_out.weight": torch.ones(2, 2)}, folder / FILE)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (guided, r"its guidance_embeds is true \(FLUX\.1-dev\)"),
        (other_axes, r"its axes_dims_rope is \[8, 4, 4\]"),
        (other_kind, "its _class_name is SD3Transformer2DModel"),
        (narrow, r"its proj_out.weight is \(2, 2\), but the model needs \(64, 32\)"),
    ],
)
def test_another_model_is_refused(
    break_it: Callable[[Path], None], what: str, transformer: Path, tmp_path: Path
) -> None:
    for path in transformer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    break_it(tmp_path)

    with pytest.raises(CorruptCheckpointError, match=what):
        HubReader(tmp_path, flux_config(SHAPE))
