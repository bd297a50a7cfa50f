"""The matrix probe measures real products and says what it leaves out.

How long an all-reduce takes does not hang on how long ranks take to connect.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.trainer.measure.clock import Clock, HostClock
from paceline.trainer.programs import allreduce, gemm
from tests.trainer.example import LIMIT_S, program

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Everything printed for four dtypes in a short time."""
    question = {"device": "cpu", "dtypes": ["fp32", "bf16", "fp16", "nvfp4"],
                "matmul_precision": "high", "threads": 1, "seconds": 0.3}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(program("programs.gemm")), json.dumps(question)],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_dtype_has_a_rate_or_a_reason(rows: list[dict[str, Any]]) -> None:
    measured = {row["dtype"] for row in rows if row["event"] == "gemm"}
    skipped = {row["dtype"]: row["reason"] for row in rows if row["shape"] is None}

    assert measured == {"fp32", "bf16"}
    assert "emulates fp16" in skipped["fp16"] and "only fp32" in skipped["nvfp4"]


def test_a_row_is_complete(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["threads"] == 1 and row["torch"] == torch.__version__ and row["device_name"]
        if row["event"] == "gemm":
            assert len(row["shape"]) == 3 and row["n"] >= gemm.MIN_REPEATS
            assert row["flops_per_s"] > 1e7 and row["spread"] >= 0
            assert row["cpu_share"] > 0


def test_a_rate_is_two_m_n_k_over_the_fastest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.cycle([0.012, 0.004, 0.008, 0.008, 0.008])
    monkeypatch.setattr(gemm, "elapsed", lambda multiply, clock, n: next(times) * n)

    row = gemm.measure_shape("fp32", (16, 32, 64), CPU, HostClock(), share_s=0)

    assert row["flops_per_s"] == pytest.approx(2 * 16 * 32 * 64 / 0.004)
    assert row["statistic"] == "best of n" and row["n"] == gemm.MIN_REPEATS
    assert row["spread"] == pytest.approx(0)  # three of five are equal


def test_a_slow_first_shape_does_not_decide_about_the_next_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []

    def measure(dtype: str, shape: tuple[int, ...], *_: object) -> dict[str, Any]:
        asked.append(shape)
        return {"event": "gemm", "flops_per_s": 1.0 if len(asked) == 1 else 1e15}

    monkeypatch.setattr(gemm, "measure_shape", measure)
    lines = list(gemm.measure_dtype("fp32", CPU, HostClock(), seconds=1.0))

    assert tuple(asked) == gemm.SHAPES["cpu"]
    assert all(line["event"] == "gemm" for line in lines)


def test_a_share_of_the_processor_below_one_tells_of_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = gemm.elapsed

    def starved(multiply: Callable[[], object], clock: Clock, times: int) -> float:
        time.sleep(0.02)  # as if another program had the core
        return real(multiply, clock, times)

    monkeypatch.setattr(gemm, "elapsed", starved)
    row = gemm.measure_shape("fp32", (64,) * 3, CPU, HostClock(), share_s=0)

    assert 0 < row["cpu_share"] < 0.9


def test_a_late_shape_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gemm.SHAPES, "cpu", ((64,) * 3,) * gemm.MIN_SHAPES + ((2**17,) * 3,))

    *small, large = gemm.measure_dtype("fp32", CPU, HostClock(), seconds=0.05)

    assert [line["event"] for line in small] == ["gemm"] * gemm.MIN_SHAPES
    assert large["event"] == "skipped" and large["reason"].startswith("needs about")


def test_a_product_is_that_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    result = gemm.make_gemm("fp32", (3, 5, 4), CPU)()
    torch.manual_seed(0)
    a, b = torch.randn(3, 4), torch.randn(5, 4)

    assert isinstance(result, torch.Tensor)
    assert torch.allclose(result, torch.nn.functional.linear(a, b))


def test_a_product_that_cannot_be_made_is_skipped_with_its_reason() -> None:
    row = gemm.measure_shape("fp32", (2**50, 1, 1), CPU, HostClock(), share_s=0.1)

    assert row["event"] == "skipped" and row["reason"]


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
