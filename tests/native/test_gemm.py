"""The matrix probe measures real products and says what it leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import gemm
from clock import HostClock
from tests.native.example import LIMIT_S, TRAINER

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Everything printed for four dtypes in a short time."""
    question = {"device": "cpu", "dtypes": ["fp32", "bf16", "fp16", "nvfp4"],
                "matmul_precision": "high", "threads": 1, "seconds": 0.3}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(TRAINER / "gemm.py"), json.dumps(question)],
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
            assert len(row["shape"]) == 3 and row["n"] >= gemm.FEWEST
            assert row["flops_per_s"] > 1e7 and row["spread"] >= 0


def test_a_rate_is_two_m_n_k_over_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "elapsed", lambda multiply, clock, times: 0.004 * times)

    row = gemm.measure_shape("fp32", (16, 32, 64), CPU, HostClock(), share_s=0.1)

    assert row["flops_per_s"] == pytest.approx(2 * 16 * 32 * 64 / 0.004)
    assert row["n"] == 25 and row["spread"] == 0


def test_a_shape_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gemm.SHAPES, "cpu", ((64,) * 3, (2**17,) * 3))

    small, large = gemm.measure_dtype("fp32", CPU, HostClock(), seconds=0.05)

    assert small["event"] == "gemm"
    assert large["event"] == "skipped" and large["reason"].startswith("needs about")


def test_a_product_is_that_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    result = gemm.product("fp32", (3, 5, 4), CPU)()
    torch.manual_seed(0)
    a, b = torch.randn(3, 4), torch.randn(5, 4)

    assert isinstance(result, torch.Tensor)
    assert torch.allclose(result, torch.nn.functional.linear(a, b))


def test_a_product_that_cannot_be_made_is_skipped_with_its_reason() -> None:
    row = gemm.measure_shape("fp32", (2**50, 1, 1), CPU, HostClock(), share_s=0.1)

    assert row["event"] == "skipped" and row["reason"]
