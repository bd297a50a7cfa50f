"""MFU waterfall: the share of the dense peak that is left after each cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.result import WaterfallLevel
from paceline.estimate.model.block import gemm_rate
from paceline.estimate.model.case import Cases
from paceline.estimate.model.step import StepTime

COMPUTED = "GEMMs and attention"
CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COMPUTED, ("gemm", "head", "attention")),
    ("memory-bound work", ("elementwise", "optimizer")),
    ("CPU launch overhead", ("host", "fixed")),
    ("tensor parallelism", ("tp",)),
    ("context parallelism", ("cp",)),
    ("expert parallelism", ("ep",)),
    ("weight gathering", ("zero",)),
    ("pipeline transfers", ("stages",)),
    ("gradient exchange", ("dp",)),
    ("pipeline bubble", ("bubble",)),
    ("jitter overhead", ("jitter",)),
)
"""Causes in order, each with the parts of a step that it sums."""


def waterfall(
    x: Cases, c: Mapping[str, float], time: StepTime, flops_per_device: float
) -> tuple[WaterfallLevel, ...]:
    """Return the levels of one case from the dense peak down to the estimated rate.

    All levels use the FLOPs of a step in one convention, `flops_per_device`. The second level is
    the efficiency of large GEMMs. The third adds the effects of real GEMM sizes, recomputation and
    attention; it can rise, because a convention may count FLOPs that are not executed. Causes that
    take no time are left out.
    """
    peak = float(x.peak_narrow[0] or x.peak_16bit[0])
    parts, elapsed_s = time.at(0), flops_per_device / peak
    levels = [WaterfallLevel(name="peak", flops_per_s=peak, share=1.0, lost_s=0.0)]
    gemm_s = flops_per_device / float(gemm_rate(x, c)[0])
    causes = {name: sum(parts[part] for part in of_cause) for name, of_cause in CAUSES}
    computed_s = causes.pop(COMPUTED)
    steps = {"GEMM efficiency": gemm_s - elapsed_s, COMPUTED: computed_s - gemm_s, **causes}
    for name, seconds in steps.items():
        if seconds == 0:
            continue
        elapsed_s += seconds
        rate = flops_per_device / elapsed_s
        levels.append(
            WaterfallLevel(name=name, flops_per_s=rate, share=rate / peak, lost_s=seconds)
        )
    return (*levels, levels[-1].model_copy(update={"name": "estimated", "lost_s": 0.0}))


def uncomputed_flops_notes(levels: Sequence[WaterfallLevel], convention: str) -> tuple[str, ...]:
    """Return a note if a convention counts FLOPs that are not executed, so that a level rises."""
    if not any(level.name == COMPUTED and level.lost_s < 0 for level in levels):
        return ()
    what = "masked attention" if convention == "full-attention" else "work"
    return (
        f"FLOP/s follow the convention {convention}, which counts {what} that is not executed, so "
        f"the level {COMPUTED} rises",
    )


def extend_to_measured(
    levels: Sequence[WaterfallLevel], estimated_s: float, measured_s: float
) -> tuple[WaterfallLevel, ...]:
    """Return the levels of an estimate, extended by the unexplained time and the measured rate.

    The lost seconds and the time at the peak rate sum to the measured step.
    """
    last, peak = levels[-1], levels[0].flops_per_s
    rate = last.flops_per_s * estimated_s / measured_s
    unexplained_level = WaterfallLevel(
        name="unexplained", flops_per_s=rate, share=rate / peak, lost_s=measured_s - estimated_s
    )
    return (
        *levels,
        unexplained_level,
        unexplained_level.model_copy(update={"name": "measured", "lost_s": 0.0}),
    )
