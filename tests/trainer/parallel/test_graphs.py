"""A compiled block is one graph, whatever its tensor ranks exchange inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.trainer.config import ModelConfig, parse_config
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.flux import MMDiT
from paceline.trainer.parallel.mesh import MeshAxis
from paceline.trainer.parallel.tensor import TensorParallel, shard_parameters
from tests.numerics.cases import Case

# PyTorch warns of what its own compiler does with an autograd.Function, and with a block's input.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
RANKS = 2
WORDS = [f"tp2{sp}{recompute}" for sp in ("", " sp") for recompute in ("", " full", " selective")]


@pytest.fixture
def tp() -> Iterator[MeshAxis]:
    """One of two ranks, the other of which is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield MeshAxis(RANKS, 0, dist.group.WORLD, (0, 1))
    dist.destroy_process_group()
    torch._dynamo.reset()
    counters.clear()


def graphs_of(case: Case, tp: MeshAxis) -> tuple[int, dict[str, int]]:
    """Graphs that all blocks of a model run in, forward and backward; breaks by their reason."""
    config = parse_config(case.settings())
    layout = config.layout
    cuts = TensorParallel(tp, layout.sequence_parallel)
    setting = LayerSetting(
        config.training.seq_len,
        torch.float32,
        layout.recompute,
        cuts,
        lora=config.lora,
        levels=config.recompute_levels,
    )
    model = config.model
    with torch.device("meta"):
        whole = Decoder(model, setting) if isinstance(model, ModelConfig) else MMDiT(model, setting)
    shard_parameters(whole, tp, None)
    whole.to_empty(device="cpu").make_tables(torch.device("cpu"))
    counter = CompileCounterWithBackend("eager")
    for block in whole.blocks.values():
        block.compile(backend=counter)
    hidden = model.hidden_size
    rows = config.training.seq_len // (tp.size if layout.sequence_parallel else 1)
    if isinstance(whole, Decoder):
        x = torch.randn(1, rows, hidden, requires_grad=True)
        for block in whole.blocks.values():
            x = block(x, whole.rope)
    else:
        image = whole.model.patches**2
        text, x = torch.randn(1, rows - image, hidden), torch.randn(1, image, hidden)
        text, x = whole.blocks["0"](text, x, torch.randn(1, hidden), whole.rope)
    x.sum().backward()
    return counter.frame_count, dict(counters["graph_break"])


@pytest.mark.parametrize("words", WORDS)
def test_a_decoder_s_blocks_share_one_graph(words: str, tp: MeshAxis) -> None:
    assert graphs_of(Case(RANKS, words, "llama", "fp32"), tp) == (1, {})


@pytest.mark.parametrize("budget", [20, 50, 90])
@pytest.mark.parametrize("tensor", ["tp2", "tp2 sp"])
def test_blocks_at_one_level_of_a_budget_do_and_none_is_broken(
    tensor: str, budget: int, tp: MeshAxis
) -> None:
    case = Case(RANKS, f"{tensor} budget{budget}", "llama", "fp32")
    levels = {*case.settings()["recompute_levels"]}

    assert len(levels) == 2 and graphs_of(case, tp) == (2, {})


def test_so_do_blocks_with_adapters_and_those_of_two_streams(tp: MeshAxis) -> None:
    for model in ("lora", "flux"):
        torch._dynamo.reset()
        assert graphs_of(Case(RANKS, "tp2 mb4 full", model, "fp32"), tp) == (1, {})
