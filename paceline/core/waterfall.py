"""The way from a device's peak to a rate, cause by cause: what pages draw."""

from __future__ import annotations

from paceline.core.value import Value


class WaterfallLevel(Value):
    """What is left after one cause and those before it."""

    name: str
    flops_per_s: float
    """Of one device."""
    share: float
    """Of the peak."""
    lost_s: float
    """Seconds of the step that this cause takes; negative where it gives some back."""
