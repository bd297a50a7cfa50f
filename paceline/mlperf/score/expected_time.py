"""How long a run would train to its target, by its measured speed and the reference's samples.

For runs on random samples, whose loss means nothing: they show a system's speed, and the reference
convergence points say how many samples the target takes.
"""

from __future__ import annotations

from math import ceil, hypot

from paceline.core.value import Value
from paceline.mlperf.score.convergence import ConvergenceReference

COVERAGE = 0.9
QUANTILE = 1.6449
"""Of the standard normal distribution: 5 % lie above."""
MEDIAN_TO_MEAN_ERROR = 1.2533
"""sqrt(pi / 2): standard error of a median / that of a mean, of many normal values."""


class MeasuredSpeed(Value):
    """What a run measured."""

    samples_per_s: float
    """While it trains."""
    relative_spread: float
    """Of the step times: 1.4826 x MAD / median."""
    num_steps: int
    evaluation_s: float
    """One evaluation over all of its samples."""


class ExpectedTime(Value):
    """Expected time to train; never a result."""

    minutes: float
    low_minutes: float
    high_minutes: float
    """Between these lie nine of ten single runs, if the reference's samples hold."""
    coverage: float = COVERAGE
    samples: float
    """To the target, by the reference at this batch."""
    samples_stdev: float
    reference_batches: tuple[int, ...]
    num_evaluations: int
    speed: MeasuredSpeed


def num_evaluations(
    reference: ConvergenceReference, every_samples: int, skip_first: int = 0
) -> int:
    """Up to the reference's samples: one after `every_samples`, rounded up to whole steps."""
    interval = ceil(every_samples / reference.global_batch) * reference.global_batch
    return max(1, ceil(reference.mean / interval) - skip_first)


def expected_time(
    reference: ConvergenceReference, speed: MeasuredSpeed, every_samples: int, skip_first: int = 0
) -> ExpectedTime:
    """t = S / r + n e seconds, with the interval t (1 -+ z hypot(s / S, 1.2533 d / sqrt(k))).

    S: samples to the target by the reference and s their deviation; r: samples/s; n: evaluations,
    one after `every_samples` (whole steps) without the first `skip_first`; e: seconds of one;
    d: relative spread of the k step times; z: the normal quantile.
    """
    evaluations = num_evaluations(reference, every_samples, skip_first)
    training_s = reference.mean / speed.samples_per_s
    total_s = training_s + evaluations * speed.evaluation_s
    # Steps vary independently of each other; their median is surer than one of them.
    of_speed = MEDIAN_TO_MEAN_ERROR * speed.relative_spread / max(1, speed.num_steps) ** 0.5
    deviation = hypot(reference.stdev / reference.mean, of_speed)
    return ExpectedTime(
        minutes=total_s / 60,
        low_minutes=total_s * max(0.0, 1 - QUANTILE * deviation) / 60,
        high_minutes=total_s * (1 + QUANTILE * deviation) / 60,
        samples=reference.mean,
        samples_stdev=reference.stdev,
        reference_batches=reference.batches,
        num_evaluations=evaluations,
        speed=speed,
    )
