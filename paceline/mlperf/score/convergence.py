"""Test against reference convergence points (RCP): did the runs need enough samples?

A submission that needs fewer samples than the reference by more than chance allows is rejected. One
that needs fewer within chance has its time scaled up to the reference's samples.

Source: mlcommons/training_policies, training_rules.adoc; mlcommons/logging 4.1, rcp_checker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, hypot, sqrt
from statistics import fmean, pstdev
from typing import Literal

from paceline.core.value import Value
from paceline.files.references import ConvergencePoint, source
from paceline.mlperf.rules import SCORED_ONLY, TINY_VARIANTS

SIGNIFICANCE = 0.05
POINTS = "mlperf-rcp"
TINY_POINTS = "mlperf-tiny"
"""Source of Paceline's recorded runs of its tiny variants, which are in no MLPerf round."""

ReferenceKind = Literal["exact", "interpolated", "smaller-batch"]


class Convergence(Value):
    """Convergence of a set of runs compared with the reference, in olympic means of samples."""

    status: Literal["passed", "failed", "missing"]
    kind: ReferenceKind | None = None
    """Kind of reference; `smaller-batch` means the smallest one, for a batch below all of them."""
    reason: str | None = None
    global_batch: int
    reference_batches: tuple[int, ...]
    """Batch sizes of the references used for the comparison."""
    reference_samples: float | None = None
    """Samples that the reference needs at this batch."""
    reference_stdev: float | None = None
    """Standard deviation of the samples over the reference's runs."""
    min_samples: float | None = None
    """Smallest mean that chance explains at the 5% level."""
    samples: float | None = None
    """Samples that the runs needed."""
    scaling_factor: float | None = None
    """Factor of the score, max(1, reference samples / samples); None unless the test passed."""


@dataclass(frozen=True)
class ConvergenceReference:
    """Samples that the reference needs at one batch size, and the minimum for a submission."""

    batches: tuple[int, ...]
    global_batch: int
    mean: float
    stdev: float
    num_runs: int
    """Number of reference runs behind the mean, as the test counts them."""
    allowed_samples: int = 0
    """Samples by which the rules lower this benchmark's least mean."""

    def min_mean(self, num_submitted: int) -> float:
        """Return the smallest mean number of samples that passes the one-sided t-test.

            mean - t(0.95, n + m - 2) stdev sqrt(1/n + 1/m) - allowed_samples

        t(q, f) is the quantile of Student's distribution with f degrees of freedom. n counts the
        reference's runs, m those of the submission without its fastest and slowest. Both are
        assumed to have the reference's standard deviation.
        """
        # Slow to import, and estimates of the time to train do not need it.
        from scipy.special import stdtrit

        n, m = self.num_runs, num_submitted - 2
        quantile = float(stdtrit(n + m - 2, 1 - SIGNIFICANCE))
        return self.mean - quantile * self.stdev * sqrt(1 / n + 1 / m) - self.allowed_samples


def olympic_mean(values: Sequence[float]) -> float:
    """Return the mean without one smallest and one largest value; needs at least three."""
    return fmean(sorted(values)[1:-1])


def rulesets(benchmark: str | None = None) -> list[str]:
    """Return the rounds with references for `benchmark` (None: any benchmark), oldest first."""
    points = source(POINTS).convergence
    names = {r for p in points if benchmark in (None, p.benchmark) for r in p.rulesets}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def references(benchmark: str, ruleset: str) -> list[ConvergenceReference]:
    """Return a round's references by batch size, without the slow ones (`prune_references`).

    Those of a tiny variant are Paceline's own and apply to every round.
    """
    if benchmark in TINY_VARIANTS:
        points = [p for p in source(TINY_POINTS).convergence if p.benchmark == benchmark]
    else:
        points = [
            p
            for p in source(POINTS).convergence
            if p.benchmark == benchmark and ruleset in p.rulesets
        ]
    return prune_references(map(_reference, points))


def prune_references(references: Iterable[ConvergenceReference]) -> list[ConvergenceReference]:
    """Drop batches below the fastest, and any that is slower than its neighbors' line."""
    points = sorted(references, key=lambda r: r.global_batch)
    if not points:
        return []
    fastest = min(points, key=lambda r: r.mean)
    points = [r for r in points if r.global_batch >= fastest.global_batch]
    at = 1
    while at < len(points) - 1:
        below, middle, above = points[at - 1 : at + 2]
        if middle.mean > _interpolate(middle.global_batch, below, above, 2).mean:
            del points[at]
            # The official tool checks this index again, not the one before it.
            continue
        at += 1
    return points


def reference_at(
    benchmark: str, ruleset: str, global_batch: int, num_runs: int
) -> ConvergenceReference | None:
    """Return the reference at a batch size; None above the largest one known."""
    return _lookup(references(benchmark, ruleset), global_batch, num_runs)[0]


