"""The rules of a round as the small siblings keep them: a copy with these value checks replaced.

Every key, every count and every order that the official rules ask for is asked for here too.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.mlperf.eligibility import NOT_A_RESULT
from paceline.mlperf.rules import DEFAULT_RULESET, SIBLINGS

TINY_RULESET = "tiny"
OTHER_VALUES = "checked by rules with other values"
TINY_LABEL = f"{NOT_A_RESULT}: {OTHER_VALUES}"
BASE_RULESET = DEFAULT_RULESET
"""The round whose rules are copied."""

_NAMES = ", ".join(f"'{name}'" for name in sorted(SIBLINGS))
VALUE, BEST = "CHECK", "ATLEAST_ONE_CHECK"
"""Of every line with a key, and of at least one of them."""


def _reaches(benchmark: str) -> str:
    return f"(v['value'] <= {SIBLINGS[benchmark].target:g}) and v['value'] > 0.0"


REPLACED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "closed_common": {"submission_benchmark": (VALUE, f"v['value'] in [{_NAMES}]")},
    "closed_llama31_8b": {
        "max_sequence_length": (VALUE, "v['value'] == 128"),
        "eval_samples": (VALUE, "v['value'] == 32"),
        "max_steps": (VALUE, "v['value'] == 400"),
        "eval_accuracy": (BEST, _reaches("llama31_8b_tiny")),
    },
    "closed_llama2_70b_lora": {
        "lora_rank": (VALUE, "v['value'] == 4"),
        "eval_accuracy": (BEST, _reaches("llama2_70b_lora_tiny")),
    },
    "closed_flux1": {
        "evaluation_frequency": (VALUE, "v['value'] == 24"),
        "eval_accuracy": (BEST, _reaches("flux1_tiny")),
    },
}
"""File of the official rules -> key -> which check, and what stands in its place."""


def replaced_rules() -> dict[str, object]:
    """What the checker's program needs to make the copy."""
    files = {f"closed_{small.sibling_of}": f"closed_{name}" for name, small in SIBLINGS.items()}
    return {"replaced": REPLACED, "names": files}
