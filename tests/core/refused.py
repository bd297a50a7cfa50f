"""A layout for every rule of core/layout_checks.py that breaks this rule and no other."""

from __future__ import annotations

from typing import Any

from paceline.core.axes.axis import Rule
from paceline.core.layout import Layout
from paceline.core.layout_checks import RULES

EXAMPLES: tuple[dict[str, Any], ...] = (
    # dp
    {"dp_shard": 2},
    {"dp_shard": 2, "zero_stage": 1},
    {"gradient_sync": "every"},
    {"gradient_sync": "every", "zero_stage": 1},
    # tp
    {"sequence_parallel": True},
    {"kind": "mmdit", "tp": 2, "sequence_parallel": True},
    # pp
    {"schedule": "gpipe"},
    {"schedule": "zero-bubble"},
    {"gradient_sync": "every", "zero_stage": 2, "pp": 2},
    {"pp": 2, "schedule": "zero-bubble", "compile": "blocks"},
    {"pp": 2, "schedule": "zero-bubble", "recompute": "full"},
    {"pp": 2, "schedule": "zero-bubble", "recompute": "budget", "recompute_budget": 0.5},
    {"kind": "mmdit", "pp": 2},
    # cp
    {"cp_exchange": "all-to-all"},
    {"cp_exchange": "ring"},
    {"cp": 2, "document_mask": True},
    {"cp": 2, "cp_exchange": "ring", "dtype": "fp32", "device": "cuda"},
    {"kind": "mmdit", "cp": 2, "cp_exchange": "all-to-all"},
    {"kind": "mmdit", "cp": 2, "cp_exchange": "ring"},
    # vp
    {"vp": 2},
    {"pp": 2, "schedule": "interleaved"},
    # ep
    {"kind": "experts", "ep": 2, "dp_shard": 1, "zero_stage": 3},
    # of no one axis
    {"recompute": "budget"},
    {"recompute_budget": 0.5},
    {"recompute": "full", "compile": "blocks", "document_mask": True},
    {
        "recompute": "budget",
        "recompute_budget": 0.5,
        "compile": "blocks",
        "document_mask": True,
    },
    {"kind": "experts", "recompute": "full", "compile": "blocks"},
    {
        "kind": "experts",
        "recompute": "budget",
        "recompute_budget": 0.5,
        "compile": "blocks",
    },
    {"kind": "mmdit", "recompute": "selective"},
    {"kind": "mmdit", "recompute": "budget", "recompute_budget": 0.5},
    {"kind": "mmdit", "dtype": "fp8"},
    {"kind": "mmdit", "dtype": "mxfp8"},
    {"kind": "mmdit", "dtype": "nvfp4"},
)
"""Fields of the layout and, on two devices each, what is around it: `AROUND`."""
AROUND = ("compile", "dtype", "device", "kind", "document_mask")


def layout_of(fields: dict[str, Any]) -> Layout:
    """What an example says of the layout alone."""
    return Layout(**{key: value for key, value in fields.items() if key not in AROUND})


def features_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Further settings of an example, in the form that `features` takes."""
    return {
        "compiled": fields.get("compile", "none") != "none",
        "document_mask": fields.get("document_mask", False),
        "dtype": fields.get("dtype"),
        "device": fields.get("device", "cpu"),
    }


def named(rule: Rule) -> str:
    """A rule's features in a row, for the names of tests."""
    return "+".join(sorted(rule.features))


CASES = tuple(zip(RULES, EXAMPLES, strict=True))
