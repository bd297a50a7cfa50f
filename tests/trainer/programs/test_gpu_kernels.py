"""Kernels that the trainer calls on a GPU, and the programs that measure one (`make test-gpu`)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

from paceline.trainer.model.attention import (
    attention_with_lse,
    causal_attention,
    merge_partial_attention,
    partial_attention_backward,
)
from tests.trainer.example import LIMIT_S, program
from tests.trainer.gpu import CAPABILITY, DEVICE, ON_A_GPU

pytestmark = ON_A_GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("queries", [64, 128])
def test_causal_attention_of_grouped_heads(dtype: torch.dtype, queries: int) -> None:
    q, k, v = (
        torch.randn(2, t, n, 64, device=DEVICE) for t, n in ((queries, 8), (128, 2), (128, 2))
    )
    wide = [x.transpose(1, 2).double() for x in (q, k, v)]
    mask = torch.ones(queries, 128, dtype=torch.bool, device=DEVICE).tril(128 - queries)
    wanted = functional.scaled_dot_product_attention(*wide, mask, enable_gqa=True).transpose(1, 2)

    found = causal_attention(*(x.to(dtype) for x in (q, k, v)))

    assert (found.double() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.skipif(CAPABILITY < (8, 0), reason="flash attention needs compute capability 8.0")
def test_attention_in_parts_and_its_gradients() -> None:
    q, k, v = (torch.randn(2, 64, n, 64, device=DEVICE).bfloat16() for n in (8, 2, 2))
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    by_head = [x.transpose(1, 2) for x in inputs]
    wanted = functional.scaled_dot_product_attention(*by_head, enable_gqa=True).transpose(1, 2)
    above = torch.randn_like(q)
    gradients = torch.autograd.grad(wanted, inputs, above.double())

    out, lse, rest = attention_with_lse(q, k[:, :32], v[:, :32], causal=False)
    out = out.float()
    merge_partial_attention(
        out, lse, *attention_with_lse(q, k[:, 32:], v[:, 32:], causal=False)[:2]
    )
    of_q, of_k, of_v = zip(
        *(
            partial_attention_backward(
                above, q, k[:, half], v[:, half], out.bfloat16(), lse, *rest, causal=False
            )
            for half in (slice(0, 32), slice(32, 64))
        ),
        strict=True,
    )

    found = (out, of_q[0] + of_q[1], torch.cat(of_k, 1), torch.cat(of_v, 1))
    for one, other in zip(found, (wanted, *gradients), strict=True):
        assert (one.double() - other).norm() / other.norm() < 2e-2


@pytest.mark.parametrize(
    ("name", "question", "events"),
    [
        ("gemm", {"dtypes": ["fp32", "bf16", "fp16", "fp8"], "seconds": 0.2}, {"gemm"}),
        ("bandwidth", {"seconds": 0.2}, {"memory"}),
        ("latency", {"seconds": 0.2}, {"latency"}),
        ("allreduce", {"seconds": 0.2}, {"collective"}),
        (
            "kernels",
            {
                "dtype": "fp16",
                "products": [[512] * 3],
                "attention": [[1, 512, 8, 2, 64]],
                "seconds": 0.2,
            },
            {"product", "attention"},
        ),
        ("context_memory", {"size": 256}, {"context"}),
    ],
)
def test_a_probe_measures_the_gpu(name: str, question: dict[str, Any], events: set[str]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(program(f"programs.{name}")),
            json.dumps({"device": "cuda", **question}),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert events <= {line["event"] for line in told}
    assert {line["device_name"] for line in told} == {torch.cuda.get_device_name(0)}
    reasons = [line["reason"] for line in told if line["event"] == "skipped" and not line["shape"]]
    assert len(reasons) == int(name == "gemm" and CAPABILITY < (8, 9))
