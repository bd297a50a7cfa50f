"""Lists of ranks as people write them."""

from __future__ import annotations

import re


def read_ranks(text: str) -> list[int] | None:
    """The ranks of `0,1,4-7`, in the order written; None for anything else."""
    parts = [part.strip() for part in text.split(",")]
    spans = [re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part) for part in parts]
    ranks: list[int] = []
    for span in spans:
        if span is None or int(span[2] or 0) - int(span[1]) > 1_000_000:
            return None
        ranks += range(int(span[1]), int(span[2] or span[1]) + 1)
    return ranks


def left_out(ranks: list[int]) -> list[int]:
    """Ranks between the first and the last that are not in the list."""
    return sorted(set(range(min(ranks), max(ranks) + 1)) - set(ranks)) if ranks else []
