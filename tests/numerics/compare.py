"""How far two trainings lie apart: losses, norms, and every parameter's gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
"""Largest relative L2 difference of one parameter's gradient."""
FLOOR = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Share of the whole gradient's norm that a smaller one is compared with."""
BF16_FACTOR = 2.0
"""How many times further from fp32 than one bf16 process a bf16 layout may be."""
ROUTED_FACTOR = 8.0
"""The same for gradients of models with experts. Where rounding changes the order of two scores, a
router chooses another expert, and gradients jump; losses, norms and weights hardly do."""

Result = dict[str, Any]


def difference(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Relative L2 distance; a tensor smaller than `floor` is compared with that."""
    distance = torch.linalg.vector_norm(found.double() - wanted.double()).item()
    length = max(torch.linalg.vector_norm(wanted.double()).item(), floor)
    return distance / length if distance == distance else float("inf")


def differences(found: Result, wanted: Result) -> Iterator[tuple[float, str]]:
    """Every difference and what it is of; steps that only one of them has do not count."""
    steps = min(len(found["figures"]), len(wanted["figures"]))
    assert found["gradients"] and wanted["gradients"], "there is no step to compare"
    for column, name in enumerate(("losses", "norms")):
        pair = (result["figures"][:steps, column] for result in (found, wanted))
        yield difference(*pair), name
    # The gradient of a key's bias is nothing but rounding: a floor keeps it from being compared.
    norm = wanted["figures"][0, 1].item()
    for step, (mine, theirs) in enumerate(
        zip(found["gradients"], wanted["gradients"], strict=False), 1
    ):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            floor = FLOOR[mine[name].dtype] * norm
            yield difference(mine[name], theirs[name], floor), f"step {step}: {name}"
    if len(found["figures"]) == len(wanted["figures"]):
        yield difference(found["evaluation"], wanted["evaluation"]), "evaluation"
        for name in wanted["weights"]:
            yield difference(found["weights"][name], wanted["weights"][name], 1e-3), name


def largest_difference(found: Result, wanted: Result) -> tuple[float, str]:
    """The largest difference from another training, or between ranks that should hold the same."""
    return max(
        *differences(found, wanted),
        # A comparison with NaN is false, so it could hide behind any number.
        *(
            (far if far == far else float("inf"), f"copies of {name}")
            for name, far in found["apart"].items()
        ),
    )


def worse_than_rounding(
    found: Result, single: Result, exact: Result, *, of_gradients: bool
) -> tuple[float, str]:
    """How many times further from the exact training a layout is than one process of its dtype.

    `of_gradients` chooses the gradients of each step, or all that is not one.

    The error of one process by chance is compared with its usual error. The gradient of a
    key's bias is zero but for rounding, so nothing can be said of its distance.
    """
    own = {name: far for far, name in differences(single, exact)}
    usual = dict.fromkeys(own, median(own.values()))
    usual |= {"losses": 1e-3, "norms": 1e-3, "evaluation": 1e-3}
    return max(
        (far / max(own[name], usual[name]), name)
        for far, name in differences(found, exact)
        if name.startswith("step ") == of_gradients and not name.endswith(".k.bias")
    )
