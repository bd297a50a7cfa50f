"""Compare scores with published results, and split strong-scaling efficiency into its causes.

A run's time is samples to the target / samples per second. The efficiency of going from n0 to n1
accelerators is a product of two factors:

    n0 t0 / (n1 t1) = s0 / s1  *  (r1 / n1) / (r0 / n0)

Here n is the number of accelerators, t the run time and s the samples to the target, which grow
with the batch. r = s / t is the samples per second of the whole run. Index 0 is the base, 1 the
larger set. The second factor is the product of two parts: the throughput of the training steps, and
the loss to evaluations and the rest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.text import as_text
from paceline.core.units import pluralize
from paceline.core.value import Value
from paceline.mlperf.compare.published_scores import (
    RESULTS,
    PublishedScore,
    accelerator_kind,
    accelerator_kinds,
    in_catalog,
    on_same_accelerators,
    published_scores,
    read_score,
    scores_of_round,
)
from paceline.mlperf.rules import UNOFFICIAL
from paceline.mlperf.score.score import Score, with_model_flops


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
    """One set of runs compared with the smallest set; a factor of 1 means no loss."""

    name: str
    official: bool
    num_devices: int
    global_batch: int | None
    minutes: float
    """Olympic mean of the run times, before any scaling by the convergence test."""
    samples: float
    """Mean samples to the target, over the runs that converged."""
    speedup: float
    """Run time of the base / run time of this set."""
    efficiency: float
    """Speedup x accelerators of the base / accelerators of this set."""
    samples_factor: float
    """Samples to the target at the base / in this set; below 1 if the larger batch needs more."""
    throughput_factor: float
    """Samples/s per accelerator over the whole run, in this set / at the base."""
    training_factor: float | None
    """Part of `throughput_factor` due to the training steps."""
    other_factor: float | None
    """Part of `throughput_factor` due to evaluations and the rest of the run."""


def scaling_steps(points: Sequence[StrongScalingPoint]) -> list[ScalingStep]:
    """Compare every set with the one on the fewest accelerators; empty below two sizes."""
    by_size = sorted(points, key=lambda point: point.num_devices)
    if len({point.num_devices for point in by_size}) < 2:
        return []
    return [_step(point, by_size[0]) for point in by_size]


def point_of_score(score: Score, name: str) -> StrongScalingPoint | None:
    """Return a score's point, None if it lacks devices, a mean run time or samples."""
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
    """Return a published result's point, None if its samples or its run time are unknown."""
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


OFFICIAL = "published by MLCommons Association; its score computed from the published logs"


class PublishedPeer(Value):
    """One published result on the same number and kind of accelerators."""

    submitter: str
    system: str
    round: str
    availability: str | None
    official: Literal[True] = True
    label: str = OFFICIAL
    score_minutes: float
    time_ratio: float
    """Minutes of the score / minutes of the published result; below 1 is faster."""
    global_batch: int | None
    mean_samples_to_target: float | None
    samples_per_s: float | None
    """Mean samples to the target / olympic mean of the run times, evaluations included."""
    is_same_result: bool = False
    """True if the scored logs are the logs of this published result."""


class ComparedScore(Value):
    """One scored set of runs."""

    name: str
    system: str | None
    status: str
    reason: str | None
    official: Literal[False] = False
    label: str = UNOFFICIAL
    score_minutes: float | None
    num_devices: int | None
    accelerator: str | None
    """Name in the catalog if the accelerator is listed there, else its own name."""
    global_batch: int | None
    mean_samples_to_target: float | None
    samples_per_s: float | None
    """Samples/s over the whole run, defined as for a `PublishedPeer`."""
    model_flops_per_s_per_device: float | None
    """Model FLOP/s per accelerator, evaluations included."""
    convention: str | None
    """Convention by which the model FLOPs are counted."""
    peers: tuple[PublishedPeer, ...] = ()
    """Published results on the same number and kind of accelerators."""


