"""Step times of single runs as clusters really make them, with what they truly are.

Written apart from the package and its constants: nothing of Paceline is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Draw = np.random.Generator
BASE_S = 2.337
"""Seconds of an undisturbed step; no round number, so that rounding shows."""


@dataclass(frozen=True)
class Excess:
    """Noise added to an undisturbed step, as fractions of it."""

    persistent: Times
    """Belongs to the step time: its mean over the run is the truth."""
    transient: Times
    """Does not: jitter around the level, spikes and warm-up."""


@dataclass(frozen=True)
class StepSeries:
    """One run's printed times in seconds, and the true step time."""

    times_s: Times
    truth_s: float
    lines: tuple[str, ...]
    """The log."""
    engine: str
    """Engine whose log is imitated."""


@dataclass(frozen=True)
class StepNoise:
    """One kind of noise within a run."""

    name: str
    excess: Callable[[Draw, int], Excess]
    decimals: int | None = 6
    """Decimals of the printed seconds; None prints three digits, as NeMo 1 does."""

    def series(self, rng: Draw, steps: int) -> StepSeries:
        """Return a run of `steps` steps; its first one is five times as long."""
        excess = self.excess(rng, steps)
        level_s = BASE_S * rng.uniform(0.9, 1.1)
        times = level_s * (1 + excess.persistent + excess.transient)
        times[0] *= 5
        truth_s = level_s * (1 + float(np.mean(excess.persistent)))
        if self.decimals is None:
            texts = [f"{time:.3g}" for time in times]
            lines = tuple(_NEMO_1.format(n=n, time=text) for n, text in enumerate(texts))
            return StepSeries(np.array([float(t) for t in texts]), truth_s, lines, "nemo1")
        texts = [f"{time:.{self.decimals}f}" for time in times]
        lines = tuple(f"step:{n + 1} - timing_s/step:{text}\n" for n, text in enumerate(texts))
        return StepSeries(np.array([float(t) for t in texts]), truth_s, lines, "verl")


_NEMO_1 = (
    "Epoch 0: :  10%|#         | {n}/9000 [02:15<20:00, v_num=0, reduced_train_loss=9.50, "
    "global_step={n}.0, consumed_samples=128.0, train_step_timing in s={time}]\n"
)


def correlated_noise(rng: Draw, steps: int, deviation: float, rho: float) -> Times:
    """AR(1) noise of this standard deviation and lag-1 correlation."""
    values = rng.normal(0.0, deviation, steps)
    for at in range(1, steps):
        values[at] = rho * values[at - 1] + (1 - rho**2) ** 0.5 * values[at]
    return values


def _share(rng: Draw, least: float, most: float) -> np.float64:
    return np.float64(rng.uniform(least, most))


def _jitter(rng: Draw, steps: int, deviation: float = 0.004) -> Times:
    return correlated_noise(rng, steps, deviation, 0.3)


def _autoregressive(rho: float) -> Callable[[Draw, int], Excess]:
    def excess(rng: Draw, steps: int) -> Excess:
        return Excess(np.zeros(steps), correlated_noise(rng, steps, rng.uniform(0.003, 0.02), rho))

    return excess


def _rounding(rng: Draw, steps: int) -> Excess:
    return Excess(np.zeros(steps), _jitter(rng, steps))


def _fat_tails(rng: Draw, steps: int) -> Excess:
    return Excess(np.zeros(steps), 0.004 * rng.standard_t(2.5, steps))


def _skew(rng: Draw, steps: int) -> Excess:
    """Waiting for the slowest of many: only ever longer."""
    return Excess(np.zeros(steps), 0.015 * (rng.exponential(1.0, steps) - np.log(2)))


def _random_spikes(rng: Draw, steps: int) -> Excess:
    hit = rng.random(steps) < rng.uniform(0.02, 0.12)
    return Excess(np.zeros(steps), _jitter(rng, steps) + hit * (0.1 + 0.2 * rng.pareto(2.0, steps)))


def _periodic_spikes(rng: Draw, steps: int) -> Excess:
    period = int(rng.choice([5, 10, 25, 50]))
    hit = np.arange(steps) % period == rng.integers(period)
    return Excess(np.zeros(steps), _jitter(rng, steps) + hit * rng.uniform(0.2, 2.0))


