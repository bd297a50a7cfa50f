"""The test against reference convergence points (RCP): did the runs need the samples they must?

A submission that needs fewer samples than the reference by more than chance allows is refused; one
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
from paceline.mlperf.rules import SCORED_ONLY, SIBLINGS

SIGNIFICANCE = 0.05
POINTS = "mlperf-rcp"
OWN_POINTS = "mlperf-tiny"
"""Recorded runs of our own small siblings, which no round has."""

ReferenceKind = Literal["exact", "interpolated", "smaller-batch"]


class Convergence(Value):
    """How a set of runs stands to the reference; samples are olympic means of runs."""

    status: Literal["passed", "failed", "missing"]
    kind: ReferenceKind | None = None
    """`smaller-batch`: the batch lies below every reference, and is held against the smallest."""
    reason: str | None = None
    global_batch: int
    reference_batches: tuple[int, ...]
    """Batch sizes whose references it is held against."""
    reference_samples: float | None = None
    reference_stdev: float | None = None
    least_samples: float | None = None
    """The smallest mean that chance explains at 5 %."""
    samples: float | None = None
    scaling_factor: float | None = None


@dataclass(frozen=True)
class ConvergenceReference:
    """Samples that the reference needs at one batch size, and the least that a submission may."""

    batches: tuple[int, ...]
    global_batch: int
    mean: float
    stdev: float
    num_runs: int
    """Reference runs behind the mean, as the test counts them."""
    allowed_samples: int = 0
    """By which the rules lower the least mean of this benchmark."""

    def least_mean(self, num_submitted: int) -> float:
        """mean - t(0.95, n + m - 2) stdev sqrt(1/n + 1/m) samples: where a one-sided t-test turns.

        Less what the rules allow the benchmark beside.
        t(q, f) is the quantile of Student's distribution with f degrees of freedom; n are the
        reference's runs, m those of the submission without its fastest and slowest; both are taken
        to have the reference's deviation.
        """
        # Slow to import, and what estimates a training to a target has no use for it.
        from scipy.special import stdtrit

        n, m = self.num_runs, num_submitted - 2
        quantile = float(stdtrit(n + m - 2, 1 - SIGNIFICANCE))
        return self.mean - quantile * self.stdev * sqrt(1 / n + 1 / m) - self.allowed_samples


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without one smallest and one largest value; needs at least three."""
    return fmean(sorted(values)[1:-1])


def rulesets(benchmark: str | None = None) -> list[str]:
    """Rounds for which references of `benchmark` (None = of any) are known, oldest first."""
    points = source(POINTS).convergence
    names = {r for p in points if benchmark in (None, p.benchmark) for r in p.rulesets}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def references(benchmark: str, ruleset: str) -> list[ConvergenceReference]:
    """The references that are used in a round, by batch size, slow ones left out (`pruned`).

    Those of a small sibling are our own, and hold for every round.
    """
    if benchmark in SIBLINGS:
        points = [p for p in source(OWN_POINTS).convergence if p.benchmark == benchmark]
    else:
        points = [
            p
            for p in source(POINTS).convergence
            if p.benchmark == benchmark and ruleset in p.rulesets
        ]
    return pruned(map(_reference, points))


def pruned(references: Iterable[ConvergenceReference]) -> list[ConvergenceReference]:
    """Without batches below the fastest, and any that is slower than its neighbours' line."""
    kept = sorted(references, key=lambda r: r.global_batch)
    if not kept:
        return []
    fastest = min(kept, key=lambda r: r.mean)
    kept = [r for r in kept if r.global_batch >= fastest.global_batch]
    at = 1
    while at < len(kept) - 1:
        below, middle, above = kept[at - 1 : at + 2]
        if middle.mean > _interpolated(middle.global_batch, below, above, 2).mean:
            del kept[at]
            # The official tool looks at this place again, not at the one before it.
            continue
        at += 1
    return kept


def reference_at(
    benchmark: str, ruleset: str, global_batch: int, num_runs: int
) -> ConvergenceReference | None:
    """What the reference needs at a batch size; None above the largest that is known."""
    return _lookup(references(benchmark, ruleset), global_batch, num_runs)[0]


def held_against(
    references: Sequence[ConvergenceReference],
    global_batch: int,
    samples: Sequence[float],
    num_runs: int,
) -> Convergence:
    """`samples` to the target of `num_runs` runs at a batch size, held against the `references`.

    A run that did not converge counts as infinite.
    """
    reference, kind = _lookup(references, global_batch, num_runs)
    if reference is None:
        largest = max((r.global_batch for r in references), default=0)
        why = f"no reference reaches a batch of {global_batch:,}: the largest is {largest:,}"
        return Convergence(
            status="missing", reason=why, global_batch=global_batch, reference_batches=()
        )
    mean, least = olympic_mean(samples), reference.least_mean(num_runs)
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
        least_samples=least,
        samples=mean,
        scaling_factor=max(1.0, reference.mean / mean) if passed else None,
    )


def _too_few(mean: float, least: float, reference: ConvergenceReference) -> str:
    return (
        f"the runs needed {mean:,.1f} samples on average, and the reference at a batch of "
        f"{reference.global_batch:,} allows no fewer than {least:,.1f}"
    )


def _lookup(
    references: Sequence[ConvergenceReference], global_batch: int, num_runs: int
) -> tuple[ConvergenceReference | None, ReferenceKind | None]:
    """The reference at a batch size, between its neighbours, or the smallest for a smaller one."""
    below = [r for r in references if r.global_batch <= global_batch]
    above = [r for r in references if r.global_batch >= global_batch]
    if not above:
        return None, None
    if not below:
        return above[0], "smaller-batch"
    if below[-1].global_batch == global_batch:
        return below[-1], "exact"
    return _interpolated(global_batch, below[-1], above[0], 2 * num_runs), "interpolated"


def _reference(point: ConvergencePoint) -> ConvergenceReference:
    """Mean without the extremes, deviation with them, as the official tool takes both."""
    samples, rules = point.samples_to_target, SCORED_ONLY.get(point.benchmark)
    return ConvergenceReference(
        batches=(point.global_batch,),
        global_batch=point.global_batch,
        mean=olympic_mean(samples),
        stdev=pstdev(samples),
        num_runs=len(samples) - 2,
        allowed_samples=rules.allowed_samples if rules else 0,
    )


def _interpolated(
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
