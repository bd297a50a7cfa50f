"""What context-parallel ranks exchange takes its time by the kind of exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from paceline.core.layout import Layout
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import DecoderShape
from paceline.core.traffic import LINK_SHARE, step_traffic
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.block import context_parallel_seconds
from paceline.estimate.model.case import Case, CpExchange, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from tests.estimate.machines import H100

C = dict(coefficient_values(shipped_evidence().fit().centre))
AT_ONCE = C | {"intra_start_s": 0.0, "inter_start_s": 0.0, "cp_exposed": 1.0}
CASE = replace(H100, cp=4, tp=2, heads=32, kv_heads=8, head_dim=128, seq_len=8192, devices=8)
TOKENS = 2048.0


def seconds(case: Case, coefficients: dict[str, float], attention_s: float = 0.0) -> float:
    tokens, attention = np.array([TOKENS]), np.array([attention_s])
    return float(context_parallel_seconds(cases_of([case]), coefficients, tokens, attention)[0])


def predicted_bytes(exchange: str, recompute: Any) -> float:
    """What core.traffic says passes a rank's links for one block and micro-batch."""
    shape = DecoderShape(
        num_layers=1, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=64, vocab_size=64
    )
    layout = Layout(tp=2, cp=4, cp_exchange=exchange, recompute=recompute)  # type: ignore[arg-type]
    run = ParallelRun(layout, shape, 8, 1, 8192, "bf16")
    rows = [row for row in step_traffic(run) if row.axis == "cp" and row.purpose != "loss"]
    return sum(row.num_bytes * LINK_SHARE[row.collective](4) for row in rows)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("exchange", ["all-gather", "all-to-all"])
def test_without_starts_time_is_bytes_over_the_links_rate(exchange: Any, recompute: str):
    case = replace(
        CASE,
        cp_exchange=exchange,
        full_recompute=recompute == "full",
        selective_recompute=recompute == "selective",
    )
    rate = CASE.intra_bytes_per_s * C["intra"]
    assert seconds(case, AT_ONCE) * rate == pytest.approx(predicted_bytes(exchange, recompute))


def test_few_key_value_heads_are_copied_for_the_ranks_that_share_heads():
    grouped = replace(CASE, cp_exchange="all-to-all", kv_heads=2)
    copied = replace(CASE, cp_exchange="all-to-all", kv_heads=8)
    assert seconds(grouped, AT_ONCE) == pytest.approx(seconds(copied, AT_ONCE))


def test_attention_hides_what_goes_around_a_ring_and_nothing_else():
    for exchange in get_args(CpExchange):
        case = replace(CASE, cp_exchange=exchange)
        busy, idle = seconds(case, C, attention_s=1.0), seconds(case, C)
        assert (busy < idle) == (exchange in ("any", "ring"))


@pytest.mark.parametrize("exchange", get_args(CpExchange))
def test_one_rank_exchanges_nothing(exchange: CpExchange):
    assert seconds(replace(CASE, cp=1, cp_exchange=exchange), C) == 0
