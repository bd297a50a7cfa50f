"""Rates that no device reaches: something behind such a figure cannot be right."""

from __future__ import annotations

from paceline.core.units import TERA, significant
from paceline.machines.placement import find_device


def peak_doubt(flops_per_s: float | None, device: str | None, dtype: str | None) -> str | None:
    """Why a rate in FLOP/s of one device is not believed, None where nothing speaks against it.

    It is held against the device's dense peak of the dtype; where that is not known, against its
    largest, which is of the narrowest dtype.
    """
    kind = find_device(device) if device else None
    if kind is None or not kind.peaks or not flops_per_s:
        return None
    peaks = {str(name): peak.flops_per_s for name, peak in kind.peaks.items()}
    known = dtype in peaks
    name = dtype if dtype in peaks else max(peaks, key=peaks.__getitem__)
    share = flops_per_s / peaks[name]
    if share <= 1:
        return None
    rate = f"{significant(flops_per_s / TERA, 4)} TFLOP/s"
    figure = f"MFU {share:.0%}" if known else f"{rate}, {share:.0%} of the dense peak in {name},"
    return (
        f"{figure} is more than a device can reach: model, device, number of devices, batch and "
        "length cannot all be right"
    )
