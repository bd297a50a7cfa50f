"""What an exception means for the rank: its own fault, lack of memory, or another rank's end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.outcome import NotFiniteError, outcome

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
