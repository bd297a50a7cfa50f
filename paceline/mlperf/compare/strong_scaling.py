"""What more accelerators are worth: efficiency as a product of its causes.

A run's time is samples to the target / samples a second. From n0 to n1 accelerators

    n0 t0 / (n1 t1) = s0 / s1  *  (r1 / n1) / (r0 / n0)

with n accelerators, t the run time, s the samples to the target, which grow with the batch, and
r = s / t the samples a second of the whole run; 0 is the base, 1 the larger set. The second factor
is that of the training steps times what evaluations and the rest take away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.value import Value
from paceline.mlperf.compare.published_scores import PublishedScore
from paceline.mlperf.score.score import Score


@dataclass(frozen=True)
class StrongScalingPoint:
    """One set of runs: accelerators, olympic mean of the run times, mean samples to the target."""

    name: str
    official: bool
    num_devices: int
    minutes: float
    samples: float
    training_samples_per_s: float | None = None
    global_batch: int | None = None


class ScalingStep(Value):
    """One set of runs against the smallest; fractions, of which 1 is no loss."""

    name: str
    official: bool
    num_devices: int
    global_batch: int | None
    minutes: float
    """Olympic mean of the run times, before any scaling by the convergence test."""
    samples: float
    """To the target, mean of the runs that converged."""
    speedup: float
    efficiency: float
    samples_factor: float
    """Samples of the base / samples here: below 1 where the larger batch needs more."""
    throughput_factor: float
    """Samples a second and accelerator of the whole run, here / at the base."""
    training_factor: float | None
    """The part of it that training steps lose."""
    other_factor: float | None
    """The part that evaluations and the rest of the run lose."""


def scaling_steps(points: Sequence[StrongScalingPoint]) -> list[ScalingStep]:
    """Every set against the one on the fewest accelerators; empty below two sizes."""
    ordered = sorted(points, key=lambda point: point.num_devices)
    if len({point.num_devices for point in ordered}) < 2:
        return []
    return [_step(point, ordered[0]) for point in ordered]


def point_of_score(score: Score, name: str) -> StrongScalingPoint | None:
    """What a score says, None where it lacks devices, a mean run time or samples."""
    if not (score.num_devices and score.olympic_mean_minutes and score.mean_samples_to_target):
        return None
    return StrongScalingPoint(
        name=name,
        official=False,
        num_devices=score.num_devices,
        minutes=score.olympic_mean_minutes,
        samples=score.mean_samples_to_target,
        training_samples_per_s=score.median_samples_per_s,
        global_batch=score.counted_batch,
    )


def point_of_published(result: PublishedScore) -> StrongScalingPoint | None:
    """What a published result says, None where its samples or its run time are not known."""
    if not (result.olympic_mean_minutes and result.mean_samples_to_target):
        return None
    return StrongScalingPoint(
        name=f"{result.submitter} {result.system}",
        official=True,
        num_devices=result.gpus,
        minutes=result.olympic_mean_minutes,
        samples=result.mean_samples_to_target,
        training_samples_per_s=result.median_throughput_samples_s,
        global_batch=result.global_batch_size,
    )


def _step(point: StrongScalingPoint, base: StrongScalingPoint) -> ScalingStep:
    speedup = base.minutes / point.minutes
    samples = base.samples / point.samples
    efficiency = speedup * base.num_devices / point.num_devices
    throughput = efficiency / samples
    training = None
    if point.training_samples_per_s and base.training_samples_per_s:
        per_device = point.training_samples_per_s / point.num_devices
        training = per_device / (base.training_samples_per_s / base.num_devices)
    return ScalingStep(
        name=point.name,
        official=point.official,
        num_devices=point.num_devices,
        global_batch=point.global_batch,
        minutes=point.minutes,
        samples=point.samples,
        speedup=speedup,
        efficiency=efficiency,
        samples_factor=samples,
        throughput_factor=throughput,
        training_factor=training,
        other_factor=throughput / training if training else None,
    )
