"""Ranks take disjoint parts of one global batch that no layout changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import AHEAD, Loader, Sampler
from config import ConfigError, parse_config
from corpus import load_corpus
from mesh import Axis, Mesh
from tests.native.example import settings


def make_loader(rank: int = 0, ranks: int = 1, **changes: Any) -> Loader:
    config = parse_config(settings(ranks=ranks, **changes))
    corpus, training = load_corpus(config), config.training
    sampler = Sampler(corpus.num_windows, training.global_batch, config.dp, training.seed)
    mesh = Mesh(dp=Axis(size=ranks, index=rank))
    return Loader(corpus, sampler, config, mesh, pin=False)


@pytest.mark.parametrize("num_windows", [None, 26])
def test_ranks_share_out_every_global_batch(num_windows: int | None) -> None:
    alone = Sampler(num_windows, global_batch=8, dp=1, seed=3)
    shared = Sampler(num_windows, global_batch=8, dp=4, seed=3)

    for step in range(9):
        together = [window for rank in range(4) for window in shared.windows(step, rank)]
        assert together == alone.windows(step, 0)
        assert len(set(together)) == 8


def test_an_epoch_meets_no_window_twice_and_the_next_has_another_order() -> None:
    sampler = Sampler(num_windows=26, global_batch=8, dp=1, seed=3)
    epochs = [[w for s in range(3) for w in sampler.windows(3 * e + s, 0)] for e in range(20)]

    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert set().union(*epochs) == set(range(26))


def test_the_order_is_drawn_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return Sampler(100, 10, 1, seed).windows(0, 0)

    assert order(1) == order(1) != order(2)


def test_fewer_windows_than_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"7 windows .* fewer than one global batch of 8"):
        Sampler(num_windows=7, global_batch=8, dp=1, seed=0)


def test_targets_are_inputs_one_token_later() -> None:
    loader = make_loader(source="stdlib", micro_batch=2)
    batch, waited_s = loader.next()
    loader.close()

    assert batch.inputs.shape == batch.targets.shape == (2, 2, 32)
    assert torch.equal(batch.inputs[..., 1:], batch.targets[..., :-1])
    assert waited_s >= 0


def test_ranks_hold_the_parts_of_the_single_process_batch() -> None:
    alone = make_loader(source="stdlib", global_batch=8, micro_batch=8)
    parts = [
        make_loader(rank, 2, source="stdlib", global_batch=8, micro_batch=2) for rank in (0, 1)
    ]

    whole = alone.next()[0].inputs.reshape(8, 32)
    shares = [part.next()[0].inputs.reshape(4, 32) for part in parts]
    for loader in (alone, *parts):
        loader.close()

    assert torch.equal(torch.cat(shares), whole)


def test_context_ranks_share_out_the_tokens_of_every_sequence() -> None:
    alone = make_loader(source="stdlib", global_batch=4, micro_batch=4)
    config = parse_config(settings(source="stdlib", global_batch=4, micro_batch=4))
    parts = [
        Loader(alone._corpus, alone._sampler, config, Mesh(cp=Axis(2, index)), pin=False)
        for index in (0, 1)
    ]

    whole, early, late = (loader.next()[0] for loader in (alone, *parts))
    for loader in (alone, *parts):
        loader.close()

    chunks = whole.inputs.chunk(4, dim=-1)
    assert torch.equal(early.inputs, torch.cat([chunks[0], chunks[3]], -1))
    assert torch.equal(late.inputs, torch.cat([chunks[1], chunks[2]], -1))
    assert torch.equal(late.targets, torch.cat(whole.targets.chunk(4, dim=-1)[1:3], -1))
    assert early.counted == late.counted == whole.counted // 2 == 64


def test_batches_are_made_ahead_but_not_without_bound() -> None:
    loader = make_loader(source="synthetic", steps=50)
    for _ in range(3):
        loader.next()

    assert loader._ready.qsize() <= AHEAD
    loader.close()
    assert "loader" not in {thread.name for thread in threading.enumerate()}


def test_a_short_text_is_gone_over_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 20)
    loader = make_loader(source="text", path=str(tmp_path / "a.txt"), steps=5)

    batches = [loader.next()[0].inputs for _ in range(5)]
    loader.close()

    rows = [sorted(map(tuple, batch.reshape(-1, 32).tolist())) for batch in batches]
    assert len(rows) == 5 and all(row == rows[0] for row in rows)


def test_what_the_thread_meets_is_raised_in_the_step_that_needs_it(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xff" * 900)
    loader = make_loader(source="tokens", path=str(tmp_path / "a.bin"))

    with pytest.raises(ConfigError, match="token 65535"):
        loader.next()
    loader.close()
