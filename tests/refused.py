"""A layout for every rule of core/layout.py that breaks this rule and no other."""

from __future__ import annotations

from typing import Any

from paceline.core.layout import RULES, Rule

EXAMPLES: tuple[dict[str, Any], ...] = (
    {"sequence_parallel": True},
    {"vp": 2},
    {"schedule": "gpipe"},
    {"schedule": "zero-bubble"},
    {"pp": 2, "schedule": "interleaved"},
    {"cp_exchange": "all-to-all"},
    {"cp_exchange": "ring"},
    {"dp_shard": 2},
    {"dp_shard": 2, "zero_stage": 1},
    {"ep": 2},
    {"pp": 2, "schedule": "zero-bubble", "compile": "blocks"},
    {"pp": 2, "schedule": "zero-bubble", "recompute": "full"},
    {"cp": 2, "cp_exchange": "ring", "dtype": "fp32", "device": "cuda"},
)
"""Fields of the layout, `compile` and `dtype` of the training, and the device; each on two devices."""
AROUND = ("compile", "dtype", "device")
"""What is no field of the layout."""


def named(rule: Rule) -> str:
    """A rule's features in a row, for the names of tests."""
    return "+".join(sorted(rule.features))


CASES = tuple(zip(RULES, EXAMPLES, strict=True))
