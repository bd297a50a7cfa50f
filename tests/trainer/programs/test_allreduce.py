"""How long an all-reduce takes does not hang on how long ranks take to connect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.trainer.programs import allreduce

CPU = torch.device("cpu")


def test_the_first_call_which_connects_the_ranks_says_nothing_of_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([8.0, *[0.01] * 500])
    monkeypatch.setattr(allreduce, "once", lambda payload, group: next(seconds))

    found = allreduce.measure(CPU, 1, 4096, 0.5)

    assert found["latency_s"] == 0.01 and found["n"] == 50


def test_few_repeats_are_made_of_what_is_slow_and_not_too_many_of_what_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def repeats(one_s: float) -> Any:
        monkeypatch.setattr(allreduce, "once", lambda payload, group: one_s)
        return allreduce.measure(CPU, 1, 4096, 0.5)["n"]

    assert (repeats(3.0), repeats(1e-7)) == (allreduce.MIN_REPEATS, allreduce.MAX_REPEATS)


def test_one_rank_has_a_payload_and_no_bus() -> None:
    found = allreduce.measure(CPU, 1, 2**16, 0.01)

    assert found["bytes"] == 2**16 and found["bus_bytes_per_s"] == 0
    assert found["bytes_per_s"] == pytest.approx(2**16 / found["latency_s"])
