"""Numbers in sentences. The trainer is a program of its own and has its own words for them."""

from __future__ import annotations


def counted(number: int, thing: str, ending: str = "s") -> str:
    """A number with its noun: `1 layer`, `2 layers`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{ending}"
