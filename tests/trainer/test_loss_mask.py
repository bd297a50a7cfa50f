"""Tokens that do not count as targets: as transformers with labels of -100, in every layout."""

from __future__ import annotations

import json
import random
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")

from paceline.trainer.config import ConfigError, TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import TokenCorpus, load_corpus, load_validation
from paceline.trainer.evaluation import sample_weights
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.loss import IGNORE_INDEX
from paceline.trainer.model.network import init_weights
from paceline.trainer.offline import memory_trace
from paceline.trainer.parallel.mesh import ALONE, Mesh, MeshAxis
from tests.trainer import peers
from tests.trainer.example import end, lines, run_ranks, settings, steps, train
from tests.trainer.model.test_peers import GPT, copy_weights

SEQ_LEN, BATCH, HELD_OUT, TRAINED, VOCAB = 16, 4, 5, 8, 96
DRIVER = Path(__file__).with_name("mask_driver.py")
LIMIT_S = 200
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero": {"dp": 2, "zero_stage": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of tokens, and which count: answers behind prompts of all lengths, once nothing."""
    folder, source = tmp_path_factory.mktemp("data"), random.Random(5)
    num = (TRAINED + HELD_OUT) * SEQ_LEN + 1
    ids = torch.tensor([source.randrange(VOCAB) for _ in range(num)], dtype=torch.uint16)
    mask = torch.zeros(num, dtype=torch.uint8)
    for window in range(TRAINED + HELD_OUT):
        answer = 0 if window == 2 else 1 + source.randrange(SEQ_LEN)
        stop = (window + 1) * SEQ_LEN + 1
        mask[stop - answer : stop] = 1
    (folder / "ids.bin").write_bytes(ids.view(torch.int16).numpy().tobytes())
    (folder / "mask.bin").write_bytes(mask.numpy().tobytes())
    return folder / "ids.bin", folder / "mask.bin"


def content(data: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    """trainer.json over those files; the last samples are held out."""
    sizes: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "global_batch": BATCH,
        "micro_batch": 1,
        "vocab_size": VOCAB,
        "source": "tokens",
        "path": str(data[0]),
        "loss_mask": str(data[1]),
        "dtype": "fp64",
        "dp": 1,
        "lr": 1e-3,
        "memory_parts": False,
    }
    raw = settings(**{**GPT, **sizes, **changes})
    raw["num_microbatches"] = BATCH // raw["dp"] // raw["layout"]["micro_batch"]
    raw["training"]["evaluation"] = {
        "every_samples": BATCH,
        "skip_first": 0,
        "samples": HELD_OUT,
        "target": None,
        "path": None,
    }
    return raw