class PublishedScaling(Value):
    """Results of one submitter on one kind of accelerator, compared with the smallest."""

    submitter: str
    accelerator: str
    steps: tuple[ScalingStep, ...]


class ScoreComparison(Value):
    """Scores of one benchmark, round and division, compared with published results."""

    benchmark: str
    ruleset: str
    division: str
    source: str
    """Source of the published results."""
    official: Literal[False] = False
    label: str = UNOFFICIAL
    scores: tuple[ComparedScore, ...]
    """The user's scores."""
    published: tuple[PublishedScore, ...]
    """All known results of the benchmark in the round and division."""
    scaling: tuple[ScalingStep, ...]
    """Scores compared with the one on the fewest accelerators; empty below two sizes."""
    published_scaling: tuple[PublishedScaling, ...]
    """Strong scaling of published results on the accelerators of the scores."""
    notes: tuple[str, ...] = ()
    """Scores that could not be compared, and why."""


def compare(
    places: Sequence[Path],
    table: Path | None = None,
    *,
    ruleset: str | None = None,
    num_devices: Sequence[int] = (),
    accelerator: str | None = None,
) -> ScoreComparison:
    """Compare scores with published results.

    `places` are folders of runs, or files with the output of `mlperf score --json`. `num_devices`
    gives the number of devices of each place, in order, for logs that do not report it. Raises
    RuleViolationError for runs that are not results. Raises UserError for scores of different
    benchmarks, rounds or divisions, and for an unknown accelerator.
    """
    if len(num_devices) not in (0, len(places)):
        values, folders = pluralize(len(num_devices), "value"), pluralize(len(places), "folder")
        raise UserError("--gpus", f"has {values} for {folders}; give one per folder, in order")
    counts = [*num_devices] or [None] * len(places)
    scores = [read_score(place, ruleset, n) for place, n in zip(places, counts, strict=True)]
    benchmark = _single_value("benchmarks", [score.benchmark for score in scores])
    rules = _single_value("rulesets", [score.ruleset for score in scores])
    division = _single_value("divisions", [score.division or "closed" for score in scores])
    results = published_scores(table)
    _refuse_unknown(accelerator, results)
    published = scores_of_round(results, benchmark, rules, division)
    entries, points = [], []
    for place, read in zip(places, scores, strict=True):
        itself = _published_result_of(place, published)
        score = _with_published_devices(read, itself)
        kind = accelerator_kind(
            accelerator or score.device or (itself.accelerator if itself else None)
        )
        entries.append(_compared_score(score, place, kind, published, itself))
        points.append(point_of_score(score, as_text(str(place))))
    kinds = {score.accelerator for score in entries}
    return ScoreComparison(
        benchmark=benchmark,
        ruleset=rules,
        division=division,
        source=str(table) if table else f"references/{RESULTS}.yaml",
        scores=tuple(entries),
        published=tuple(published),
        scaling=tuple(scaling_steps([point for point in points if point])),
        published_scaling=tuple(_published_scaling(published, kinds)),
        notes=tuple(_notes(entries, published, points)),
    )


def _refuse_unknown(accelerator: str | None, published: Sequence[PublishedScore]) -> None:
    """Raise UserError for an accelerator in neither the published results nor the catalog."""
    kinds = accelerator_kinds(published)
    if accelerator is None or accelerator_kind(accelerator) in kinds or in_catalog(accelerator):
        return
    raise UserError(
        f"--accelerator {accelerator}",
        "is in neither the published results nor the catalog",
        allowed=f"{', '.join(kinds)}, or a name from `paceline recipes devices`",
    )


