"""Packed documents that do not see each other train as documents one by one, in every layout."""

from __future__ import annotations

import json
import random
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from paceline.core.shape import DecoderShape, LoraSpec, lora_parameters
from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.data.batches import Loader, sampler_of
from paceline.trainer.data.corpus import load_corpus, load_validation
from paceline.trainer.data.texts import END_OF_DOCUMENT
from paceline.trainer.model import context_parallel, decoder
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.document_attention import COMPILABLE, exclude_documents_from_compile
from paceline.trainer.model.network import freeze, init_weights
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.offline import memory_trace
from paceline.trainer.parallel.mesh import ALONE, Mesh, World
from tests.trainer import mask_driver
from tests.trainer.example import end, lines, run_ranks, settings, steps, train

SEQ_LEN, BATCH, HELD_OUT = 24, 4, 3
DRIVER = Path(mask_driver.__file__)
LIMIT_S = 200
TOLERANCE, MARGIN = 1e-10, 1e4
LEARNED: dict[str, Any] = {
    "num_layers": 4,
    "positions": "learned",
    "position_offset": 2,
    "norm": "layernorm",
    "bias": True,
    "tied_embeddings": True,
}
WINDOWED: dict[str, Any] = {"num_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2}
"""Rotary positions and grouped heads, as the example's own."""
ALONE_IN: dict[str, dict[str, Any]] = {
    "alone": {},
    "in pairs, recomputed attention": {"micro_batch": 2, "recompute": "selective"},
    "windows": {**WINDOWED, "micro_batch": 4},
    "windows, recomputed blocks": {**WINDOWED, "recompute": "full"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 3, recomputed blocks": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp": {**WINDOWED, "tp": 2},
    "tp, cut streams": {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "pp": {"pp": 2, "micro_batch": 1, "recompute": "full"},
    "pp in chunks": {**WINDOWED, "pp": 2, "vp": 2, "schedule": "interleaved"},
    "zero bubble": {"pp": 2, "vp": 2, "schedule": "zero-bubble"},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of 1 to 30 letters, shorter and longer than a window."""
    source, file = random.Random(3), tmp_path_factory.mktemp("data") / "texts.jsonl"
    letters = [[source.randrange(97, 123) for _ in range(source.randint(1, 30))] for _ in range(90)]
    file.write_text("".join(json.dumps({"text": bytes(x).decode()}) + "\n" for x in letters))
    return file


def content(texts: Path, **changes: Any) -> dict[str, Any]:
    """trainer.json over that file; a model of learned positions unless it is said to rotate."""
    model = {} if "sliding_window" in changes else LEARNED
    sizes: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "global_batch": BATCH,
        "micro_batch": 1,
        "source": "jsonl",
        "path": str(texts),
        "document_mask": True,
        "dtype": "fp64",
        "dp": 1,
        "lr": 1e-3,
        "memory_parts": False,
    }
    raw = settings(**{**model, **sizes, **changes})
    raw["num_microbatches"] = BATCH // raw["dp"] // raw["layout"]["micro_batch"]
    raw["training"]["evaluation"] = {
        "every_samples": BATCH,
        "skip_first": 0,
        "samples": HELD_OUT,
        "target": None,
        "path": None,
    }
    return raw


def alone(raw: dict[str, Any]) -> dict[str, Any]:
    """What one process comes to, in this one."""
    with chdir(Path(raw["data"]["path"]).parent):  # where its event lines go
        return mask_driver.together([mask_driver.run(parse_config(raw), one_process())])


def one_process() -> World:
    return World(0, 0, 1, torch.device("cpu"), "gloo")


@pytest.fixture(scope="module")
def found(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every layout came to."""
    folder = tmp_path_factory.mktemp("found")
    cases = {name: content(texts, **changes) for name, changes in LAYOUTS.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    words = ("cases.json", "found.pt")
    code, output = run_ranks(2, DRIVER, *words, folder=folder, limit_s=LIMIT_S)
    assert code == 0, output[-4000:]
    results = {name: alone(content(texts, **changes)) for name, changes in ALONE_IN.items()}
    return results | torch.load(folder / "found.pt")


class OneByOne:
    """The trainer's first weights, and every document as a sequence of its own."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.config: TrainerConfig = parse_config(raw)
        assert isinstance(self.config.model, ModelConfig)
        setting = LayerSetting(SEQ_LEN, torch.float64, lora=self.config.lora)
        self.model = Decoder(self.config.model, setting).double()
        freeze(self.model)
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        init_weights(self.model, shapes, self.config.training.seed, Mesh())
        self.model.make_tables(torch.device("cpu"))
        self.corpus = load_corpus(self.config)
        self.position_ids, self.rope = self.model.position_ids, self.model.rope

    def summed(self, windows: tuple[Tensor, ...]) -> Tensor:
        """The summed loss of all documents in some windows, which their end marks part."""
        total = torch.zeros((), dtype=torch.float64)
        for ids, targets in zip(*windows[:2], strict=True):
            behind = [i + 1 for i, token in enumerate(ids.tolist()) if token == END_OF_DOCUMENT]
            ends = sorted({*behind, SEQ_LEN})
            for begin, stop in pairwise([0, *ends]):
                total = total + self.of_document(ids[begin:stop], targets[begin:stop])
        return total

    def of_document(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Its positions are the first ones of a sequence."""
        first, model = slice(len(ids)), self.model
        if self.position_ids is not None:
            model.position_ids = self.position_ids[first]
        if self.rope is not None:
            model.rope = model.local_rope = (self.rope[0][first], self.rope[1][first])
        return model(ids[None], targets[None])


def wanted(raw: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradients and the held-out loss of documents one by one."""
    plain = OneByOne(raw)
    corpus, held = plain.corpus, load_validation(plain.config)
    first = sampler_of(plain.config, corpus.num_windows).windows(0, 0)
    loss = plain.summed(corpus.collate(first, ALONE)) / (BATCH * SEQ_LEN)
    loss.backward()
    gradients = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        held_out = plain.summed(held.collate([*range(HELD_OUT)], ALONE)) / (HELD_OUT * SEQ_LEN)
    return {"loss": loss.item(), "gradients": gradients, "held out": held_out.item()}


@pytest.fixture(scope="module")
def references(texts: Path) -> dict[bool, dict[str, Any]]:
    """By whether positions rotate."""
    return {True: wanted(content(texts, **WINDOWED)), False: wanted(content(texts))}


def distance(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of a gradient or of a loss."""
    gradients = reference["gradients"]
    assert set(result["gradients"]) == set(gradients)
    scale = 1e-3 * max(gradient.norm().item() for gradient in gradients.values())
    losses = [result["loss"] / reference["loss"], *held_out(result, reference)]
    return max(
        *(abs(ratio - 1) for ratio in losses),
        *(
            ((result["gradients"][name] - gradient).norm() / max(gradient.norm(), scale)).item()
            for name, gradient in gradients.items()
        ),
    )


def held_out(result: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    return [loss / reference["held out"] for loss in result["evaluations"].values()]


@pytest.mark.parametrize("layout", [*ALONE_IN, *LAYOUTS])
def test_packed_documents_train_as_they_would_one_by_one(
    found: dict[str, dict[str, Any]], references: dict[bool, dict[str, Any]], layout: str
) -> None:
    rotates = "sliding_window" in (ALONE_IN | LAYOUTS)[layout]

    assert distance(found[layout], references[rotates]) < TOLERANCE


@pytest.mark.parametrize("changes", [{}, WINDOWED], ids=["learned", "rotary"])
def test_adapters_train_as_they_would_one_by_one(texts: Path, changes: dict[str, Any]) -> None:
    raw = content(texts, **changes)
    lora = LoraSpec(rank=2, alpha=4, targets=("q", "v", "down"))
    sizes = {name: value for name, value in raw["model"].items() if name != "padded_vocab"}
    raw["lora"] = lora.model_dump(mode="json")
    raw["expected_trainable"] = lora_parameters(DecoderShape(**sizes), lora)
    raw["expected_parameters"] += raw["expected_trainable"]

    result, reference = alone(raw), wanted(raw)

    assert reference["gradients"] and distance(result, reference) < TOLERANCE


def blind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that forgets the documents."""
    return causal_attention(q, k, v, dropout, window, sinks)


@pytest.mark.parametrize("changes", [{}, WINDOWED], ids=["learned", "rotary"])
def test_documents_that_see_each_other_are_found(
    texts: Path, references: dict[bool, dict[str, Any]], changes: dict[str, Any]
) -> None:
    with patch.object(context_parallel, "document_attention", blind):
        result = alone(content(texts, **changes))

    assert distance(result, references[bool(changes)]) > MARGIN * TOLERANCE


def test_positions_that_go_on_from_document_to_document_are_found(
    texts: Path, references: dict[bool, dict[str, Any]]
) -> None:
    with patch.object(decoder, "restart_positions", lambda places, documents, offset: places):
        result = alone(content(texts))

    assert distance(result, references[False]) > MARGIN * TOLERANCE


def test_a_batch_knows_what_its_documents_leave_of_attention(texts: Path) -> None:
    """Counted pair by pair: a token with those before it in its document, and the diagonal half."""
    config = parse_config(content(texts, **WINDOWED))
    corpus = load_corpus(config)
    loader = Loader(corpus, sampler_of(config, corpus.num_windows), config, Mesh(), pin=False)
    batch = loader.batch(0)
    loader.close()
    ids = batch.inputs.flatten(0, 1)
    document = torch.nn.functional.pad((ids == END_OF_DOCUMENT).cumsum(1)[:, :-1], (1, 0))
    behind = torch.arange(SEQ_LEN).unsqueeze(1) - torch.arange(SEQ_LEN)
    together = document.unsqueeze(2) == document.unsqueeze(1)

    def pairs(mine: Tensor, window: int) -> float:
        seen = mine & (behind >= 0) & (behind < window)
        return seen.sum().item() - ids.numel() / 2

    whole = torch.ones_like(together)
    counted = pairs(together, 5) + pairs(together, SEQ_LEN)
    assert batch.attended_share == pytest.approx(
        counted / (pairs(whole, 5) + pairs(whole, SEQ_LEN))
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_give_the_same_and_are_not_compiled_again_for_other_documents(
    texts: Path, recompute: str
) -> None:
    """A second number of documents makes it a variable, and no further one changes anything."""
    plain = OneByOne(content(texts, **{**WINDOWED, "num_layers": 2}))
    model, counter = compiled_like(plain, recompute), CompileCounterWithBackend("aot_eager")
    frames, together = list[int](), COMPILABLE["attention"]
    try:
        exclude_documents_from_compile()
        for block in model.blocks.values():
            block.compile(backend=counter)
        for index in range(4):
            ids, targets, bounds = plain.corpus.collate([index], ALONE)
            more = torch.nn.functional.pad(bounds, (0, index), value=SEQ_LEN)
            model(ids, targets, more).backward()
            plain.summed((ids, targets)).backward()
            frames.append(counter.frame_count)
    finally:
        torch._dynamo.reset()
        counters.clear()
        COMPILABLE["attention"] = together

    assert 0 < frames[0] < frames[1] == frames[2] == frames[3], frames
    for mine, other in zip(model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-8, atol=1e-10)  # type: ignore[arg-type]


def compiled_like(plain: OneByOne, recompute: str) -> Decoder:
    """A model with the same weights."""
    setting = LayerSetting(SEQ_LEN, torch.float64, recompute)
    model = Decoder(plain.model.model, setting).double()
    model.load_state_dict(plain.model.state_dict())
    model.make_tables(torch.device("cpu"))
    return model


def test_memory_is_traced_as_of_whole_windows(texts: Path) -> None:
    raw = content(texts, dtype="fp32")

    traced = memory_trace.settings(raw, raw["num_microbatches"])

    assert not traced.data.document_mask and config_problems(traced, 1) == []


def test_a_whole_training_says_what_it_attended_to(texts: Path, tmp_path: Path) -> None:
    assert train(tmp_path, content(texts, dtype="fp32", steps=3)) == 0

    start = lines(tmp_path)[0]
    assert start["data"]["document_mask"] is True
    assert start["attention"] == "documents, per document"
    assert end(tmp_path)["status"] == "ok"
    assert all(0 < step["attended_share"] < 1 for step in steps(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bf16", "dropout": 0.2}, {"dtype": "fp8"}, {"dtype": "mxfp8"}, {"dtype": "nvfp4"}],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_it_trains_with_dropout_and_in_low_precision(
    texts: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if changes["dtype"] != "bf16":
        pytest.importorskip("torchao", reason="low precision needs torchao")
    wide = {"hidden_size": 64, "ffn_size": 128, "num_layers": 2}

    assert train(tmp_path, content(texts, steps=3, seq_len=32, **wide, **changes)) == 0

    assert end(tmp_path)["status"] == "ok"
    assert all(0 < step["attended_share"] < 1 for step in steps(tmp_path))
