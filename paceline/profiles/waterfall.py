"""From the peak to the measured rate by what a profile saw: each category takes its seconds."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.waterfall import WaterfallLevel
from paceline.profiles.profile import Profile

PEAK, MEASURED = "peak", "measured"
NAMES = {
    "memory_bound": "memory-bound work",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "host_gap": "nothing runs (host)",
    "other": "other kernels",
}


def waterfall(
    profile: Profile, flops_per_step: float, peak_flops_per_s: float
) -> tuple[WaterfallLevel, ...]:
    """Levels of one device from its peak down to the profiled step; empty where no product
    was seen.

    `flops_per_step` are the model's, of one device. At the peak they take flops / peak seconds;
    products and attention take what they do beyond that, every other category all of its own.
    """
    parts = profile.parts
    if not profile.step_time_s or not parts.get("gemm", 0.0) + parts.get("attention", 0.0):
        return ()
    spent = flops_per_step / peak_flops_per_s
    levels = [WaterfallLevel(name=PEAK, flops_per_s=peak_flops_per_s, share=1.0, lost_s=0.0)]
    for name, seconds in _causes(profile, spent):
        spent += seconds
        rate = flops_per_step / spent
        share = rate / peak_flops_per_s
        levels.append(WaterfallLevel(name=name, flops_per_s=rate, share=share, lost_s=seconds))
    return (*levels, levels[-1].model_copy(update={"name": MEASURED, "lost_s": 0.0}))


def _causes(profile: Profile, ideal_s: float) -> Iterator[tuple[str, float]]:
    """Every cause that takes any time; the first may give some back, where a convention counts more
    than was computed."""
    parts = profile.parts
    yield "GEMMs and attention", parts["gemm"] + parts["attention"] - ideal_s
    for name in ("memory_bound", "optimizer"):
        if parts[name]:
            yield NAMES[name], parts[name]
    for axis, time in profile.axes.items():
        if time.exposed_s:
            yield f"communication {axis}", time.exposed_s
    for name in ("bubble", "data_wait", "host_gap", "other"):
        if parts[name]:
            yield NAMES[name], parts[name]
