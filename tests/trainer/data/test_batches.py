"""Ranks take disjoint parts of one global batch that no layout changes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trainer.config import ConfigError, parse_config
from paceline.trainer.data.batches import AHEAD, Loader, Sampler, sampler_of
from paceline.trainer.data.corpus import load_corpus
from paceline.trainer.data.samples import TokenCorpus
from paceline.trainer.parallel.mesh import Mesh, MeshAxis
from paceline.trainer.train import set_threads
from tests.trainer.example import settings


def make_loader(rank: int = 0, ranks: int = 1, **changes: Any) -> Loader:
    config = parse_config(settings(ranks=ranks, **changes))
    corpus = load_corpus(config)
    sampler = sampler_of(config, corpus.num_windows)
    mesh = Mesh(dp=MeshAxis(size=ranks, index=rank))
    return Loader(corpus, sampler, config, mesh, pin=False)


RAMP_UP = [(20, 4), (40, 8)]
"""A batch of 4 until 20 samples are behind, then of 8 until 40."""


@pytest.mark.parametrize("ramp_up", [[], RAMP_UP])
@pytest.mark.parametrize("num_windows", [None, 26, 3])
def test_ranks_share_out_every_global_batch(
    num_windows: int | None, ramp_up: list[tuple[int, int]]
) -> None:
    alone = Sampler(num_windows, global_batch=16, dp=1, seed=3, ramp_up=ramp_up)
    shared = Sampler(num_windows, global_batch=16, dp=4, seed=3, ramp_up=ramp_up)

    for step in range(12):
        parts = [shared.windows(step, rank) for rank in range(4)]
        assert [*chain(*parts)] == alone.windows(step, 0)
        assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize("ramp_up", [[], RAMP_UP])
def test_an_epoch_meets_every_window_once_and_the_next_has_another_order(
    ramp_up: list[tuple[int, int]],
) -> None:
    sampler = Sampler(num_windows=26, global_batch=16, dp=1, seed=3, ramp_up=ramp_up)
    stream = [window for step in range(40) for window in sampler.windows(step, 0)]
    epochs = [stream[start : start + 26] for start in range(0, 20 * 26, 26)]

    assert all(sorted(epoch) == [*range(26)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    """A training that resumes inside a ramp-up continues with the next samples."""
    through = Sampler(26, 16, 1, seed=3, ramp_up=RAMP_UP)
    steps = [through.windows(step, 0) for step in range(12)]

    for step in reversed(range(12)):
        assert Sampler(26, 16, 1, seed=3, ramp_up=RAMP_UP).windows(step, 0) == steps[step]


def test_the_order_is_drawn_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return Sampler(100, 10, 1, seed).windows(0, 0)

    assert order(1) == order(1) != order(2)


def test_fewer_windows_than_a_batch_are_gone_over_within_a_step() -> None:
    batch = Sampler(num_windows=7, global_batch=16, dp=1, seed=0).windows(0, 0)

    assert sorted(batch[:7]) == sorted(batch[7:14]) == [*range(7)] and len(batch) == 16


def test_threads_that_share_a_sampler_may_be_at_different_epochs() -> None:
    switch_interval_s = sys.getswitchinterval()
    sampler = Sampler(num_windows=16, global_batch=16, dp=1, seed=3)
    alone = [sampler.windows(epoch, 0) for epoch in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as threads:
            batches = [*threads.map(lambda i: sampler.windows(i % 4, 0), range(2000))]
    finally:
        sys.setswitchinterval(switch_interval_s)

    assert batches == alone * 500


def test_data_without_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="not enough for one sample"):
        Sampler(num_windows=0, global_batch=8, dp=1, seed=0)


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
        Loader(alone._corpus, alone._sampler, config, Mesh(cp=MeshAxis(2, index)), pin=False)
        for index in (0, 1)
    ]

    whole, early, late = (loader.next()[0] for loader in (alone, *parts))
    for loader in (alone, *parts):
        loader.close()

    chunks = whole.inputs.chunk(4, dim=-1)
    assert torch.equal(early.inputs, torch.cat([chunks[0], chunks[3]], -1))
    assert torch.equal(late.inputs, torch.cat([chunks[1], chunks[2]], -1))
    assert torch.equal(late.targets, torch.cat(whole.targets.chunk(4, dim=-1)[1:3], -1))
    assert early.num_valid_targets == late.num_valid_targets == whole.num_valid_targets // 2 == 64


def test_a_growing_batch_is_more_micro_batches_of_the_same_size() -> None:
    loader = make_loader(1, 2, source="stdlib", global_batch=16, micro_batch=2, ramp_up=RAMP_UP)
    batches = [loader.next()[0] for _ in range(6)]
    batches += [loader.batch(step) for step in range(6, 10)]
    loader.close()

    assert [len(batch.inputs) for batch in batches] == [1] * 5 + [2] * 3 + [4] * 2
    assert {batch.inputs.shape[1:] for batch in batches} == {(2, 32)}
    assert [batch.samples for batch in batches[4:6]] == [2, 4]


PADDED: dict[str, Any] = {"source": "jsonl", "packing": "padded", "global_batch": 4}


def write_records(folder: Path) -> str:
    texts = ["a" * length for length in (3, 10, 31, 32, 33, 90)]
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return str(folder / "a.jsonl")


@pytest.mark.parametrize("cp", [1, 2])
def test_padding_is_ignored_only_where_the_loss_is_of_the_text(tmp_path: Path, cp: int) -> None:
    counted = {}
    for loss_on in ("all", "text"):
        config = parse_config(
            settings(**PADDED, path=write_records(tmp_path), loss_on=loss_on, micro_batch=2)
        )
        corpus = load_corpus(config)
        sampler = Sampler(corpus.num_windows, 6, 1, seed=0)
        loaders = [
            Loader(corpus, sampler, config, Mesh(cp=MeshAxis(cp, index)), pin=False)
            for index in range(cp)
        ]
        batches = [loader.batch(0) for loader in loaders]
        for loader in loaders:
            loader.close()
        counted[loss_on] = sum(batch.num_valid_targets for batch in batches)
        assert {batch.real_tokens for batch in batches} == {4 + 11 + 4 * 32}

    # A text of n bytes has an end mark, and its first token is nobody's target.
    assert counted == {"all": 6 * 32, "text": 3 + 10 + 31 + 3 * 32}


def test_batches_are_made_ahead_but_not_without_bound() -> None:
    loader = make_loader(source="synthetic", steps=50)
    for _ in range(3):
        loader.next()

    assert loader._ready.qsize() <= AHEAD
    loader.close()
    assert not loader._thread.is_alive()


def test_batches_are_made_on_one_thread_and_leave_the_step_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, counts = torch.get_num_threads(), list[int]()
    set_threads(2)
    collate = TokenCorpus.collate

    def noted(self: TokenCorpus, *arguments: Any) -> tuple[torch.Tensor, ...]:
        counts.append(torch.get_num_threads())
        return collate(self, *arguments)

    monkeypatch.setattr(TokenCorpus, "collate", noted)
    try:
        loader = make_loader(source="stdlib", steps=1)
        loader.next()
        loader.close()
        own = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert counts == [1] and own == 2


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
