"""MFU waterfall: the losses between a device's peak and its throughput, by cause."""

from __future__ import annotations

from paceline.core.value import Value


class WaterfallLevel(Value):
    """Throughput that remains after one cause and all previous ones."""

    name: str
    flops_per_s: float
    """FLOP/s of one device."""
    share: float
    """Share of the peak."""
    lost_s: float
    """Seconds of the step that this cause takes; negative if it saves time."""
