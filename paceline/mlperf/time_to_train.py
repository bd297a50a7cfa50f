"""Estimated time to train a benchmark: estimated step time times reference samples.

The samples to the target are those that the reference convergence points of a round needed at this
batch. The step time comes from the time model. No published result is used.
"""

from __future__ import annotations

from math import exp, hypot, log

from paceline.core.errors import UserError
from paceline.core.run import RunSpec
from paceline.core.value import Value
from paceline.estimate.fit.interval import Z80
from paceline.estimate.single_estimate import Estimate
from paceline.mlperf.rules import UNOFFICIAL, find_benchmark
from paceline.mlperf.score.convergence import (
    ConvergenceReference,
    num_evaluations,
    reference_at,
    rulesets,
)

FORWARD_SHARE = 1 / 3
"""Time of an evaluation relative to a step on as many samples: one pass of three."""
UNSURE_EVALUATION = 0.3
"""Standard deviation of the log of the evaluation time; no published row was fitted to it."""
LABEL = f"an estimate, not a result: {UNOFFICIAL}"


class TimeToTrain(Value):
    """Estimated time from `run_start` to `run_stop`.

    80% of single runs are between `low_minutes` and `high_minutes`.
    """

    benchmark: str
    ruleset: str
    minutes: float
    low_minutes: float
    high_minutes: float
    samples: float
    """Samples to the target, from the reference at this batch."""
    samples_stdev: float
    """Standard deviation of the samples over the reference's runs."""
    reference_batches: tuple[int, ...]
    """Batch sizes of the references used."""
    num_evaluations: int
    evaluation_s: float
    """Estimated time of one evaluation in seconds."""
    label: str = LABEL


def time_to_train(spec: RunSpec, estimate: Estimate, ruleset: str) -> TimeToTrain:
    """Return the estimated time to train, t = S / r + n e.

    S are the samples to the target, r the samples/s and n the evaluations of e seconds each. e =
    samples / r / 3: an evaluation runs only the forward pass, one of the step's three passes. The
    interval treats the errors of the step time, of the reference's runs and of e as independent.
    Raises UserError for a recipe without a benchmark and for a batch or a round without a
    reference.
    """
    evaluation = spec.training.evaluation
    if spec.mlperf is None or evaluation is None:
        raise UserError(
            f"--mlperf {ruleset}",
            f"{spec.recipe} does not train an MLPerf benchmark",
            remedy="--variant mlperf-trial of llama31-8b, llama2-70b-lora, flux1-schnell, "
            "llama31-405b, gpt-oss-20b or deepseek-v3",
        )
    benchmark = find_benchmark(spec.mlperf.benchmark, f"--mlperf {ruleset}")
    reference = _reference(benchmark.name, ruleset, spec.training.global_batch, benchmark.num_runs)
    rate = estimate.samples_per_s
    evaluations = num_evaluations(reference, evaluation.every_samples, evaluation.skip_first)
    evaluation_s = evaluation.samples / rate * FORWARD_SHARE
    training_s, evaluating_s = reference.mean / rate, evaluations * evaluation_s
    total_s = training_s + evaluating_s
    sd = hypot(
        log(estimate.high_s / estimate.low_s) / (2 * Z80),
        reference.stdev / reference.mean,
        UNSURE_EVALUATION * evaluating_s / total_s,
    )
    return TimeToTrain(
        benchmark=benchmark.name,
        ruleset=ruleset,
        minutes=total_s / 60,
        low_minutes=total_s * exp(-Z80 * sd) / 60,
        high_minutes=total_s * exp(Z80 * sd) / 60,
        samples=reference.mean,
        samples_stdev=reference.stdev,
        reference_batches=reference.batches,
        num_evaluations=evaluations,
        evaluation_s=evaluation_s,
    )


def _reference(
    benchmark: str, ruleset: str, global_batch: int, num_runs: int
) -> ConvergenceReference:
    rounds = rulesets(benchmark)
    if rounds and ruleset not in rounds:
        raise UserError(f"--mlperf {ruleset}", f"has no {benchmark}", allowed=", ".join(rounds))
    reference = reference_at(benchmark, ruleset, global_batch, num_runs)
    if reference is None:
        raise UserError(
            f"a batch of {global_batch:,}",
            f"is larger than all reference convergence points of {benchmark}",
            remedy="--set training.global_batch=N",
        )
    return reference