@pytest.fixture(scope="module")
def found(
    data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What every layout came to."""
    folder, results = tmp_path_factory.mktemp("found"), {}
    worlds = {1: {"alone": {}, "in pairs": {"micro_batch": 2}}, 2: LAYOUTS}
    for ranks, layouts in worlds.items():
        cases = {name: content(data, **changes) for name, changes in layouts.items()}
        (folder / "cases.json").write_text(json.dumps(cases))
        file = folder / f"{ranks}.pt"
        words = ("cases.json", str(file))
        code, output = run_ranks(ranks, DRIVER, *words, folder=folder, limit_s=LIMIT_S)
        assert code == 0, output[-4000:]
        results |= torch.load(file)
    return results


def labelled(corpus: TokenCorpus, indices: list[int]) -> tuple[Tensor, Tensor]:
    """(n, SEQ_LEN + 1) ids and labels as transformers has them: a label is of its own position."""
    assert corpus.mask is not None
    ids = torch.stack([corpus.window(i) for i in indices])
    kept = torch.stack([corpus.mask[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in indices])
    return ids, ids.masked_fill(kept == 0, IGNORE_INDEX)


class Peer:
    """transformers' model with the trainer's first weights, and a plain loop over samples."""

    def __init__(self, raw: dict[str, Any]) -> None:
        config = self.config = parse_config(raw)
        ours = Decoder(config.model, LayerSetting(SEQ_LEN, torch.float64)).double()  # type: ignore[arg-type]
        shapes = {name: p.shape for name, p in ours.named_parameters()}
        init_weights(ours, shapes, config.training.seed, Mesh())
        self.raw, self.model = raw, peers.build(raw).double()
        copy_weights(raw, ours, self.model)

    def summed(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of one sample, from its own logits: its own loss is fp32."""
        logits = self.model(input_ids=ids[None]).logits[0, :-1]
        return functional.cross_entropy(
            logits, labels[1:], ignore_index=IGNORE_INDEX, reduction="sum"
        )

    def gradients(self) -> dict[str, Tensor]:
        """By our names."""
        named = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return peers.weights_of(self.raw["model"], named)


@pytest.fixture(scope="module")
def wanted(data: tuple[Path, Path]) -> dict[str, Any]:
    """The same from the plain loop."""
    peer = Peer(content(data))
    corpus, held = load_corpus(peer.config), load_validation(peer.config)
    assert isinstance(corpus, TokenCorpus) and isinstance(held, TokenCorpus)
    first = sampler_of(peer.config, corpus.num_windows).windows(0, 0)
    ids, labels = labelled(corpus, first)
    counted = (labels[:, 1:] != IGNORE_INDEX).sum().item()
    loss = sum(peer.summed(*sample) for sample in zip(ids, labels, strict=True)) / counted
    assert isinstance(loss, Tensor)
    loss.backward()
    ids, labels = labelled(held, [*range(HELD_OUT)])
    with torch.no_grad():
        sums = torch.stack([peer.summed(*sample) for sample in zip(ids, labels, strict=True)])
        own = [
            peer.model(input_ids=i[None], labels=known[None]).loss.item()
            for i, known in zip(ids, labels, strict=True)
        ]
    counts = (labels[:, 1:] != IGNORE_INDEX).sum(1)
    return {
        "loss": loss.item(),
        "gradients": peer.gradients(),
        "evaluations": {
            "targets": (sums.sum() / counts.sum()).item(),
            "samples": (sums / counts).mean().item(),
        },
        "its own losses": sum(own) / HELD_OUT,
        "counted": counted,
    }


@pytest.mark.parametrize("layout", ["alone", "in pairs", *LAYOUTS])
def test_loss_and_gradients_are_those_of_labels_that_are_ignored(
    found: dict[str, dict[str, Any]], wanted: dict[str, Any], layout: str
) -> None:
    result = found[layout]

    assert 0 < wanted["counted"] < BATCH * SEQ_LEN * 0.8
    assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    assert set(result["gradients"]) == set(wanted["gradients"])
    scale = 1e-3 * max(gradient.norm().item() for gradient in wanted["gradients"].values())
    for name, gradient in wanted["gradients"].items():
        far = (result["gradients"][name] - gradient).norm() / max(gradient.norm().item(), scale)
        assert far < 1e-10, name


@pytest.mark.parametrize("layout", ["alone", "in pairs", *LAYOUTS])
def test_evaluations_are_over_what_counts_alone(
    found: dict[str, dict[str, Any]], wanted: dict[str, Any], layout: str
) -> None:
    """Over targets, or over samples as the reference's trainer averages batches of one."""
    known = wanted["evaluations"]

    assert found[layout]["evaluations"] == pytest.approx(known, rel=1e-12)
    assert abs(known["targets"] - known["samples"]) > 1e-6, "they would be indistinguishable"
    assert known["samples"] == pytest.approx(wanted["its own losses"], rel=1e-6)


def config_of(data: tuple[Path, Path], **changes: Any) -> TrainerConfig:
    return parse_config(content(data, **changes))


def test_a_mask_says_of_each_target_whether_it_counts(data: tuple[Path, Path]) -> None:
    masked, plain = config_of(data), config_of(data, loss_mask=None)
    mask = torch.frombuffer(bytearray(data[1].read_bytes()), dtype=torch.uint8)
    trained, held = load_corpus(masked), load_validation(masked)

    inputs, targets = trained.collate([0, 1, 2], ALONE)
    assert trained.masked and held.masked and not load_corpus(plain).masked
    assert torch.equal(inputs, load_corpus(plain).collate([0, 1, 2], ALONE)[0])
    assert torch.equal(targets.flatten() != IGNORE_INDEX, mask[1 : 3 * SEQ_LEN + 1] != 0)
    ends = held.collate([HELD_OUT - 1], ALONE)[1].flatten()
    assert torch.equal(ends != IGNORE_INDEX, mask[-SEQ_LEN:] != 0)


def test_context_ranks_share_a_sample_and_its_mask(data: tuple[Path, Path]) -> None:
    corpus = load_corpus(config_of(data))
    whole = corpus.collate([0, 1], ALONE)[1]
    halves = [corpus.collate([0, 1], MeshAxis(2, index))[1] for index in (0, 1)]

    assert sum((half != IGNORE_INDEX).sum() for half in halves) == (whole != IGNORE_INDEX).sum()


def test_a_batch_counts_what_its_mask_lets(data: tuple[Path, Path]) -> None:
    config = config_of(data)
    corpus = load_corpus(config)
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, Mesh(), pin=False)
    batch = loader.batch(0)
    loader.close()

    assert (
        batch.num_valid_targets
        == int((batch.targets != IGNORE_INDEX).sum())
        < batch.targets.numel()
    )
    assert batch.real_tokens == BATCH * SEQ_LEN, "masked tokens are read all the same"


