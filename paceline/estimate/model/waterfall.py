"""From the peak to the estimated or measured rate: what each cause leaves of a device's FLOP/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.waterfall import WaterfallLevel
from paceline.estimate.model.block import product_rate
from paceline.estimate.model.case import Cases
from paceline.estimate.model.step import StepTime

COMPUTED = "products and attention"
CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COMPUTED, ("gemm", "head", "attention")),
    ("memory-bound work", ("elementwise", "optimizer")),
    ("host and fixed time", ("host", "fixed")),
    ("tensor parallelism", ("tp",)),
    ("context parallelism", ("cp",)),
    ("expert parallelism", ("ep",)),
    ("sharded weights", ("zero",)),
    ("between stages", ("stages",)),
    ("gradients", ("dp",)),
    ("bubble", ("bubble",)),
    ("jitter", ("jitter",)),
)
"""In this order, each with the parts of a step that it adds up."""


def waterfall(
    x: Cases, c: Mapping[str, float], time: StepTime, flops_per_device: float
) -> tuple[WaterfallLevel, ...]:
    """Levels of one case from the dense peak down to the estimated rate.

    `flops_per_device` are those of a step in a convention, and all levels are of it. The second
    level is what large products reach; the third adds real sizes, recomputation, and attention,
    which may take less than a convention counts for it. Causes without any time are left out.
    """
    peak = float(x.peak_narrow[0] or x.peak_16bit[0])
    parts, spent = time.at(0), flops_per_device / peak
    levels = [WaterfallLevel(name="peak", flops_per_s=peak, share=1.0, lost_s=0.0)]
    reached = flops_per_device / float(product_rate(x, c)[0])
    causes = {name: sum(parts[part] for part in of_cause) for name, of_cause in CAUSES}
    first = causes.pop(CAUSES[0][0])
    steps = {"large products": reached - spent, CAUSES[0][0]: first - reached, **causes}
    for name, seconds in steps.items():
        if seconds == 0:
            continue
        spent += seconds
        rate = flops_per_device / spent
        levels.append(
            WaterfallLevel(name=name, flops_per_s=rate, share=rate / peak, lost_s=seconds)
        )
    return (*levels, levels[-1].model_copy(update={"name": "estimated", "lost_s": 0.0}))


def rise_notes(levels: Sequence[WaterfallLevel], convention: str) -> tuple[str, ...]:
    """Why real products and attention are above large products, where they are."""
    if not any(level.name == COMPUTED and level.lost_s < 0 for level in levels):
        return ()
    whose = "attention that a causal mask leaves out" if convention == "full-attention" else "work"
    return (
        f"from the peak on all FLOP/s are by {convention}, which counts {whose} that is not "
        f"computed: {COMPUTED} are above large products",
    )


def to_measured(
    levels: Sequence[WaterfallLevel], estimated_s: float, measured_s: float
) -> tuple[WaterfallLevel, ...]:
    """The levels of an estimate and two more: what they do not explain, and the measured rate.

    All seconds lost and those at the peak's rate add up to the measured step.
    """
    last, peak = levels[-1], levels[0].flops_per_s
    rate = last.flops_per_s * estimated_s / measured_s
    rest = WaterfallLevel(
        name="not explained", flops_per_s=rate, share=rate / peak, lost_s=measured_s - estimated_s
    )
    return (*levels, rest, rest.model_copy(update={"name": "measured", "lost_s": 0.0}))
