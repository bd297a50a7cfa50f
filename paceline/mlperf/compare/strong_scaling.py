"""What more accelerators are worth: efficiency as a product of its causes.

A run's time is samples to the target / samples a second. From n0 to n1 accelerators

    n0 t0 / (n1 t1) = s0 / s1  *  (r1 / n1) / (r0 / n0)

with s the samples to the target, which grow with the batch, and r the samples a second of the whole
run. The second factor is that of the training steps times what evaluations and the rest take away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.value import Value
from paceline.mlperf.compare.published import PublishedScore
from paceline.mlperf.score.score import Score


@dataclass(frozen=True)
class Point:
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


def scaling_steps(points: Sequence[Point]) -> list[ScalingStep]:
    """Every set against the one on the fewest accelerators, by their number; empty below two sizes."""
    ordered = sorted(points, key=lambda one: one.num_devices)
    if len({one.num_devices for one in ordered}) < 2:
        return []
    return [_step(one, ordered[0]) for one in ordered]


def point_of_score(score: Score, name: str) -> Point | None:
    """What a score says, None where it lacks devices, a mean run time or samples."""
    if not (score.num_devices and score.olympic_mean_minutes and score.mean_samples_to_target):
        return None
    batches = {run.global_batch for run in score.runs if run.part == "counted"}
    return Point(
        name,
        False,
        score.num_devices,
        score.olympic_mean_minutes,
        score.mean_samples_to_target,
        score.median_samples_per_s,
        batches.pop() if len(batches) == 1 else None,
    )


def point_of_published(one: PublishedScore) -> Point | None:
    """What a published result says, None where its samples or its run time are not known."""
    if not (one.olympic_mean_minutes and one.mean_samples_to_target):
        return None
    return Point(
        f"{one.submitter} {one.system}",
        True,
        one.gpus,
        one.olympic_mean_minutes,
        one.mean_samples_to_target,
        one.median_throughput_samples_s,
        one.global_batch_size,
    )


def _step(one: Point, base: Point) -> ScalingStep:
    speedup = base.minutes / one.minutes
    samples = base.samples / one.samples
    efficiency = speedup * base.num_devices / one.num_devices
    throughput = efficiency / samples
    training = None
    if one.training_samples_per_s and base.training_samples_per_s:
        each = one.training_samples_per_s / one.num_devices
        training = each / (base.training_samples_per_s / base.num_devices)
    return ScalingStep(
        name=one.name,
        official=one.official,
        num_devices=one.num_devices,
        global_batch=one.global_batch,
        minutes=one.minutes,
        samples=one.samples,
        speedup=speedup,
        efficiency=efficiency,
        samples_factor=samples,
        throughput_factor=throughput,
        training_factor=training,
        other_factor=throughput / training if training else None,
    )
