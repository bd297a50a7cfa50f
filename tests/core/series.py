"""Synthetic step series and runs whose truth is known, and what rules make of them.

Used by the tests in a short form and by benchmarks/verdicts.py in a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.compare.metric_comparison import RatioTest, compare_values
from paceline.compare.significance import Change
from paceline.core.steps import Steps
from paceline.core.window import steady_window

Times = npt.NDArray[np.float64]
TRUTH_S = 0.2


@dataclass(frozen=True)
class Workload:
    """How the steps of one kind of run come about; fractions are relative to the true step time."""

    steps: int = 100
    noise: float = 0.004
    correlation: float = 0.3
    """Lag-1 autocorrelation of the noise."""
    spike_rate: float = 0.0
    """Share of steps that a random spike hits."""
    spike_sizes: tuple[float, float] = (0.1, 0.6)
    """Smallest and largest excess of a random spike, evenly spread."""
    every: int = 0
    """Steps between spikes of `every_size` (checkpoint, evaluation); 0 means no spikes."""
    every_size: float = 0.25
    warm_up: bool = True
    """A first step 3 to 30 times as long, then an excess of 20-100% that fades in 1 to 8 steps."""

    def times(self, rng: np.random.Generator, truth_s: float = TRUTH_S) -> Times:
        """Step times in seconds of one run whose steady step takes `truth_s`."""
        n = self.steps
        excess = self._noise(rng)
        hit = rng.random(n) < self.spike_rate
        excess += np.where(hit, rng.uniform(*self.spike_sizes, n), 0.0)
        if self.every:
            phase = int(rng.integers(self.every))
            excess[phase :: self.every] += self.every_size
        if self.warm_up:
            excess += rng.uniform(0.2, 1.0) * np.exp(-np.arange(n) / rng.uniform(1.0, 8.0))
            excess[0] += rng.uniform(2.0, 29.0)
        return truth_s * (1 + excess)

    def _noise(self, rng: np.random.Generator) -> Times:
        fresh = rng.normal(0.0, self.noise * (1 - self.correlation**2) ** 0.5, self.steps)
        fresh[0] = rng.normal(0.0, self.noise)
        for step in range(1, self.steps):
            fresh[step] += self.correlation * fresh[step - 1]
        return fresh


SCENARIOS: dict[str, Workload] = {
    "warm-up only, 100 steps": Workload(),
    "3% spikes, 100 steps": Workload(spike_rate=0.03),
    "10% spikes, 100 steps": Workload(spike_rate=0.10),
    "3% spikes, 25 steps": Workload(steps=25, spike_rate=0.03),
    "3% spikes, 500 steps": Workload(steps=500, spike_rate=0.03),
    "every 10th step +25%, 200 steps": Workload(steps=200, every=10),
}


def of_steady_window(times: Times) -> float:
    """The step time that Paceline reports: median of the steady window."""
    return _median_and_state(times)[0]


def unless_drifting(times: Times) -> float:
    """The same; NaN where the window is called drifting, which leaves a verdict no confidence."""
    median, state = _median_and_state(times)
    return median if state == "steady" else np.nan


def _median_and_state(times: Times) -> tuple[float, str]:
    steps = Steps(
        index=np.arange(1, len(times) + 1),
        averaged_over=np.ones(len(times), dtype=np.int64),
        skipped=np.zeros(len(times), dtype=np.bool_),
        columns={"step_time_s": times},
    )
    window = steady_window(steps)
    return float(np.median(times[window.rows])), window.record.state


RULES: dict[str, Callable[[Times], float]] = {
    "median of the steady window": of_steady_window,
    "the same, drifting runs left out": unless_drifting,
    "last step": lambda times: float(times[-1]),
    "mean of steps 35-44": lambda times: float(times[34:44].mean()) if len(times) > 43 else np.nan,
    "mean without the first 5": lambda times: float(times[5:].mean()),
    "median without the first 5": lambda times: float(np.median(times[5:])),
}
"""The reported step time by rule; NaN where a series is too short for it, or refused."""


def errors(
    workload: Workload, rule: Callable[[Times], float], rng: np.random.Generator, n: int
) -> Times:
    """Relative errors of the step time that a rule reports, for n runs."""
    return np.array([rule(workload.times(rng)) / TRUTH_S - 1 for _ in range(n)])


def rmse(relative_errors: Times) -> float:
    """Root of the mean square of those that are numbers, relative; NaN without any."""
    finite = relative_errors[np.isfinite(relative_errors)]
    return float(np.sqrt(np.mean(finite**2))) if len(finite) else float("nan")


@dataclass(frozen=True)
class Machine:
    """Runs of one workload: their true step times differ from run to run."""

    between_runs: float = 0.004
    """Standard deviation of the log of a run's true step time."""
    heavy_tails: bool = False
    """Student's t with 3 degrees of freedom instead of a normal distribution of equal deviation."""
    workload: Workload | None = None
    """Steps of each run, read through the steady window; None takes the run's value as it is."""

    def medians(self, rng: np.random.Generator, n: int, change: float = 0.0) -> list[float]:
        """Reported step times of n runs that are `change` slower than TRUTH_S."""
        shape = rng.standard_t(3, n) / 3**0.5 if self.heavy_tails else rng.normal(size=n)
        truths = TRUTH_S * (1 + change) * np.exp(self.between_runs * shape)
        if self.workload is None:
            return [float(truth) for truth in truths]
        return [of_steady_window(self.workload.times(rng, truth)) for truth in truths]


@dataclass(frozen=True)
class Trial:
    """One kind of comparison, to be repeated many times."""

    n_a: int
    n_b: int
    change: float = 0.0
    """How much slower B truly is."""
    a: Machine = Machine()
    b: Machine = Machine()
    margin: float = 0.01
    follow_up: bool = False
    """Whether the repeats that an undecided comparison asks for are made, once."""

    def once(self, rng: np.random.Generator) -> RatioTest:
        """One comparison."""
        before = self.a.medians(rng, self.n_a)
        after = self.b.medians(rng, self.n_b, self.change)
        contrast = compare_values(before, after, self.margin)
        more = contrast.repeats_needed
        if self.follow_up and contrast.change == "undecided" and more is not None:
            before += self.a.medians(rng, more)
            after += self.b.medians(rng, more, self.change)
            return compare_values(before, after, self.margin)
        return contrast

    def rates(self, rng: np.random.Generator, n: int) -> dict[str, float]:
        """Shares of slower, faster, same and undecided among n comparisons."""
        changes = [self.once(rng).change for _ in range(n)]
        return {word: changes.count(change) / n for word, change in WORDS.items()}


WORDS: dict[str, Change] = {
    "slower": "higher",
    "faster": "lower",
    "same": "same",
    "undecided": "undecided",
}
"""What a change of a step time is called."""