def _single_value(what: str, values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise UserError("DIR", f"cannot compare different {what}: {', '.join(distinct)}")
    return distinct[0]


def _published_result_of(place: Path, published: Sequence[PublishedScore]) -> PublishedScore | None:
    """Return the published result with logs at `<submitter>/.../<system>/<benchmark>`, if any."""
    parts = place.resolve().parts
    for result in published:
        if parts[-2:] == (result.system, result.benchmark) and result.submitter in parts[:-2]:
            return result
    return None


def _with_published_devices(score: Score, itself: PublishedScore | None) -> Score:
    """Return the score, with the published number of accelerators if the logs have none."""
    if score.num_devices is None and itself:
        return with_model_flops(score.model_copy(update={"num_devices": itself.gpus}))
    return score


def _compared_score(
    score: Score,
    place: Path,
    kind: str | None,
    published: Sequence[PublishedScore],
    itself: PublishedScore | None,
) -> ComparedScore:
    minutes = score.score_minutes
    peers = (
        on_same_accelerators(published, score.num_devices, kind)
        if score.num_devices and kind and minutes
        else []
    )
    return ComparedScore(
        name=as_text(str(place)),
        system=score.system,
        status=score.status,
        reason=score.reason,
        score_minutes=minutes,
        num_devices=score.num_devices,
        accelerator=kind,
        global_batch=score.counted_batch,
        mean_samples_to_target=score.mean_samples_to_target,
        samples_per_s=_samples_per_s(score),
        model_flops_per_s_per_device=score.model_flops_per_s_per_device,
        convention=score.convention,
        peers=tuple(_peer(minutes or 0.0, result, result is itself) for result in peers),
    )


def _samples_per_s(score: Score) -> float | None:
    """Return samples/s as published results define it.

    It is the mean samples to the target of all converged runs / the olympic mean of the run times.
    """
    if not (score.mean_samples_to_target and score.olympic_mean_minutes):
        return None
    return score.mean_samples_to_target / (60 * score.olympic_mean_minutes)


def _peer(minutes: float, result: PublishedScore, itself: bool) -> PublishedPeer:
    return PublishedPeer(
        submitter=result.submitter,
        system=result.system,
        round=result.round,
        availability=result.availability,
        score_minutes=result.score_minutes,
        time_ratio=minutes / result.score_minutes,
        global_batch=result.global_batch_size,
        mean_samples_to_target=result.mean_samples_to_target,
        samples_per_s=result.e2e_samples_per_s,
        is_same_result=itself,
    )


def _published_scaling(
    published: Sequence[PublishedScore], kinds: set[str | None]
) -> list[PublishedScaling]:
    """Return the strong scaling of each submitter with at least two sizes.

    Only results on an accelerator of the scores are used.
    """
    groups: dict[tuple[str, str], list[StrongScalingPoint]] = {}
    for result in published:
        kind, point = accelerator_kind(result.accelerator), point_of_published(result)
        if kind and kind in kinds and point:
            groups.setdefault((result.submitter, kind), []).append(point)
    scaled = [(names, scaling_steps(points)) for names, points in sorted(groups.items())]
    return [
        PublishedScaling(submitter=submitter, accelerator=kind, steps=tuple(steps))
        for (submitter, kind), steps in scaled
        if steps
    ]


def _notes(
    scores: Sequence[ComparedScore],
    published: Sequence[PublishedScore],
    points: Sequence[StrongScalingPoint | None],
) -> list[str]:
    """Return what could not be compared, and why."""
    notes: list[str] = []
    for score in scores:
        name, kind = score.name, score.accelerator
        if score.score_minutes is None:
            notes.append(f"{name}: no score, {score.status}: {score.reason}")
        elif score.num_devices is None:
            notes.append(f"{name}: unknown number of accelerators; set --gpus")
        elif kind is None:
            notes.append(f"{name}: unknown accelerator; set --accelerator")
        elif not score.peers:
            sizes = sorted({p.gpus for p in published if accelerator_kind(p.accelerator) == kind})
            others = ", ".join(accelerator_kinds(published)) or "none"
            available = f"sizes: {', '.join(map(str, sizes))}" if sizes else f"types: {others}"
            notes.append(
                f"{name}: no published result on {score.num_devices} x {kind} "
                f"(available {available})"
            )
    if len(scores) > 1 and len({p.num_devices for p in points if p}) < 2:
        notes.append("strong scaling needs two sets of runs on different numbers of accelerators")
    return notes
