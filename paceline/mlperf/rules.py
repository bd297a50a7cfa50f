"""What the rules of MLPerf Training (closed division) fix for each benchmark that is known here.

Source: mlcommons/training_policies, training_rules.adoc; mlcommons/logging 4.1, the rule files of
compliance_checker and the numbers of runs in rcp_checker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError, did_you_mean
from paceline.mlperf.eligibility import NOT_A_RESULT

UNOFFICIAL = "unofficial, not verified by MLCommons Association"
NOT_A_METRIC = "model FLOP/s are not an official MLPerf metric"
DEFAULT_RULESET = "5.1.0"
RULESET_ORIGINS = {
    "option": "as asked for",
    "path": "the round in the path",
    "default": "the default",
}
"""Where a ruleset comes from, in words."""
MOST_INITIALISATION_MINUTES = 30.0
"""In the closed division; what exceeds it has to be timed."""

_ROUND = re.compile(r"(?:.*[_-])?v(\d{1,2})\.(\d{1,2})")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: how often it is run, which quality ends a run, and our recipe of its model."""

    name: str
    num_runs: int
    target: float
    """Largest evaluation result (a loss) that counts as converged."""
    recipe: str
    variant: str | None = None
    sibling_of: str | None = None
    """The benchmark whose structure it has in small; it is none itself."""

    @property
    def label(self) -> str:
        """What is said of everything that its runs yield."""
        if self.sibling_of is None:
            return UNOFFICIAL
        return f"{NOT_A_RESULT}: a small sibling of {self.sibling_of}"


TRIAL_VARIANT = "mlperf-trial"
"""Of a recipe: what is trained to the target, and logged."""

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("llama2_70b_lora", 10, 0.925, "llama2-70b-lora"),
        Benchmark("llama31_8b", 10, 3.3, "llama31-8b", "mlperf"),
        Benchmark("flux1", 10, 0.586, "flux1-schnell"),
    )
}
SIBLINGS = {
    small.name: small
    for small in (
        Benchmark(
            "llama2_70b_lora_tiny",
            10,
            2.6,
            "llama2-70b-lora-tiny",
            TRIAL_VARIANT,
            sibling_of="llama2_70b_lora",
        ),
        Benchmark(
            "llama31_8b_tiny", 10, 2.55, "llama31-8b-tiny", TRIAL_VARIANT, sibling_of="llama31_8b"
        ),
        Benchmark("flux1_tiny", 10, 0.7, "flux1-schnell-tiny", TRIAL_VARIANT, sibling_of="flux1"),
    )
}
"""Small trainings to a quality of their own, made for machines without accelerators."""


def benchmark_named(name: str, where: str) -> Benchmark:
    """The benchmark called `name`; raises UserError that speaks of `where` for an unknown one."""
    benchmarks = BENCHMARKS | SIBLINGS
    if name not in benchmarks:
        raise UserError(
            where,
            f"benchmark {name!r} is not known here",
            allowed=", ".join(BENCHMARKS),
            remedy=did_you_mean(name, benchmarks) or None,
        )
    return benchmarks[name]


def round_in(place: Path) -> tuple[str, str] | None:
    """The innermost folder named after a round (`v5.1`, `training_results_v5.1`), its ruleset."""
    for part in reversed(place.resolve().parts):
        if match := _ROUND.fullmatch(part):
            return part, f"{match[1]}.{match[2]}.0"
    return None