def test_held_out_samples_of_a_file_of_their_own_have_a_mask_of_their_own(
    data: tuple[Path, Path], tmp_path: Path
) -> None:
    """As in MLPerf: all tokens are trained on, and the answers alone are evaluated."""
    raw = content(data, loss_mask=None)
    raw["training"]["evaluation"] |= {"path": str(data[0]), "loss_mask": str(data[1])}
    config = parse_config(raw)

    assert not load_corpus(config).masked
    mask = torch.frombuffer(bytearray(data[1].read_bytes()), dtype=torch.uint8)
    found = load_validation(config).collate([0], ALONE)[1].flatten()
    assert torch.equal(found != IGNORE_INDEX, mask[1 : SEQ_LEN + 1] != 0)

    raw["training"]["evaluation"] |= {"loss_mask": None}
    raw["data"]["loss_mask"] = str(data[1])
    config = parse_config(raw)
    assert load_corpus(config).masked and not load_validation(config).masked


def test_what_the_manual_makes_of_labelled_rows_is_what_they_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row: a token's label is the target of the token before it, and the last has none."""
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "mlperf.md").read_text()
    shown = re.search(r"^    import numpy, pandas\n(?:    .*\n)+", manual, re.MULTILINE)
    assert shown is not None
    ids = torch.randint(1, VOCAB, (HELD_OUT, SEQ_LEN))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, IGNORE_INDEX)
    table = {"input_ids": [*ids.numpy()], "labels": [*labels.numpy()]}
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(read_parquet=lambda _: table))
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(shown[0]), {})

    raw = content((tmp_path / "train.bin", tmp_path / "train.mask"))
    own = {"path": str(tmp_path / "validation.bin"), "loss_mask": str(tmp_path / "validation.mask")}
    raw["training"]["evaluation"] |= own
    inputs, targets = load_validation(parse_config(raw)).collate([*range(HELD_OUT)], ALONE)

    assert torch.equal(inputs, ids)
    assert torch.equal(targets[:, :-1], labels[:, 1:]) and (targets[:, -1] == IGNORE_INDEX).all()
    assert load_corpus(parse_config(raw)).num_windows == HELD_OUT


def test_a_mask_of_another_length_is_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(data[1].read_bytes()[:-1])

    with pytest.raises(ConfigError, match=r"short\.bin has 208 bytes, but .* has 209 tokens"):
        load_corpus(config_of(data, loss_mask=str(short)))


def test_a_sample_without_a_target_has_no_mean(data: tuple[Path, Path]) -> None:
    raw = content(data)
    raw["training"]["evaluation"] |= {"path": str(data[0]), "loss_mask": str(data[1])}
    held = load_validation(parse_config(raw))

    assert sample_weights(held, HELD_OUT).tolist() == [1] * HELD_OUT
    with pytest.raises(ConfigError, match="held-out sample 2 has no valid target"):
        sample_weights(held, HELD_OUT, "samples")


def test_a_step_is_followed_on_random_samples_without_the_mask(data: tuple[Path, Path]) -> None:
    raw = content(data, dtype="fp32")

    traced = memory_trace.settings(raw, raw["num_microbatches"])

    assert traced.data.loss_mask is None and config_problems(traced, 1) == []


def test_a_whole_training_says_what_it_masked(data: tuple[Path, Path], tmp_path: Path) -> None:
    raw = content(data, dtype="fp32", steps=3)
    raw["training"]["evaluation"] |= {"mean": "samples"}

    assert train(tmp_path, raw) == 0

    assert lines(tmp_path)[0]["data"]["loss_mask"] == str(data[1])
    assert [e["step"] for e in lines(tmp_path) if e["event"] == "eval"] == [1, 2, 3]
    assert end(tmp_path)["status"] == "ok" and len(steps(tmp_path)) == 3
