"""TimedRun: the input of the metrics, one run with its steps in the window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.core.flops import (
    FlopsInput,
    hardware_flops_per_token,
    model_flops_per_token,
    with_recompute,
    without_recompute,
)
from paceline.core.rates import flops_per_s_per_device
from paceline.core.run import RunSettings
from paceline.core.stats import Summary, summarize
from paceline.core.steps import FloatColumn, Steps


@dataclass(frozen=True)
class TimedRun:
    """One run as seen by the metrics."""

    facts: RunSettings
    steps: Steps
    """All steps, merged over ranks."""
    window: Steps
    """Steps of the steady window."""
    times: Summary
    """Summary of the step times in the window, in seconds."""
    peak_flops_per_s: float | None
    """Data-sheet peak of one device in the dtype of the run."""
    peak_source: str | None
    achievable_flops_per_s: float | None
    """Achievable GEMM throughput of all devices together, as measured on this machine."""
    achievable_source: str | None
    startup_s: float | None
    uneven: bool = False
    """True if the steps have no single level. The mean step is then the typical one."""
    no_peak: str | None = None
    """Reason why the data sheet's peak does not apply to this run."""
    resolution_s: float = 0.0
    """Resolution of the log's printed times; 0 if they are not rounded."""

    @property
    def typical_step_s(self) -> float:
        """Typical step time in seconds, at which rates are computed.

        It is the median, or the mean if the window is uneven.
        """
        return self.times.mean if self.uneven else self.times.median

    @property
    def statistic(self) -> str:
        """Statistic of the typical step: `median` or `mean`."""
        return "mean" if self.uneven else "median"

    @property
    def spread(self) -> float:
        """Relative spread of the step times: 1.4826 MAD / median, or sigma / mean if uneven."""
        if not self.uneven:
            return self.times.relative_spread
        return float(np.std(self.window["step_time_s"])) / self.times.mean

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Within-run interval of the median step in seconds; None if there is none.

        Half a printed digit is added at both ends. The median of rounded times is the rounded true
        median, regardless of the number of steps.
        """
        t, half = self.times, self.resolution_s / 2
        if self.uneven or t.low is None or t.high is None:
            return None
        return max(t.low - half, t.low / 2), t.high + half

    @property
    def global_batch(self) -> float | None:
        """Samples per step in the window.

        The value is the one that the log states or counts, otherwise the configured one.
        """
        batch = first_value(self.window["global_batch"][:1])
        batch = mean_value(self.window["samples"]) if batch is None else batch
        return self.facts.global_batch if batch is None else batch

    @property
    def seq_len(self) -> float | None:
        """Token positions per sample in the window."""
        length = first_value(self.window["seq_len"][:1])
        return self.facts.seq_len if length is None else length

    @property
    def flops_per_s_per_device(self) -> float | None:
        """Model FLOP/s of one device in the run's convention at the typical step."""
        return self._per_device(model_flops_per_token)

    @property
    def hardware_flops_per_s_per_device(self) -> float | None:
        """Hardware FLOP/s of one device: model FLOP/s plus the configured recomputation."""
        return self._per_device(hardware_flops_per_token) if self.facts.layout else None

    @property
    def attended_share(self) -> float | None:
        """Mean share of attention pairs that document masking left; None without it."""
        return mean_value(self.window["attended_share"])

    @property
    def flops_input(self) -> FlopsInput | None:
        """Input of the FLOPs conventions, with the measured share of attention pairs."""
        x = self.facts.flops_input
        return x and x.with_attended_share(self.attended_share)

    @property
    def model_convention(self) -> str | None:
        """Convention of the model FLOP/s."""
        name = self.facts.flops_convention
        return without_recompute(name) if name else None

    @property
    def hardware_convention(self) -> str | None:
        """Convention of the hardware FLOP/s.

        It is the convention of the model FLOP/s if nothing is recomputed.
        """
        name, layout = self.facts.flops_convention, self.facts.layout
        recomputed = layout is not None and layout.recompute != "none"
        return with_recompute(name) if name and recomputed else self.model_convention

    def _per_device(self, per_token: Callable[[str, FlopsInput], float]) -> float | None:
        facts, batch = self.facts, self.global_batch
        x, convention = self.flops_input, facts.flops_convention
        num_devices, seq_len = facts.num_devices, facts.seq_len
        if not (x and convention and num_devices and seq_len and batch):
            return None
        flops = per_token(convention, x) * seq_len
        return flops_per_s_per_device(flops, batch, self.typical_step_s, num_devices)


def timed_run(
    facts: RunSettings,
    steps: Steps,
    window: Steps,
    *,
    peak_flops_per_s: float | None = None,
    peak_source: str | None = None,
    achievable_flops_per_s: float | None = None,
    achievable_source: str | None = None,
    startup_s: float | None = None,
    uneven: bool = False,
    no_peak: str | None = None,
    resolution_s: float = 0.0,
) -> TimedRun:
    """Return a TimedRun with a summary of the window's step times. The window must not be empty."""
    return TimedRun(
        facts=facts,
        steps=steps,
        window=window,
        times=summarize(window["step_time_s"]),
        peak_flops_per_s=peak_flops_per_s,
        peak_source=peak_source,
        achievable_flops_per_s=achievable_flops_per_s,
        achievable_source=achievable_source,
        startup_s=startup_s,
        uneven=uneven,
        no_peak=no_peak,
        resolution_s=resolution_s,
    )


def first_value(column: FloatColumn) -> float | None:
    """Return the first value of a column; None if it is missing."""
    return float(column[0]) if len(column) and np.isfinite(column[0]) else None


def mean_value(column: FloatColumn) -> float | None:
    """Return the mean of the known values of a column; None if there are none."""
    finite = column[np.isfinite(column)]
    return float(finite.mean()) if len(finite) else None
