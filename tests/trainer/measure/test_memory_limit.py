"""A rank that needs more memory than it may have ends as oom; with enough it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.outcome import data_bytes, limit_memory
from tests.trainer.example import end, lines, log, settings, train_alone

MIB = 2**20
SMALL_BYTES, LARGE_BYTES = 20 * MIB, 1000 * MIB


def needy(ranks: int, limit_bytes: float) -> dict[str, Any]:
    """A model whose weights, gradients and optimizer state take about 70 MiB."""
    return settings(
        ranks, 3, source="synthetic", num_layers=1, vocab_size=16_384, hidden_size=128,
        memory_limit_bytes=limit_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_beyond_the_limit_ends_as_oom(tmp_path: Path, ranks: int) -> None:
    assert train_alone(tmp_path, needy(ranks, SMALL_BYTES)) != 0

    said = [lines(tmp_path, rank)[-1:] for rank in range(ranks)]
    whole = [last for (last,) in filter(None, said) if last["event"] == "end"]
    assert "oom" in {last["status"] for last in whole}, log(tmp_path)
    for last in whole:
        lost = last.get("cause") == "peer_lost"
        assert last["steps"] < 3 and (last["status"] == "oom" or lost)


def test_the_same_model_trains_under_a_limit_that_is_large_enough(tmp_path: Path) -> None:
    assert train_alone(tmp_path, needy(1, LARGE_BYTES)) == 0, log(tmp_path)
    assert end(tmp_path)["status"] == "ok" and end(tmp_path)["steps"] == 3


ALLOCATE = """
import json
from paceline.trainer.measure.outcome import data_bytes, limit_memory
from paceline.trainer.measure.machine import keep_freed_memory

keep_freed_memory()
limit_memory(100 * 2**20, "cpu")
before, blocks = data_bytes(), []
try:
    while True:
        blocks.append(bytearray(2**20))
except MemoryError:
    held = len(blocks)
    blocks.pop()  # the parser that reads the figure back needs memory too
print(json.dumps([before, data_bytes(), held]))
"""


def test_the_limit_counts_from_what_is_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True, timeout=60
    )
    before, after, blocks = json.loads(done.stdout)

    assert 90 <= blocks <= 100
    assert after - before <= 100 * MIB


def test_no_limit_changes_nothing() -> None:
    limit_memory(None, "cuda")
    assert data_bytes() > 0


@pytest.mark.parametrize(("device", "system"), [("cuda", "linux"), ("cpu", "darwin")])
def test_where_there_is_no_such_limit_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)

    with pytest.raises(
        ConfigError, match=r"memory_limit_bytes 1e\+06: is only supported for CPUs on Linux"
    ):
        limit_memory(1e6, device)