def _warm_up(fastest: float, slowest: float) -> Callable[[Draw, int], Excess]:
    def excess(rng: Draw, steps: int) -> Excess:
        fading = np.exp(-np.arange(steps) / rng.uniform(fastest, slowest))
        return Excess(np.zeros(steps), _jitter(rng, steps) + rng.uniform(0.1, 0.6) * fading)

    return excess


def _throttling(rng: Draw, steps: int) -> Excess:
    begin = rng.uniform(0.2, 0.9) * steps
    slow = _share(rng, 0.03, 0.1) * (np.arange(steps) >= begin)
    return Excess(slow, _jitter(rng, steps))


def _recovery(rng: Draw, steps: int) -> Excess:
    """A neighbour's job, which is there for a part of the run."""
    begin, length = rng.uniform(0.1, 0.6), rng.uniform(0.2, 0.35)
    at = np.arange(steps) / steps
    slow = _share(rng, 0.03, 0.1) * ((at >= begin) & (at < begin + length))
    return Excess(slow, _jitter(rng, steps))


def _gradual_recovery(rng: Draw, steps: int) -> Excess:
    """Throttling that comes within 8% of the run, stays for 10 to 40% of it, and goes as slowly."""
    begin, length = rng.uniform(0.1, 0.5), rng.uniform(0.1, 0.4)
    at = np.arange(steps) / steps - begin
    slow = np.clip(at / 0.08, 0, 1) * np.clip((length + 0.08 - at) / 0.08, 0, 1)
    return Excess(_share(rng, 0.02, 0.08) * slow, _jitter(rng, steps))


def _markov_clocks(rng: Draw, steps: int) -> Excess:
    """Clocks 4% apart that stay for 100 steps on average at the fast level, 40 at the slow one."""
    is_slow = np.zeros(steps, dtype=np.bool_)
    is_slow[0] = rng.random() < 40 / 140
    for at in range(1, steps):
        changes = rng.random() < (1 / 40 if is_slow[at - 1] else 1 / 100)
        is_slow[at] = is_slow[at - 1] ^ changes
    return Excess(0.04 * is_slow, _jitter(rng, steps))


def _drift(rng: Draw, steps: int) -> Excess:
    change = rng.choice([-1, 1]) * rng.uniform(0.01, 0.05)
    return Excess(change * np.linspace(0, 1, steps), _jitter(rng, steps))


def _bimodal(rng: Draw, steps: int) -> Excess:
    """Long and short batches in any order."""
    long = rng.random(steps) < rng.uniform(0.3, 0.7)
    return Excess(_share(rng, 0.04, 0.2) * long, _jitter(rng, steps))


def _switching(rng: Draw, steps: int) -> Excess:
    """Clocks that jump between two levels and stay for some steps."""
    turns = rng.random(steps) < 1 / rng.uniform(8, 25)
    return Excess(_share(rng, 0.02, 0.06) * (np.cumsum(turns) % 2), _jitter(rng, steps))


def _waves(rng: Draw, steps: int) -> Excess:
    """Temperature that goes up and down."""
    phase = 2 * np.pi * (np.arange(steps) / rng.uniform(20, 60) + rng.random())
    return Excess(rng.uniform(0.005, 0.015) * np.sin(phase), _jitter(rng, steps))


STEP_NOISES: tuple[StepNoise, ...] = (
    StepNoise("correlation 0.3", _autoregressive(0.3)),
    StepNoise("correlation 0.6", _autoregressive(0.6)),
    StepNoise("correlation 0.8", _autoregressive(0.8)),
    StepNoise("fat tails", _fat_tails),
    StepNoise("skewed", _skew),
    StepNoise("random spikes", _random_spikes),
    StepNoise("periodic spikes", _periodic_spikes),
    StepNoise("warm-up, tau 5-12", _warm_up(5, 12)),
    StepNoise("warm-up, tau 12-30", _warm_up(12, 30)),
    StepNoise("throttled from 20-90% on", _throttling),
    StepNoise("slow for a part", _recovery),
    StepNoise("throttled, recovers slowly", _gradual_recovery),
    StepNoise("clocks of two states", _markov_clocks),
    StepNoise("drift 1-5%", _drift),
    StepNoise("two kinds of steps", _bimodal),
    StepNoise("two clocks", _switching),
    StepNoise("waves", _waves),
    StepNoise("printed to 10 ms", _rounding, decimals=2),
    StepNoise("printed to 0.1 s", _rounding, decimals=1),
    StepNoise("printed to three digits", _rounding, decimals=None),
)
