"""Published memory figures, and the estimate of the same quantity for each of them.

Published figures differ in kind: memory that nvidia-smi shows for the device, memory that PyTorch's
allocator reserved, or its peak of allocated memory. They also differ in the rank: the most loaded
one, or the one that writes the log. Comparing across kinds would be wrong by the context and
fragmentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from paceline.core.errors import UserError
from paceline.estimate.fit.published import NO_DEVICE, UnsupportedRowError, read_row
from paceline.estimate.memory.device_memory import MemoryEstimate, memory, rank_memory
from paceline.estimate.memory.framework import FRAMEWORKS, Framework
from paceline.estimate.model.case import Case, Floats, cases_of
from paceline.files import catalog

GIB = 2**30
_SIZE = re.compile(r"-(96)GB")
"""Device variants whose memory differs from that of the catalog's device of the same name."""
NO_MEMORY = "no memory figure"
MORE_STAGES = "more pipeline stages than layers"

Kind = Literal["allocated", "reserved", "device_used"]
KINDS: Mapping[str, Kind] = {"softmax": "device_used", "fused": "allocated", "torch": "reserved"}
"""Kind of memory that each implementation's publications state: nvidia-smi, Megatron's
mem-max-allocated, torchtitan."""
MOST, FIRST, LAST = "most", 0, -1
RANKS: Mapping[str, int] = {"golden": LAST, "tr3m-1B3": FIRST}
"""Rank whose memory a source states, by a word in the source's name.

Megatron's writer is on the last rank. The 1.3B study's figures do not grow with the logits of the
last stage. Other sources state the most loaded rank.
"""

SETTINGS: Mapping[str, Mapping[str, float | bool]] = {
    "gpt3_7b_tp1_pp4_memory_speed": {"vocab": 131073.0, "tied": False},
    "gpt3_7b_tp4_pp1_memory_speed": {"vocab": 131073.0, "tied": False},
    "account_for_embedding_loss_in_pipeline_split": {"vp": 2.0, "tied": False},
    "cross_entropy_loss_fusion": {"more_logit_bytes": 4.0},
    "llama3-8b_h200_202506": {"more_logit_bytes": -10.0},
}
"""Settings of Megatron's tests and torchtitan's runs that tables omit, by a word in the path.

From the tests' model_config.yaml (NVIDIA/Megatron-LM, tests/functional_tests/test_cases/gpt). A
compiled loss wrote its result from fp32 logits to another tensor of the same size (a note in
megatron/core/fusions/fused_cross_entropy.py, where later releases avoid it). torchtitan compiles
its loss where it compiles blocks, from April 2025 on (pytorch/torchtitan#1033): 16-bit logits and
their gradient remain, 4 bytes of 14.
"""
BLOCKING = "tr11-176B"
"""Word in the source whose runs used CUDA_LAUNCH_BLOCKING=1, according to that source."""


@dataclass(frozen=True)
class PublishedMemory:
    """One published memory figure, or one run that ran out of memory."""

    id: str
    source: str
    case: Case
    device_bytes: float
    reported_bytes: float | None
    """Bytes as stated; None if the run ran out of memory."""


def read_memory_row(row: Mapping[str, str]) -> PublishedMemory:
    """Read a row with memory (mem_gb, in GiB) or that ran out; raises UnsupportedRowError.

    Gaps are filled as in `read_row`. Models without a gate have learned positions and a tied head.
    The notes report an optimizer with 8-bit moments.
    """
    notes, memory_text = row.get("notes", ""), (row.get("mem_gb") or "").strip()
    ran_out = notes.startswith("OOM")
    if not memory_text and not ran_out:
        raise UnsupportedRowError(NO_MEMORY)
    # A run that ran out of memory has no step time, but `read_row` requires one. This value is
    # large enough that no peak FLOP rate rejects it.
    case = read_row({**row, "step_time_s": "1e9"}).case
    if float(row.get("pp") or 1) > case.layers:
        raise UnsupportedRowError(MORE_STAGES)
    try:
        device = catalog.find_device(row.get("gpu", "")).device
    except UserError as error:
        raise UnsupportedRowError(NO_DEVICE) from error
    variant = _SIZE.search(row.get("gpu", ""))
    case = replace(
        case,
        tied=not case.gated,
        positions=0.0 if case.gated else case.seq_len,
        moment_bytes=1.0 if "bnb" in notes and "w/o bnb" not in notes else 4.0,
        summed_gradient_bytes=4.0 if "fp32 grad accum" in notes else 0.0,
        blocking_launches=BLOCKING in row.get("source", ""),
    )
    case = replace(case, **_settings(row.get("table_or_path", "")))
    return PublishedMemory(
        id=row.get("id", ""),
        source=row.get("source", "").split(" (via")[0],
        case=case,
        device_bytes=float(variant[1]) * 1e9 if variant else device.memory_bytes or float("inf"),
        reported_bytes=float(memory_text) * GIB if memory_text else None,
    )


def _settings(path: str) -> Mapping[str, Any]:
    none: Mapping[str, float | bool] = {}
    return next((settings for word, settings in SETTINGS.items() if word in path), none)


def memory_as_reported(
    rows: Sequence[PublishedMemory], frameworks: Mapping[str, Framework] | Framework = FRAMEWORKS
) -> Floats:
    """Return estimated bytes of the kind and of the rank that each row states.

    The estimate is capped at the device's memory.
    """
    x = cases_of([row.case for row in rows])
    estimates: dict[int | str, MemoryEstimate] = {
        MOST: memory(x, frameworks),
        FIRST: rank_memory(x, FIRST, frameworks),
        LAST: rank_memory(x, LAST, frameworks),
    }
    totals = {
        (rank, kind): getattr(estimate, kind)
        for rank, estimate in estimates.items()
        for kind in set(KINDS.values())
    }
    estimates_ = [
        totals[rank_of_source(row.source), KINDS[row.case.implementation]][i]
        for i, row in enumerate(rows)
    ]
    return np.minimum(estimates_, [row.device_bytes for row in rows])


def rank_of_source(source: str) -> int | str:
    """Return the pipeline rank whose memory a source states, or MOST."""
    return next((rank for word, rank in RANKS.items() if word in source), MOST)