def compare_with_reference(
    references: Sequence[ConvergenceReference],
    global_batch: int,
    samples: Sequence[float],
    num_runs: int,
) -> Convergence:
    """Compare the `samples` to the target of `num_runs` runs at a batch size with `references`.

    A run that did not converge counts as infinite.
    """
    reference, kind = _lookup(references, global_batch, num_runs)
    if reference is None:
        largest = max((r.global_batch for r in references), default=0)
        why = f"no reference for a batch of {global_batch:,}; the largest is {largest:,}"
        return Convergence(
            status="missing", reason=why, global_batch=global_batch, reference_batches=()
        )
    mean, least = olympic_mean(samples), reference.min_mean(num_runs)
    passed = mean >= least
    missing = kind == "smaller-batch" and not passed
    return Convergence(
        status="passed" if passed else "missing" if missing else "failed",
        kind=kind,
        reason=None if passed else _too_few(mean, least, reference),
        global_batch=global_batch,
        reference_batches=reference.batches,
        reference_samples=reference.mean,
        reference_stdev=reference.stdev,
        min_samples=least,
        samples=mean,
        scaling_factor=max(1.0, reference.mean / mean) if passed else None,
    )


def _too_few(mean: float, least: float, reference: ConvergenceReference) -> str:
    return (
        f"the runs needed {mean:,.1f} samples on average; the reference at a batch of "
        f"{reference.global_batch:,} requires at least {least:,.1f}"
    )


def _lookup(
    references: Sequence[ConvergenceReference], global_batch: int, num_runs: int
) -> tuple[ConvergenceReference | None, ReferenceKind | None]:
    """Return the reference at a batch size, interpolated, or the smallest for a smaller batch."""
    below = [r for r in references if r.global_batch <= global_batch]
    above = [r for r in references if r.global_batch >= global_batch]
    if not above:
        return None, None
    if not below:
        return above[0], "smaller-batch"
    if below[-1].global_batch == global_batch:
        return below[-1], "exact"
    return _interpolate(global_batch, below[-1], above[0], 2 * num_runs), "interpolated"


def _reference(point: ConvergencePoint) -> ConvergenceReference:
    """Return a point's mean without the extremes and its deviation with them.

    The official tool computes both in this way.
    """
    samples, rules = point.samples_to_target, SCORED_ONLY.get(point.benchmark)
    return ConvergenceReference(
        batches=(point.global_batch,),
        global_batch=point.global_batch,
        mean=olympic_mean(samples),
        stdev=pstdev(samples),
        num_runs=len(samples) - 2,
        allowed_samples=rules.allowed_samples if rules else 0,
    )


def _interpolate(
    batch: int, below: ConvergenceReference, above: ConvergenceReference, num_runs: int
) -> ConvergenceReference:
    share = (batch - below.global_batch) / (above.global_batch - below.global_batch)
    return ConvergenceReference(
        batches=(below.global_batch, above.global_batch),
        global_batch=batch,
        mean=below.mean + share * (above.mean - below.mean),
        stdev=below.stdev + share * (above.stdev - below.stdev),
        num_runs=num_runs,
        allowed_samples=below.allowed_samples,
    )


COVERAGE = 0.9
QUANTILE = 1.6449
"""Quantile of the standard normal distribution: 5% of it is above."""
MEDIAN_TO_MEAN_ERROR = 1.2533
"""sqrt(pi / 2): standard error of the median / that of the mean, for many normal values."""


class MeasuredSpeed(Value):
    """Speed that a run measured."""

    samples_per_s: float
    """Samples/s during training."""
    relative_spread: float
    """Relative spread of the step times: 1.4826 x MAD / median."""
    num_steps: int
    """Number of measured steps."""
    evaluation_s: float
    """Time of one evaluation over all of its samples, in seconds."""


class ExpectedTime(Value):
    """Expected time to train; never a result."""

    minutes: float
    low_minutes: float
    high_minutes: float
    coverage: float = COVERAGE
    """Fraction of single runs between low and high, if the reference's samples hold."""
    samples: float
    """Samples to the target, from the reference at this batch."""
    samples_stdev: float
    """Standard deviation of the samples over the reference's runs."""
    reference_batches: tuple[int, ...]
    """Batch sizes of the references used."""
    num_evaluations: int
    speed: MeasuredSpeed


def num_evaluations(
    reference: ConvergenceReference, every_samples: int, skip_first: int = 0
) -> int:
    """Return the number of evaluations up to the reference's samples, at least 1.

    There is one after every `every_samples` samples, rounded up to whole steps, except the first
    `skip_first`.
    """
    interval = ceil(every_samples / reference.global_batch) * reference.global_batch
    return max(1, ceil(reference.mean / interval) - skip_first)


def expected_time(
    reference: ConvergenceReference, speed: MeasuredSpeed, every_samples: int, skip_first: int = 0
) -> ExpectedTime:
    """Return the expected time to train, t = S / r + n e seconds, with its interval.

    The interval is t (1 -+ z hypot(s / S, 1.2533 d / sqrt(k))). S: samples to the target by the
    reference; s: their deviation; r: samples/s; n: evaluations, one after `every_samples` (whole
    steps) without the first `skip_first`; e: seconds of one; d: relative spread of the k step
    times; z: the normal quantile.
    """
    evaluations = num_evaluations(reference, every_samples, skip_first)
    training_s = reference.mean / speed.samples_per_s
    total_s = training_s + evaluations * speed.evaluation_s
    # Steps vary independently, so their median is more certain than a single step.
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
