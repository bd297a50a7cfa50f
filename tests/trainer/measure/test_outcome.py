"""What an exception means for the rank: its own fault, lack of memory, or another rank's end.

A rank that needs more memory than it may have ends as oom; with enough it trains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.outcome import NotFiniteError, data_bytes, limit_memory, outcome
from tests.trainer.example import end, lines, log, settings, train_alone

GLOO = "[/build/gloo/transport/tcp/pair.cc:%d] %s. GLHF!"
CLOSED = GLOO % (553, "Connection closed by peer [127.0.0.1]:4519")
RESET = GLOO % (537, "Read error [127.0.0.1]:37606: Connection reset by peer")
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8388608 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU),
        MemoryError(),
        MemoryError("std::bad_alloc"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError(
            "Got the following error when running the callback: MemoryError: <EMPTY MESSAGE>"
        ),
    ],
)
def test_lack_of_memory_is_known_in_every_form(error: Exception) -> None:
    status, reason, cause = outcome(error)
    assert (status, cause) == ("oom", "own_fault") and type(error).__name__ in reason


@pytest.mark.parametrize(
    "text",
    [
        CLOSED,
        RESET,
        f"Got the following error when running the callback: RuntimeError: {RESET}\n\nAt:\n  x.py",
        GLOO % (100, "Timed out waiting 1800000ms for recv operation to complete"),
        GLOO % (200, "Application timeout caused pair closure"),
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
        "Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
        "Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_a_lost_peer_is_known_in_every_form(text: str) -> None:
    status, reason, cause = outcome(RuntimeError(text))
    assert (status, cause) == ("failed", "peer_lost")
    assert reason.startswith("another rank ended first: RuntimeError")


def test_other_faults_are_the_ranks_own() -> None:
    assert outcome(ValueError("a\n b")) == ("failed", "ValueError: a b", "own_fault")
    assert outcome(ConfigError("no steps")) == ("failed", "no steps", "own_fault")
    assert outcome(NotFiniteError("nan in step 3")) == ("nan", "nan in step 3", "own_fault")
    assert outcome(RuntimeError("can't start new thread"))[0::2] == ("failed", "own_fault")


def test_no_room_for_a_threads_stack_is_lack_of_memory_where_it_is_limited() -> None:
    program = (
        "import threading\n"
        "from paceline.trainer.measure.outcome import limit_memory\n"
        "from paceline.trainer.measure.outcome import outcome\n"
        "limit_memory(1e6, 'cpu')\n"
        "try:\n    threading.Thread(target=print).start()\n"
        "except RuntimeError as error:\n    print(outcome(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "('oom', \"no memory for a thread's stack: " in done.stdout


def test_no_room_for_compiled_code_is_lack_of_memory_where_it_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("could not create a primitive")
    assert outcome(error)[0] == "failed"
    monkeypatch.setitem(outcome.__globals__, "is_limited", lambda: True)
    assert outcome(error)[0] == "oom"


def test_what_a_pipeline_s_stage_met_is_its_cause() -> None:
    def fail(cause: Exception) -> tuple[str, str, str]:
        try:
            raise RuntimeError("[Stage 1] failed to run forward: args: (Tensor(2, 8),)") from cause
        except RuntimeError as error:
            return outcome(error)

    assert fail(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))[0] == "oom"
    assert fail(ValueError("no")) == ("failed", "ValueError: no", "own_fault")


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
