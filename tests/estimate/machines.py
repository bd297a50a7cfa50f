"""Machines and trainings whose coefficients are known, because the formulas made their times."""

from __future__ import annotations

import numpy as np

from paceline.estimate.model.case import Case, Cases, cases_with

H100 = Case(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256,
    seq_len=8192, gated=True, peak_16bit=989e12, memory_bytes_per_s=3.35e12,
    intra_bytes_per_s=450e9, inter_bytes_per_s=50e9, devices=16, global_batch=64,
    generation="hopper",
)  # fmt: skip
CPU = Case(
    layers=4, hidden=256, ffn=768, heads=8, kv_heads=4, head_dim=32, vocab=512, seq_len=256,
    implementation="torch", gated=True, peak_16bit=1e11, memory_bytes_per_s=1e10,
    intra_bytes_per_s=2e9, inter_bytes_per_s=2e9, devices=2, domain=2, global_batch=8,
    generation="cpu",
)  # fmt: skip


def layouts(case: Case) -> Cases:
    """Eight layouts of one training."""
    return cases_with(
        case,
        {
            "tp": np.array([1, 1, 2, 2, 1, 1, 1, 1], dtype=float),
            "pp": np.array([1, 1, 1, 1, 2, 2, 1, 1], dtype=float),
            "micro_batch": np.array([1, 4, 1, 4, 1, 4, 2, 1], dtype=float),
            "zero_stage": np.array([0, 0, 0, 0, 0, 0, 1, 3], dtype=float),
        },
    )
