"""What the scripts behind a published row set where its columns are silent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.weights import block_weights, table_weights

_CHAT = re.compile(r"deepspeed-chat", re.IGNORECASE)
_ADAPTED = re.compile(r"\bopt-13b\b", re.IGNORECASE)
CHAT_RANK = 128
"""Of adapters on all matrices of OPT-13B's blocks, beside which embeddings, norms and biases train
(--lora_dim 128 --lora_module_name decoder.layers. in Lambda's logs of DeepSpeed-Chat)."""


def has_adapters(row: Mapping[str, str]) -> bool:
    """Whether the script behind a row trains adapters though the row does not say so."""
    chat = _CHAT.search(row.get("source", ""))
    return bool(chat and _ADAPTED.search(row.get("model", "")))


def adapters_of_chat(case: Case) -> Case:
    """A case with the adapters that DeepSpeed-Chat's script gives OPT-13B."""
    heads, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    widths = 2 * (2 * case.hidden + heads + kv) + 2 * (case.hidden + case.ffn)
    x = cases_of([case])
    tables, blocks = float(table_weights(x)[0]), case.layers * float(block_weights(x)[0])
    trained = case.layers * CHAT_RANK * widths + tables
    return replace(
        case,
        adapter_rank=CHAT_RANK,
        adapter_widths=widths,
        trained_share=trained / (blocks + tables),
    )
