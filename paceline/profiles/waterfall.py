"""MFU waterfall from the peak to the measured rate, with the seconds of each category."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.result import WaterfallLevel
from paceline.profiles.profile import Profile

PEAK, MEASURED = "peak", "measured"
NAMES = {
    "memory_bound": "memory-bound work",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "host_gap": "CPU launch overhead",
    "other": "other kernels",
}


def waterfall(
    profile: Profile, flops_per_step: float, peak_flops_per_s: float
) -> tuple[WaterfallLevel, ...]:
    """Return the levels of one device from its peak to the profiled step; empty without GEMMs.

    `flops_per_step` are the model FLOPs of one device. At the peak they take FLOPs / peak seconds.
    GEMMs and attention lose their time beyond that, every other category all of its time.
    """
    parts = profile.parts
    if not profile.step_time_s or not parts.get("gemm", 0.0) + parts.get("attention", 0.0):
        return ()
    elapsed_s = flops_per_step / peak_flops_per_s
    levels = [WaterfallLevel(name=PEAK, flops_per_s=peak_flops_per_s, share=1.0, lost_s=0.0)]
    for name, seconds in _causes(profile, elapsed_s):
        elapsed_s += seconds
        rate = flops_per_step / elapsed_s
        share = rate / peak_flops_per_s
        levels.append(WaterfallLevel(name=name, flops_per_s=rate, share=share, lost_s=seconds))
    return (*levels, levels[-1].model_copy(update={"name": MEASURED, "lost_s": 0.0}))


def _causes(profile: Profile, ideal_s: float) -> Iterator[tuple[str, float]]:
    """Yield every cause with its seconds; the first can be negative if the FLOPs convention counts
    operations that are not computed."""
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
