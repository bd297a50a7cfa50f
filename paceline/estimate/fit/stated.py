"""What a published row states of its experts: in columns of its own, else in its notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict

from paceline.core.hardware import Dtype
from paceline.estimate.fit.origin import WHOLE_EXPERTS, captured_experts
from paceline.estimate.model.case import Case, CudaGraphs, Dispatcher, EpOverlap

_DISPATCHERS: tuple[tuple[Dispatcher, str], ...] = (
    ("hybridep", r"hybrid-?ep"),
    ("deepep", r"deep-?ep"),
    ("alltoall", r"(dispatcher|^)\W*(nccl\W*)?all-?to-?all"),
)
_OVERLAP = re.compile(r"overlap_moe_expert_parallel_comm\s*=\s*(\w+)", re.IGNORECASE)
_DROPPED = re.compile(r"token-?\s?drop", re.IGNORECASE)
YES, NO = ("1", "1.0", "true", "yes", "on"), ("0", "0.0", "false", "no", "off")


class Stated(TypedDict):
    """Fields of a case."""

    dispatcher: Dispatcher
    ep_overlap: EpOverlap
    whole_experts: bool
    drops_tokens: bool
    cuda_graphs: CudaGraphs


def of_experts(row: Mapping[str, str], case: Case, software: str, dtype: Dtype) -> Stated:
    """What a row with experts says of them; `case` is the row without it.

    Columns `moe_dispatcher`, `ep_overlap` (on, off), `etp`, `token_drop` and `cuda_graphs` (1, 0)
    count before the notes and the model's name. Tensor ranks hold whole experts where `etp` is 1
    or the software's recipes say so; a step is one CUDA graph where its release does that.
    """
    notes, model = row.get("notes", ""), row.get("model", "")
    drops, graph = flag(row, "token_drop"), flag(row, "cuda_graphs")
    usual = captured_experts(software, case.released, case.generation, case.domain, dtype)
    captured = usual if graph is None else "iteration" if graph else "none"
    etp = re.search(r"\bETP\s*=?\s*(\d+)", (row.get("etp") and f"ETP{row['etp']}") or notes)
    return Stated(
        dispatcher=_dispatcher(row.get("moe_dispatcher") or notes),
        ep_overlap=_overlap(row, notes, "on" if captured == "iteration" else "any"),
        whole_experts=int(etp[1]) == 1 if etp else software in WHOLE_EXPERTS,
        drops_tokens=bool(_DROPPED.search(model)) if drops is None else drops,
        cuda_graphs=captured,
    )


class DenseBlocks(TypedDict):
    """Fields of a case."""

    dense_share: float
    more_weights: float


def of_dense_blocks(first: float, width: float | None, case: Case) -> DenseBlocks:
    """The `first` blocks of a case with experts, which have an ffn of `width` instead of experts.

    The mean over blocks of what that ffn has more parameters than router and shared experts, which
    count in every block. Without a width it is that of a token's experts together.
    """
    share = min(1.0, first / case.layers)
    width = width or case.ffn * case.experts_per_token + case.shared_ffn
    matrices = (2 + case.gated) * case.hidden * (width - case.shared_ffn)
    return DenseBlocks(
        dense_share=share, more_weights=share * (matrices - case.hidden * case.experts)
    )


def flag(row: Mapping[str, str], name: str) -> bool | None:
    """A column that says yes or no; None where it says neither."""
    word = (row.get(name) or "").strip().lower()
    return True if word in YES else False if word in NO else None


def _dispatcher(text: str) -> Dispatcher:
    for name, word in _DISPATCHERS:
        if re.search(word, text, re.IGNORECASE):
            return name
    return "any"


def _overlap(row: Mapping[str, str], notes: str, usual: EpOverlap) -> EpOverlap:
    column, noted = flag(row, "ep_overlap"), _OVERLAP.search(notes)
    if column is None and noted:
        column = flag({"noted": noted[1]}, "noted")
    return usual if column is None else "on" if column else "off"
